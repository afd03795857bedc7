"""Ray Train, elastic: nodes come and go, and each sample is trained on once.

Beside the promise stands what Ray Train does without resilin, as an assertion: the day it fails,
upstream has repaired the fault, and the guide has to say so.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import resilin
from resilin.compat.names import MissingNameError
from resilin.compat.ray_names import CONTEXT
from resilin.engine.ray import RayTrain
from resilin.training.state.memory import MemoryCopies
from tests.integrations import ray_job

# The cluster is made by whichever test asks for it first.
pytestmark = pytest.mark.timeout(300)
JOB = Path(__file__).with_name("ray_job.py")


# A cluster whose nodes come and go -----------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """What `ray_job.py` has done: one job, through which a node came and went."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    directory = tmp_path_factory.mktemp("ray")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RESILIN_RUN_DIR": "off",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own choice is 15: beside any other busy process, workers would hardly run.
        "RAY_worker_niceness": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        # How long Ray waits for a node that is gone before it makes do without.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2",
    }
    command = [sys.executable, JOB, directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    report = json.loads((directory / "report.json").read_text())
    for what, seconds in report["seconds"].items():
        print(f"{what}: {seconds:.1f} s")
    return SimpleNamespace(directory=directory, lines=lines_of(directory / "resilin"), **report)


def lines_of(directory):
    """What counts: a step that two generations have made, as the last one made it."""
    lines = ray_job.lines_of(directory)
    made_by: dict[int, int] = {}
    for line in lines:
        made_by[line["step"]] = max(line["generation"], made_by.get(line["step"], 0))
    return [line for line in lines if line["generation"] == made_by[line["step"]]]


def steps_of(lines):
    """The lines of each step, one for each replica."""
    steps: dict[int, list] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    return dict(sorted(steps.items()))


def size_of(lines):
    return sum(len(line["samples"]) for line in lines)


@pytest.mark.nightly(part="frameworks")
def test_a_node_that_comes_and_goes_costs_no_sample(cluster):
    # One worker, then two, then one again, in the middle of epochs; none began anew.
    seen = {g: [x for x in cluster.lines if x["generation"] == g] for g in range(3)}
    assert [{(x["replicas"], x["hosts"]) for x in seen[g]} for g in seen] == [
        {(1, 1)},
        {(2, 2)},
        {(1, 1)},
    ]
    assert [[*steps_of(seen[g])] for g in seen] == [[*range(4)], [*range(4, 11)], [*range(11, 16)]]
    assert [{x["epoch"] for x in seen[g]} for g in seen] == [{0}, {0, 1}, {1}]
    for epoch in range(ray_job.EPOCHS):
        samples = [s for x in cluster.lines if x["epoch"] == epoch for s in x["samples"]]
        assert sorted(samples) == [*range(ray_job.NUM)]


@pytest.mark.nightly(part="frameworks")
def test_accumulation_that_changes_in_mid_epoch_keeps_weights_and_replicas(cluster):
    steps = steps_of(cluster.lines)
    before, behind = steps[5], steps[6]
    assert [len(before), len(behind)] == [2, 2]
    assert {x["accumulation"] for x in before} == {1}
    assert {x["accumulation"] for x in behind} == {4}
    for lines in steps.values():
        assert len(lines) == lines[0]["replicas"]
        assert [x["weight"] for x in lines] == pytest.approx([1.0] * len(lines), abs=1e-12)
        # To the last bit.
        assert len({x["model"] for x in lines}) == 1


@pytest.mark.nightly(part="frameworks")
def test_the_batch_size_follows_its_trace_through_resizes(cluster):
    sizes = {step: size_of(lines) for step, lines in steps_of(cluster.lines).items()}
    # The last step of an epoch has what is left of it.
    left = {7: 1, 15: 23}
    assert sizes == {step: left.get(step, ray_job.TRACE.at(step)) for step in range(16)}


@pytest.mark.nightly(part="frameworks")
def test_the_schedule_by_samples_is_that_of_the_reference_run(cluster):
    done = 0
    for step, lines in steps_of(cluster.lines).items():
        # A plain loop with the reference batch makes 11 steps in each epoch of 103 samples.
        expected = ray_job.LR * ray_job.DECAY ** (done * 11 // ray_job.NUM)
        assert [x["lr"] for x in lines] == pytest.approx([expected] * len(lines)), step
        done += size_of(lines)


@pytest.mark.nightly(part="frameworks")
def test_the_job_ends_as_it_would_have_on_one_process(cluster, tmp_path):
    expected = ray_job.train(tmp_path)
    reference = steps_of(ray_job.lines_of(tmp_path / "resilin"))
    # The same samples in each step, split into 8 micro-batches here and into 4 there.
    assert reference[6][0]["accumulation"] == 8
    for step, lines in steps_of(cluster.lines).items():
        samples = sorted(s for line in lines for s in line["samples"])
        assert samples == sorted(reference[step][0]["samples"])
    assert cluster.result["steps"] == expected["steps"]
    weights = torch.tensor(cluster.result["weights"], dtype=torch.float64)
    assert torch.allclose(weights, torch.tensor(expected["weights"], dtype=torch.float64))


@pytest.mark.nightly(part="frameworks")
def test_ray_is_told_what_resilin_knows(cluster):
    # The one before may be lost: Ray had not fetched it yet when the node was killed.
    last = json.loads((cluster.directory / "metrics.txt").read_text().splitlines()[-1])
    assert (last["epoch"], last["resilin/replicas"], last["resilin/samples"]) == (1, 1, 206)
    assert (last["resilin/batch_size"], last["resilin/accumulation_steps"]) == (23, 6)
    assert {"resilin/gain", "resilin/progress", "resilin/scale"} <= last.keys()
    assert "resilin/noise_scale" in last


@pytest.mark.nightly(part="frameworks")
def test_the_checkpoint_is_where_ray_keeps_the_run_and_memory_is_given_back(cluster):
    (saved,) = (cluster.directory / "storage" / "job" / "resilin").glob("step-*")
    assert saved.name.startswith("step-000000000016")
    # Each call of fit has a memory of its own.
    assert cluster.result["name"].startswith("ray-")
    assert not list((cluster.directory / "memory").glob("*/*"))


@pytest.mark.nightly(part="frameworks")
def test_without_resilin_samples_are_repeated_and_the_batch_doubles(cluster):
    lines = ray_job.lines_of(cluster.directory / "stock")
    # What the model has seen: the steps up to the checkpoint, and those of two workers behind it.
    begun, resumed = [x for x in lines if not x["done"]], [x for x in lines if x["done"]]
    assert {line["done"] for line in resumed} == {4}
    samples = [s for line in (*begun, *resumed) for s in line["samples"]]
    # Ray starts the epoch again for a model that is in the middle of it.
    assert len(samples) - len(set(samples)) >= 40
    # And each worker takes the batch that was one worker's, at the same learning rate.
    assert size_of(steps_of(begun)[1]) == 10
    assert size_of(steps_of(resumed)[5]) == 20


# What Ray does to a process -------------------------------------------------------------------


@pytest.fixture
def as_worker(monkeypatch):
    """Makes this process a worker, as far as resilin can see."""

    def become(replica, num_replicas, node="a"):
        context = SimpleNamespace(
            get_world_rank=lambda: replica,
            get_world_size=lambda: num_replicas,
            train_run_context=SimpleNamespace(run_id="abc"),
        )
        module = SimpleNamespace(_train_context=context, get_train_context=lambda: context)
        monkeypatch.setitem(sys.modules, CONTEXT, module)
        ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: node))
        monkeypatch.setitem(sys.modules, "ray", ray)
        resilin.reset_job()

    return become


