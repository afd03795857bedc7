"""Three elastic jobs share four nodes of a real Ray cluster under the controller."""

import importlib.util
import json

import pytest

from tests.cluster.backends.ray_cluster import ENVIRONMENT, Nodes
from tests.cluster.served import Served, sharing_launch
from tests.cluster.sharing import assert_as_undisturbed, sizes_of, steps_done

EPOCHS = 6
NAMES = ("first", "second", "third")


@pytest.fixture
def nodes():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    nodes = Nodes(4, 1)
    yield nodes
    nodes.close()


@pytest.mark.timeout(900)
def test_three_jobs_share_four_ray_nodes_of_which_one_is_drained_and_one_is_lost(nodes, tmp_path):
    folders = {name: tmp_path / name for name in NAMES}
    for folder in folders.values():
        (folder / "diaries").mkdir(parents=True)
    options = ("--backend", "ray", "--option", f"address={nodes.address}")
    options += ("--option", "resource=CPU", "--interval", "5", "--grace", "60")
    with Served(tmp_path / "state", *options, env=ENVIRONMENT) as served:
        for seed, (name, folder) in enumerate(folders.items()):
            launch = sharing_launch(folder, name, epochs=EPOCHS, seed=seed, max=4)
            assert served.client.submit(launch) == name
        served.wait(lambda: all(steps_done(folder) > 5 for folder in folders.values()))
        drained = next(iter(served.job("first")["nodes"]))
        served.client.drain(drained)
        # The controller dies on the way, and another one takes over.
        served.kill()
        served.start()
        served.wait(
            lambda: not any(n["jobs"] for n in served.client.nodes() if n["name"] == drained)
        )
        lost = next(iter(n["name"] for n in served.client.nodes() if n["jobs"]))
        (its_id,) = [each for each in nodes.ids if each.startswith(lost[-8:])]
        nodes.order(f"kill {its_id}")
        served.wait(lambda: all(served.phase(name) == "finished" for name in NAMES), 600)
        used = {node["name"]: node["jobs"] for node in served.client.nodes()}
        assert lost not in used
        assert not used[drained]
        restarts = [served.job(name)["restarts"] for name in NAMES]
        failures = [served.job(name)["failures"] for name in NAMES]
        journal = (tmp_path / "state" / "journal.jsonl").read_bytes().splitlines()
    assert sum(restarts) > 0
    assert failures == [0, 0, 0]
    records = [json.loads(line.partition(b" ")[2]) for line in journal]
    started = [each["name"] for each in records if each["record"] == "Announced"]
    assert len(started) == len(set(started))
    assert sum(len(sizes_of(folder)) for folder in folders.values()) > len(NAMES)
    for seed, folder in enumerate(folders.values()):
        assert_as_undisturbed(folder, epochs=EPOCHS, seed=seed)
