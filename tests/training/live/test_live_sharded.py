"""Live jobs whose model is sharded: a copy of it is lost and replaced as a whole."""

from __future__ import annotations

import re

import pytest

from tests.training.live.test_live_training import (
    EPOCHS,
    STEPS,
    assert_as_undisturbed,
    died,
    run,
    undisturbed,  # noqa: F401
)

pytestmark = pytest.mark.processes

FEATURES = ["accumulation", "clip", "weight"]


def test_a_copy_that_loses_a_process_is_replaced_as_a_whole(tmp_path, undisturbed):  # noqa: F811
    # Of the second copy one process dies in a step. A process of the one that replaces it dies
    # while it is healed, and one of the next where all add up their sums. In the end a process of
    # the first copy loses the ballot of the last step, which the other one has: that is healed.
    faults = [
        {"member": 2, "at": "before_step", "step": 5},
        {"member": 4, "at": "healing"},
        {"member": 7, "at": "in_question", "epoch": 1},
        {"member": 1, "at": "ballot", "step": EPOCHS * STEPS - 1},
    ]
    settings = {"features": [*FEATURES, "hsdp"], "faults": faults, "wait_at": [8, 9, 25]}
    found, log = run(tmp_path, settings, "--processes-per-copy", "2", replicas=4)
    assert died(tmp_path) == ["before_step 2", "healing 4", "in_question 7", "ballot 1"]
    assert_as_undisturbed(found, undisturbed(FEATURES))
    # A name belongs to one process: those of the first copy are the ones that began.
    assert sorted(each["member"][-1] for each in found) == ["0", "1", "8", "9"]
    assert {each["replicas"] for each in found} == {4}
    assert "restart" not in log
    assert "ending worker 3, with which worker 2 had a copy of the model" in log
    assert re.search(r"worker 8 \(process \d+\) replaces worker 6", log)
    assert re.search(r"worker 9 \(process \d+\) replaces worker 7", log)
    assert re.search(r"-0\.0, \S+-0\.1 had lost a step; 4 replicas continue from step 30", log)
    # Where nobody died among those who add up, no sample is missing from the sums.
    assert all(each["sums"][-1] == 240 for each in found)


@pytest.mark.nightly(part="jobs")
def test_buffers_of_a_lost_step_are_taken_back_on_all_copies(tmp_path):
    faults = [{"member": 2, "at": "forward", "step": 13}]
    settings = {"features": ["batch_norm", "hsdp"], "faults": faults}
    found, log = run(tmp_path, settings, "--processes-per-copy", "2", replicas=4)
    assert died(tmp_path) == ["forward 2"]
    assert "restart" not in log
    # The step was lost, and its body ran twice on those who are left.
    assert "2 replicas continue from step 13" in log
    assert len(found) >= 2
    for each in found:
        assert each["buffers"] == [EPOCHS * STEPS]  # num_batches_tracked
        assert each["parameters"] == found[0]["parameters"]


@pytest.mark.nightly(part="jobs")
def test_a_model_without_copies_falls_back_to_restarts_and_says_so(tmp_path, undisturbed):  # noqa: F811
    faults = [{"member": 1, "at": "before_step", "step": 13, "once": True}]
    settings = {"features": [*FEATURES, "fsdp", "copies"], "faults": faults}
    found, log = run(tmp_path, settings, replicas=2)
    assert died(tmp_path) == ["before_step 1"]
    assert_as_undisturbed(found, undisturbed(FEATURES))
    assert "not live: the model is sharded over all processes" in log
    assert "the job runs as without --live" in log
    assert "finished after 1 restart" in log
    assert all(each["sums"] == [240.0] * (EPOCHS - 1) for each in found)