@pytest.mark.world_size(3)
def test_the_workers_are_those_that_ray_has_started(as_worker):
    rank = dist.get_rank()
    # Ray puts workers of a node beside each other, and orders nodes by nothing in particular.
    as_worker(rank, 3, node="bba"[rank])
    resilin.init_process_group()
    engine = resilin.current_job().engine
    assert isinstance(engine, RayTrain)
    assert (engine.membership.replica, engine.membership.num_replicas) == (rank, 3)
    assert (engine.membership.host, engine.membership.num_hosts) == ([0, 0, 1][rank], 2)
    assert (engine.membership.local_process, engine.membership.num_local_processes) == [
        (0, 2),
        (1, 2),
        (0, 1),
    ][rank]
    assert engine.memory_name == "ray-abc"


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("when", "lost_at", "last_kept"),
    [("after a step", 3, 2), ("within a step", 3, 3), ("after a step", 11, 10)],
    ids=["between steps", "within a step", "after the last step"],
)
def test_a_step_that_lost_its_process_group_is_not_kept(
    as_worker, monkeypatch, tmp_path, when, lost_at, last_kept
):
    """Ray destroys the group from another thread during the training."""
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    as_worker(dist.get_rank(), 2)
    resilin.checkpoint_to(None, memory_every=1)
    data, net, optimizer, _ = ray_job.make_parts()
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data, batch_size=10, shuffle=True)
    job = resilin.current_job()

    def train():
        for _ in resilin.remaining_epochs_until(1):
            for x, y, _ in loader:
                if job.clock.steps == lost_at and when == "within a step":
                    dist.destroy_process_group()
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if job.clock.steps == lost_at and when == "after a step":
                    dist.destroy_process_group()

    with pytest.raises(RuntimeError, match="destroyed the process group of its 2 workers"):
        train()
    # The last copy may still be on its way: a thread writes it.
    memory, deadline = MemoryCopies(tmp_path / "memory"), time.monotonic() + 30
    while memory.scan().versions[0].step != last_kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert memory.scan().versions[0].step == last_kept


