"""Live jobs, started by `resilin run --live`, whose members die at the worst moments.

Nothing here depends on time: each member kills itself where the test says (`job.py`), and whoever
has to wait for somebody waits for that.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.processes

JOB = Path(__file__).with_name("job.py")
EPOCHS = 3
STEPS = 10
"""Steps in an epoch."""


def environment(tmp_path, settings):
    marks = tmp_path / "marks"
    marks.touch()
    said = {"marks": str(marks), "epochs": EPOCHS, **settings}
    return {
        **os.environ,
        "LIVE_TEST": json.dumps(said),
        "OMP_NUM_THREADS": "1",
        "RESILIN_LOG": "INFO",
    }


def run(tmp_path, settings, *arguments, replicas=3, live=True):
    """Runs the job, and returns what its members report at the end, and what was logged."""
    kind = (
        ["--live", "--warm", "--nproc", str(replicas)]
        if live
        else ["--warm", "--nproc", str(replicas)]
    )
    command = [sys.executable, "-m", "resilin.cli", "run", *kind, "--run-dir", "off", *arguments]
    done = forked.run(
        [*command, str(JOB)],
        env=environment(tmp_path, settings),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return reports(tmp_path), done.stderr


def reports(tmp_path):
    lines = (tmp_path / "marks").read_text().splitlines()
    return [json.loads(line.removeprefix("end ")) for line in lines if line.startswith("end ")]


def died(tmp_path):
    return [line for line in (tmp_path / "marks").read_text().splitlines() if line[:4] != "end "]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The reports of undisturbed runs on one process, by the features of the job."""
    known = {}

    def reference(features=(), epochs=EPOCHS):
        key = (tuple(sorted(features)), epochs)
        if key not in known:
            path = tmp_path_factory.mktemp("undisturbed")
            settings = {"features": sorted(features), "epochs": epochs}
            forked.run(
                [sys.executable, str(JOB)],
                env=environment(path, settings),
                check=True,
                timeout=240,
            )
            (known[key],) = reports(path)
        return known[key]

    return reference


def assert_as_undisturbed(found, reference, epochs=EPOCHS):
    """Each sample was used once per epoch, and the model is the one of the undisturbed run."""
    assert found
    first = found[0]
    for each in found:
        assert each["parameters"] == first["parameters"]  # the same bits
        assert each["steps"] == epochs * STEPS
        assert each["seen"] == [float(epochs)]
        assert each["lr"] == pytest.approx(reference["lr"], rel=1e-15)
    apart = [abs(a - b) for a, b in zip(first["parameters"], reference["parameters"], strict=True)]
    assert max(apart) <= 1e-12 * max(map(abs, reference["parameters"]))


@pytest.mark.parametrize(
    "fault",
    [
        {"member": 0, "at": "forward", "step": 0},
        {"member": 2, "at": "backward", "step": 13},
        {"member": 1, "at": "before_step", "step": STEPS - 1},
        {"member": 0, "at": "end_of_epoch", "epoch": 0},
        {"member": 2, "at": "after_epoch", "epoch": 1},
        {"member": 0, "at": "backward", "step": EPOCHS * STEPS - 1},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())),
)
def test_a_killed_member_costs_nothing(tmp_path, undisturbed, fault):
    found, log = run(tmp_path, {"faults": [fault]})
    assert died(tmp_path) == [f"{fault['at']} {fault['member']}"]
    assert_as_undisturbed(found, undisturbed())
    assert "restart" not in log
    for each in found:
        # What a member has not added before it died, nobody can know.
        expected = [240.0] * (EPOCHS - len(each["sums"])) + each["sums"]
        lacks = fault["at"] == "before_step"
        assert all(total == 240 or (lacks and 232 <= total < 240) for total in expected)


@pytest.mark.nightly(part="jobs")
def test_an_average_of_the_weights_is_what_it_would_have_been(tmp_path, undisturbed):
    faults = [
        # Within an evaluation: the model has the averaged weights when copies of it are made.
        {"member": 1, "at": "evaluation", "epoch": 0},
        {"member": 2, "at": "ballot", "step": 13},
        {"member": 0, "at": "backward", "step": 23},
    ]
    features = {"ema", "copies"}
    found, _ = run(tmp_path, {"faults": faults, "features": sorted(features)})
    assert died(tmp_path) == ["evaluation 1", "ballot 2", "backward 0"]
    reference = undisturbed(features)
    assert_as_undisturbed(found, reference)
    for each in found:
        assert each["averages"] == found[0]["averages"]
        assert each["averages"] == pytest.approx(reference["averages"], rel=1e-10)
        assert each["averages"] != pytest.approx(each["parameters"][: 16 * 8], rel=1e-3)


@pytest.mark.parametrize("place", ["in_question", "in_clear"])
def test_a_member_that_dies_among_those_who_add_up(tmp_path, undisturbed, place):
    found, _ = run(tmp_path, {"faults": [{"member": 1, "at": place, "epoch": 1}]})
    assert died(tmp_path) == [f"{place} 1"]
    assert_as_undisturbed(found, undisturbed())
    for each in found:
        # Nobody knows whether it would have cleared its part: never is a sample counted twice.
        assert all(total <= 240 for total in (*each["sums"], *each["cleared"]))
        assert each["sums"][:1] == each["cleared"][:1] == [240.0]
        assert each["sums"][2] == each["cleared"][2] == 240
    assert {tuple(each["cleared"]) for each in found} == {tuple(found[0]["cleared"])}


