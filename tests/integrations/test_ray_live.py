"""Live on Ray: actors and nodes come and go, survivors keep their processes, nothing is lost."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import forked
from tests.integrations import ray_live_job as job_file

# The cluster is made by whichever test asks for it first.
pytestmark = pytest.mark.timeout(400)
JOB = Path(__file__).with_name("ray_live_job.py")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What `ray_live_job.py` has done: one job through a kill, a new node, and the loss of it."""
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
    }
    command = [sys.executable, JOB, directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    report = json.loads((directory / "report.json").read_text())
    killed, when = json.loads((directory / "killed").read_text())
    before = json.loads((directory / "before.json").read_text())
    return SimpleNamespace(**report, killed=killed, when=when, before=before)


@pytest.fixture(scope="module")
def undisturbed():
    command = [sys.executable, "-c", "import json, tests.integrations.ray_live_job as job; "]
    command[-1] += "print(json.dumps(job.train(None)))"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off"}
    root = Path(__file__).parents[2]
    done = forked.run(
        command, capture_output=True, text=True, timeout=200, env=env, cwd=root, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.nightly(part="frameworks")
def test_the_model_is_that_of_the_undisturbed_run(job, undisturbed):
    expected = torch.tensor(undisturbed["weights"], dtype=torch.float64)
    for result in job.results:
        found = torch.tensor(result["weights"], dtype=torch.float64)
        assert ((found - expected).abs() / expected.abs().max()).max() < 1e-12


@pytest.mark.nightly(part="frameworks")
def test_replicas_are_equal(job):
    first, *others = job.results
    assert len(others) == 1
    for other in others:
        assert (first["weights"], first["seen"]) == (other["weights"], other["seen"])


@pytest.mark.nightly(part="frameworks")
def test_each_sample_is_in_one_committed_step_of_each_epoch(job):
    seen = torch.tensor(job.results[0]["seen"], dtype=torch.float64)
    assert (seen - job_file.EPOCHS).abs().max() < 1e-9


@pytest.mark.nightly(part="frameworks")
def test_survivors_keep_their_processes(job):
    ends = [result["pid"] for result in job.results]
    before = [member["pid"] for member in job.before["members"]]
    assert len(before) == 3
    assert [pid for pid in before if pid != job.victim] == ends
    assert job.killed not in before
    # The first one has made all steps, from the first to the last.
    steps = [step for _, step, *_ in job.results[0]["steps"]]
    total = job_file.EPOCHS * job_file.N // job_file.BATCH
    assert sorted(set(steps)) == list(range(total))


@pytest.mark.nightly(part="frameworks")
def test_a_loss_costs_the_step_under_way_and_nothing_else(job):
    steps = [step for _, step, *_ in job.results[0]["steps"]]
    again = {step for step in steps if steps.count(step) > 1}
    assert again <= {job_file.KILL, job_file.LOST}
    assert len(steps) <= len(set(steps)) + 2


@pytest.mark.nightly(part="frameworks")
def test_a_killed_worker_is_replaced_and_a_node_brings_one_more(job):
    sizes = {step: size for _, step, size, _ in job.results[0]["steps"]}
    assert sizes[job_file.KILL - 1] == 2
    assert sizes[job_file.KILL] == 1
    assert sizes[job_file.REPLACED + 1] == 2
    assert sizes[job_file.ADDED + 1] == 3
    assert sizes[job_file.LOST] == 2


@pytest.mark.nightly(part="frameworks")
def test_the_new_worker_was_on_the_new_node(job):
    nodes = {member["pid"]: member["node"] for member in job.before["members"]}
    assert len(set(nodes.values())) == 2
    assert [pid for pid in nodes if nodes[pid] == nodes[job.victim]] == [job.victim]


@pytest.mark.nightly(part="frameworks")
def test_an_error_before_the_first_step_ends_the_job_with_its_words(job):
    is_of_its_kind, text = job.error
    assert is_of_its_kind
    assert "not on monday" in text


@pytest.mark.nightly(part="frameworks")
def test_a_lost_authority_costs_a_restart_from_the_checkpoint(job):
    first, *_, last = job.again
    assert 0 < first <= 6
    assert last == 9


def test_a_worker_that_falls_silent_is_frozen_and_one_that_has_not_begun_is_not(monkeypatch):
    pytest.importorskip("ray")
    from resilin.integrations import ray_crew

    now = 0.0
    monkeypatch.setattr(ray_crew.time, "monotonic", lambda: now)
    hands = [ray_crew.Hand(n, f"w-{n}", 0, 0) for n in range(4)]
    crew = ray_crew.Crew("w", {}, hands, _looked=now)
    for hand in crew.hands[:3]:
        hand.result = "awaited"
    beats = {"w-0": 1, "w-1": 1}
    frozen = {}
    for tick in range(1, 31):
        now = tick * ray_crew.TICK
        beats["w-0"] += 1
        for hand in crew.frozen(1.0, beats):
            frozen.setdefault(hand.name, tick)
    # The first look counts its first sign; the silence is that of ten more.
    assert list(frozen) == ["w-1"]
    assert frozen["w-1"] in (11, 12)


def test_an_authority_that_was_stopped_itself_takes_nobody_for_frozen(monkeypatch):
    pytest.importorskip("ray")
    from resilin.integrations import ray_crew

    now = 0.0
    monkeypatch.setattr(ray_crew.time, "monotonic", lambda: now)
    crew = ray_crew.Crew("w", {}, [ray_crew.Hand(0, "w-0", 0, 0, result="awaited")])
    assert list(crew.frozen(1.0, {"w-0": 1})) == []
    now = 1000.0
    assert list(crew.frozen(1.0, {"w-0": 1})) == []


# What cannot be honoured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_workers": 0}, r"min_workers \(0\) must be at least 1"),
        ({"min_workers": 3}, r"min_workers \(3\) must be .* at most max_workers \(2\)"),
        ({"resources_per_worker": {"GPU": 1}}, "asks for 1 GPUs, .* TorchTrainer"),
        ({"resources_per_worker": {"CPU": -1}}, r"\['CPU'\] \(-1\) must be at least 0"),
        ({"max_failures": -2}, r"max_failures \(-2\) must be at least 0, or -1"),
        ({"heartbeat": 0}, r"heartbeat \(0\) must be a number of seconds above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(arguments, words):
    pytest.importorskip("ray")
    from resilin.integrations.ray_live import run_live

    with pytest.raises(ValueError, match=words):
        run_live(print, **{"min_workers": 1, "max_workers": 2, **arguments})