@pytest.mark.parametrize("memory", ["on", "off"])
def test_all_workers_wait_for_each_other_at_the_end(as_worker, monkeypatch, tmp_path, memory):
    """Also one without memory copies: the others have some to give back, and wait for it."""
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory") if memory == "on" else "off")
    as_worker(0, 1)
    resilin.checkpoint_to(tmp_path / "saved", every=None)
    job = resilin.current_job()
    asked = []
    monkeypatch.setattr(job.engine, "gather", lambda value: asked.append(value) or [value])
    resilin.resume()
    asked.clear()
    job.recovery.finish()
    assert asked == [None]


def test_workers_without_a_process_group_are_refused(as_worker):
    as_worker(0, 2)
    with pytest.raises(ValueError, match="has started 2 workers, and their process group has 0"):
        resilin.current_job().engine  # noqa: B018


def test_a_job_that_is_asked_to_stop_tells_ray_that_there_is_more_to_do(as_worker):
    as_worker(0, 1)
    engine = resilin.current_job().engine
    engine.stop.request("the machine goes")
    with pytest.raises(RuntimeError, match=r"stopped \(the machine goes\).* max_failures"):
        engine.leave(asked=True)


# The integration ------------------------------------------------------------------------------


@pytest.fixture
def integration(monkeypatch):
    """`resilin.integrations.ray`, loaded with Ray itself, whose calls are then only recorded."""
    pytest.importorskip("ray")
    module = importlib.import_module("resilin.integrations.ray")
    train = SimpleNamespace(reported=[])
    train.report = lambda metrics, **kwargs: train.reported.append((metrics, kwargs))
    monkeypatch.setattr(module, "_train", train)
    return module


def test_a_ray_that_lacks_a_name_is_refused_at_import(integration, monkeypatch):
    context = importlib.import_module(CONTEXT)
    monkeypatch.delattr(context.TrainContext, "get_world_rank")
    monkeypatch.delitem(sys.modules, integration.__name__)
    with pytest.raises(
        MissingNameError, match=r"needs \S+\.TrainContext\.get_world_rank, which ray"
    ):
        importlib.import_module(integration.__name__)


@pytest.mark.parametrize(
    ("kind", "path", "url"),
    [("local", "/mnt/runs/a", "/mnt/runs/a/resilin"), ("s3", "b/a", "s3://b/a/resilin")],
)
def test_checkpoints_go_where_ray_keeps_the_run(integration, as_worker, kind, path, url):
    as_worker(0, 1)
    place = SimpleNamespace(
        storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path=path
    )
    integration._train.get_context = lambda: SimpleNamespace(get_storage=lambda: place)
    assert integration.storage() == url


def test_a_storage_without_a_url_is_refused(integration, as_worker):
    as_worker(0, 1)
    place = SimpleNamespace(
        storage_filesystem=SimpleNamespace(type_name="py::mine"), experiment_fs_path="b/a"
    )
    integration._train.get_context = lambda: SimpleNamespace(get_storage=lambda: place)
    with pytest.raises(ValueError, match=r"\(py::mine\) must be one of local, s3, gcs"):
        integration.storage()


def test_a_metric_with_a_name_of_resilin_is_refused(integration):
    data, net, optimizer, _ = ray_job.make_parts()
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data, batch_size=50)
    for x, y, _ in loader:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    integration.report({"loss": 1.0}, checkpoint=None)
    ((metrics, kwargs),) = integration._train.reported
    assert (metrics["loss"], metrics["resilin/samples"]) == (1.0, 103)
    assert kwargs == {"checkpoint": None}
    with pytest.raises(ValueError, match="metrics has resilin/gain, which resilin reports"):
        integration.report({"resilin/gain": 1.0})


def test_outside_of_a_worker_there_is_no_storage(integration):
    with pytest.raises(
        ValueError, match=r"outside of a worker of Ray Train: call it in train_loop"
    ):
        integration.storage()


def test_without_ray_one_sentence_says_what_to_install(monkeypatch):
    for name in ("ray", "ray.train"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "resilin.integrations.ray", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("resilin.integrations.ray")
    assert str(caught.value) == ("resilin.integrations.ray needs ray: pip install 'resilin[ray]'")