def test_two_members_die_in_one_step(tmp_path, undisturbed):
    faults = [{"member": m, "at": "backward", "step": 13} for m in (0, 1)]
    found, _ = run(tmp_path, {"faults": faults})
    assert len(died(tmp_path)) == 2
    assert_as_undisturbed(found, undisturbed())


def test_a_lost_member_is_replaced_and_healed(tmp_path, undisturbed):
    faults = [{"member": 1, "at": "backward", "step": 13}]
    found, log = run(tmp_path, {"faults": faults, "wait_at": [16], "features": ["asks_first"]})
    assert_as_undisturbed(found, undisturbed())
    # The others asked each other; the new one had nobody to ask.
    assert log.count("asks all replicas something before its first batch") == 1
    assert sorted(each["member"][-1] for each in found) == ["0", "2", "3"]
    assert {each["replicas"] for each in found} == {3}
    assert "replaces worker 1" in log
    # The joiner has the sums of the epochs that it has seen; the others all.
    assert all(total == 240 for each in found for total in each["sums"])


@pytest.mark.nightly(part="jobs")
def test_a_joiner_that_dies_while_it_is_healed_harms_nobody(tmp_path, undisturbed):
    faults = [
        {"member": 1, "at": "backward", "step": 5},
        {"member": 3, "at": "healing"},
    ]
    found, _ = run(tmp_path, {"faults": faults, "wait_at": [7]})
    assert died(tmp_path)[1] == "healing 3"
    assert_as_undisturbed(found, undisturbed())


def test_a_member_that_is_asked_to_leaves_without_a_lost_step(tmp_path, undisturbed):
    faults = [{"member": 0, "at": "after_step", "step": 12, "signal": "SIGTERM"}]
    found, log = run(tmp_path, {"faults": faults})
    assert sorted(each["member"][-1] for each in found) == ["1", "2"]
    assert_as_undisturbed(found, undisturbed())
    assert all(each["sums"] == [240.0] * EPOCHS for each in found)
    assert "failed" not in log
    assert re.search(r"resilin: 2 replicas continue from step 1\d ", log)
    assert "the same members again" not in log


@pytest.mark.nightly(part="jobs")
def test_a_script_that_ends_early_on_one_member_holds_up_nobody(tmp_path, undisturbed):
    # Python exits as after a whole training: nothing but the others shows that it was not.
    faults = [
        {"member": 1, "at": "after_step", "step": 7, "exit": 0},
        {"member": 2, "at": "backward", "step": 13},
    ]
    found, log = run(tmp_path, {"faults": faults, "wait_at": [16]})
    assert_as_undisturbed(found, undisturbed())
    assert "worker 1 has ended its script: the others continue without it" in log
    assert "restart" not in log
    # Whoever is killed later is replaced as ever.
    assert "replaces worker 2" in log


@pytest.mark.nightly(part="jobs")
def test_an_evaluation_that_loses_a_member_says_so(tmp_path, undisturbed):
    found, log = run(tmp_path, {"faults": [{"member": 2, "at": "evaluation", "epoch": 0}]})
    assert_as_undisturbed(found, undisturbed())
    assert "Accumulators continue without" in log


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    "features",
    [["scaler", "clip"], ["accumulation", "weight"], ["workers"], ["prefetch"]],
    ids=lambda features: "-".join(features),
)
def test_what_a_loop_may_have_survives_too(tmp_path, undisturbed, features):
    faults = [
        {"member": 1, "at": "backward", "step": 7},
        {"member": 0, "at": "before_step", "step": 15},
    ]
    settings = {"features": features, "faults": faults, "wait_at": [11]}
    found, _ = run(tmp_path, settings)
    reference = undisturbed(features)
    assert_as_undisturbed(found, reference)
    assert all(each["scale"] == reference["scale"] for each in found)


def test_buffers_of_a_lost_step_are_taken_back(tmp_path):
    faults = [{"member": 1, "at": "backward", "step": 13}]
    found, _ = run(tmp_path, {"features": ["batch_norm"], "faults": faults})
    for each in found:
        assert each["buffers"] == [EPOCHS * STEPS]  # num_batches_tracked
        assert each["parameters"] == found[0]["parameters"]


def test_a_job_that_loses_all_members_is_restarted_from_memory(tmp_path, undisturbed):
    faults = [{"member": m, "at": "forward", "step": 13} for m in (0, 1)]
    # Memory copies are kept as the time allows unless a job asks for one per step. A thread writes
    # them beside the next step: the kill may come before the last one is whole.
    found, log = run(tmp_path, {"faults": faults, "features": ["copies"]}, replicas=2)
    assert_as_undisturbed(found, undisturbed())
    assert re.search(r"resumed 2 replicas at step 1[23] from memory", log)


@pytest.mark.nightly(part="jobs")
def test_a_job_moves_between_live_and_restarts(tmp_path, undisturbed):
    kept = ["--checkpoint-dir", str(tmp_path / "kept"), "--checkpoint-every", "4steps"]
    faults = [{"member": 2, "at": "backward", "step": 6}]
    run(tmp_path, {"epochs": 1, "faults": faults}, *kept)
    (tmp_path / "marks").write_text("")
    run(tmp_path, {"epochs": 2}, *kept, replicas=2, live=False)
    (tmp_path / "marks").write_text("")
    found, log = run(tmp_path, {"epochs": 3, "faults": faults}, *kept, replicas=2)
    assert "resumed 2 replicas at step 20" in log
    assert_as_undisturbed(found, undisturbed())
