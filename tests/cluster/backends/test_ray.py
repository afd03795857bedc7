"""Parts on a real Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilin.cluster.backends.base import BackendError, PartState
from resilin.cluster.backends.ray import backend
from tests.cluster import sharing
from tests.cluster.backends.elastic import hurry, part_of, part_of_rank_0, serving_store, training
from tests.cluster.backends.ray_cluster import ENVIRONMENT, Nodes

# The cluster is made by whichever test asks for it first.
pytestmark = [pytest.mark.nightly(part="clusters"), pytest.mark.timeout(400)]
PATIENCE = 120.0
"""Seconds after which something that has not happened never will."""
SAVES = "trap 'sleep 0.3; exit 7' USR1; echo $$ >> {}; while :; do sleep 0.05; done"
"""A command that writes down its process, and leaves in good order."""
REFUSES = "trap '' USR1; echo $$ >> {0}; setsid sleep 1000 & echo $! >> {0}; wait"
"""A command that does not leave, nor does its child in another session."""


@pytest.fixture(scope="module")
def nodes():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    handler = signal.getsignal(signal.SIGTERM)
    nodes = Nodes(4, 2)
    yield nodes
    import ray

    ray.shutdown()
    nodes.close()
    # Ray takes it when a driver connects, and other tests of this process need it.
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def ours(nodes):
    found = backend("test", {"address": nodes.address, "resource": "CPU"})
    assert found.detect() is None
    return found


@pytest.fixture
def names(ours):
    """Names of the nodes; at the end, nothing runs on them."""
    yield [node.name for node in ours.nodes()]
    for part in ours.list():
        ours.stop(part.name, 0)
    wait_until(lambda: all(part.state is PartState.ENDED for part in ours.list()))


def wait_until(what) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.1)


def status(ours, name):
    (found,) = [part for part in ours.list() if part.name == name]
    return found


def wait_for(ours, name, state):
    wait_until(lambda: status(ours, name).state is state)
    return status(ours, name)


def pids(path):
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def id_of(name):
    import ray

    (found,) = [each["NodeID"] for each in ray.nodes() if name.endswith(each["NodeID"][:8])]
    return found


def test_nodes_are_those_that_have_accelerators(ours):
    found = ours.nodes()
    assert len(found) == 4
    assert {(node.accelerators, node.kind, node.leaves) for node in found} == {(2, "cpu", None)}


def test_a_part_is_started_once_however_often_it_is_asked_for(ours, names, tmp_path):
    part = part_of("once-g1-0", names[0], SAVES.format(tmp_path / "pid"), accelerators=2)
    for _ in range(3):
        ours.start(part)
    running = wait_for(ours, part.name, PartState.RUNNING)
    assert running.node == names[0]
    wait_until(lambda: pids(tmp_path / "pid"))
    ours.start(part)
    ours.stop(part.name, 60)
    ended = wait_for(ours, part.name, PartState.ENDED)
    assert ended.code == 7
    ours.start(part)
    ours.stop(part.name, 60)
    assert status(ours, part.name) == ended
    # A second one would have had time: another part is started and seen to run on that node.
    ours.start(part_of("once-g2-0", names[0], "sleep 1000", accelerators=2))
    wait_for(ours, "once-g2-0", PartState.RUNNING)
    assert len(pids(tmp_path / "pid")) == 1


def test_a_part_that_does_not_leave_is_killed_with_all_its_processes(ours, names, tmp_path):
    part = part_of("stays-g1-0", names[1], REFUSES.format(tmp_path / "pids"))
    ours.start(part)
    wait_until(lambda: len(pids(tmp_path / "pids")) == 2)
    ours.stop(part.name, 3600)
    time.sleep(1)
    assert status(ours, part.name).state is PartState.RUNNING
    ours.stop(part.name, 0.5)
    assert wait_for(ours, part.name, PartState.ENDED).code == 128 + signal.SIGKILL
    assert all(map(is_gone, pids(tmp_path / "pids")))


def test_the_command_has_its_environment_directory_and_log(ours, names, tmp_path):
    part = part_of(
        "tells-g1-0",
        names[2],
        "echo $GREETING from $PWD; echo and more >&2",
        environment={"GREETING": "hello"},
        directory=str(tmp_path),
        log=str(tmp_path / "log"),
    )
    ours.start(part)
    assert wait_for(ours, part.name, PartState.ENDED).code == 0
    assert (tmp_path / "log").read_text() == f"hello from {tmp_path}\nand more\n"


def test_a_command_that_does_not_exist_has_the_code_of_a_shell(ours, names):
    ours.start(part_of("absent-g1-0", names[0], ["/no/such/program"]))
    ended = wait_for(ours, "absent-g1-0", PartState.ENDED)
    assert ended.code == 127
    assert "No such file or directory: '/no/such/program'" in ended.reason


def test_a_part_without_a_place_waits_and_can_be_stopped(ours, names, tmp_path):
    ours.start(part_of("first-g1-0", names[0], "sleep 1000", accelerators=2))
    wait_for(ours, "first-g1-0", PartState.RUNNING)
    ours.start(part_of("second-g1-0", names[0], SAVES.format(tmp_path / "pid")))
    assert status(ours, "second-g1-0").state is PartState.PENDING
    ours.stop("second-g1-0", 60)
    assert status(ours, "second-g1-0").state is PartState.ENDED
    ours.start(part_of("third-g1-0", names[0], SAVES.format(tmp_path / "third")))
    ours.stop("first-g1-0", 0)
    wait_for(ours, "third-g1-0", PartState.RUNNING)
    assert not (tmp_path / "pid").exists()


def test_what_others_use_of_a_node_is_not_ours(ours, names):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours.start(part_of("mine-g1-0", names[0], "sleep 1000"))
    wait_for(ours, "mine-g1-0", PartState.RUNNING)

    @ray.remote(num_cpus=1.0)
    class Other:
        def ready(self):
            return True

    there = [
        Other.options(scheduling_strategy=NodeAffinitySchedulingStrategy(id_of(name), soft=False))
        for name in names[:2]
    ]
    actors = [each.remote() for each in there]
    assert all(ray.get([actor.ready.remote() for actor in actors], timeout=PATIENCE))

    def accelerators():
        return [node.accelerators for node in ours.nodes()]

    wait_until(lambda: accelerators() == [1, 1, 2, 2])
    for actor in actors:
        ray.kill(actor)
    wait_until(lambda: accelerators() == [2, 2, 2, 2])


CONTROLLER = """
import sys, time
from resilin.cluster.backends.base import Part
from resilin.cluster.backends.ray import backend

address, node, *command = sys.argv[1:]
ours = backend("test", {"address": address, "resource": "CPU"})
ours.start(Part(name="left-g1-0", job="left", node=node, accelerators=1, command=command))
while ours.list()[-1].state.value != "running":
    time.sleep(0.1)
print("it runs", flush=True)
time.sleep(1000)
"""


def test_parts_outlive_the_controller_that_started_them(ours, names, nodes, tmp_path):
    command = ["bash", "-c", SAVES.format(tmp_path / "pid")]
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, nodes.address, names[3], *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    assert controller.stdout is not None
    assert any("it runs" in line for line in controller.stdout)
    controller.kill()
    controller.communicate(timeout=60)
    time.sleep(2)  # in which Ray ends what belongs to that process alone
    assert status(ours, "left-g1-0").state is PartState.RUNNING
    (pid,) = pids(tmp_path / "pid")
    assert not is_gone(pid)
    ours.stop("left-g1-0", 60)
    assert wait_for(ours, "left-g1-0", PartState.ENDED).code == 7


def test_a_ledger_that_is_killed_finds_the_parts_that_run(ours, names, tmp_path):
    import ray

    ours.start(part_of("kept-g1-0", names[1], SAVES.format(tmp_path / "pid"), accelerators=2))
    before = wait_for(ours, "kept-g1-0", PartState.RUNNING)
    ledger = ray.get_actor("ledger", namespace="resilin-test")

    def process():
        try:
            return ray.get(ledger.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE)
        except ray.exceptions.ActorUnavailableError:
            return None  # Ray starts it again

    first = process()
    ray.kill(ledger, no_restart=False)
    # It may answer once more: Ray kills it later.
    wait_until(lambda: process() not in (None, first))
    assert wait_for(ours, "kept-g1-0", PartState.RUNNING) == before
    assert [node.accelerators for node in ours.nodes()] == [2, 2, 2, 2]
    ours.stop("kept-g1-0", 60)
    assert wait_for(ours, "kept-g1-0", PartState.ENDED).code == 7
    assert len(pids(tmp_path / "pid")) == 1


def test_a_part_whose_node_is_lost_has_ended_and_leaves_nothing(ours, names, nodes, tmp_path):
    part = part_of("lost-g1-0", names[0], REFUSES.format(tmp_path / "pids"))
    ours.start(part)
    wait_until(lambda: len(pids(tmp_path / "pids")) == 2)
    nodes.order(f"kill {id_of(names[0])}")
    ended = wait_for(ours, part.name, PartState.ENDED)
    assert ended.code is None
    assert ended.reason
    assert ended.node == names[0]
    assert [node.name for node in ours.nodes()] == names[1:]
    wait_until(lambda: all(map(is_gone, pids(tmp_path / "pids"))))
    ours.start(part)
    assert status(ours, part.name) == ended
    with pytest.raises(BackendError, match=f"lost-g1-1 cannot start on {names[0]}: Ray has 1"):
        ours.start(part_of("lost-g1-1", names[0], "true"))
    nodes.order("add")
    wait_until(lambda: len(ours.nodes()) == 4)


def test_a_node_that_is_drained_says_when_it_leaves(ours, names, nodes):
    soon = int((time.time() + 3600) * 1000)
    added = nodes.order("add")
    wait_until(lambda: len(ours.nodes()) == 5)
    (name,) = [node.name for node in ours.nodes() if added.startswith(node.name[-8:])]
    # One without work is gone at once.
    ours.start(part_of("drained-g1-0", name, "sleep 1000"))
    wait_for(ours, "drained-g1-0", PartState.RUNNING)
    drain(nodes.address, added, soon)
    leaves = {node.name: node.leaves for node in ours.nodes()}
    assert leaves == {**dict.fromkeys(names), name: soon / 1000}
    ours.stop("drained-g1-0", 0)
    wait_until(lambda: len(ours.nodes()) == 4)


def drain(address, node, deadline):
    """Ask Ray to drain a node, as its autoscaler does before a machine is taken away."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    accepted, why = GcsClient(address).drain_node(node, reason, "reclaimed", deadline)
    assert accepted, why


# Elastic jobs -----------------------------------------------------------------------------------


def test_an_elastic_job_grows_and_shrinks_by_the_node_of_rank_0(ours, names, tmp_path):
    with serving_store() as endpoint:
        folder = tmp_path / "job"
        parts = [
            training(f"elastic-g1-{n}", names[n], endpoint, folder, epochs=4, seed=3)
            for n in range(3)
        ]
        ours.start(parts[0])
        wait_until(lambda: sharing.steps_done(folder) >= 2)
        for part in parts[1:]:
            ours.start(part)
        wait_until(lambda: sharing.sizes_of(folder)[-1] == 3)
        reached = sharing.steps_done(folder)
        wait_until(lambda: sharing.steps_done(folder) >= reached + 2)
        first = part_of_rank_0(folder)
        ours.stop(first, 60)
        # Its worker ends the agent by the other signal, which may come first.
        stopped = {128 + signal.SIGUSR1, 128 + signal.SIGTERM}
        assert wait_for(ours, first, PartState.ENDED).code in stopped
        hurry(folder)
        for part in parts:
            if part.name != first:
                assert wait_for(ours, part.name, PartState.ENDED).code == 0
    sizes = sharing.sizes_of(folder)
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 3, 2)
    sharing.assert_as_undisturbed(folder, epochs=4, seed=3)


# What cannot be honoured ----------------------------------------------------------------------


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert backend("test", {}).detect() == "the backend ray needs ray: pip install 'resilin[ray]'"


def test_an_option_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="option 'colour' must be one of address, resource, kind"):
        backend("test", {"colour": "red"})
