"""Jobs over streams whose members die, live and by restarts: each sample counts once per epoch."""

from __future__ import annotations

import pytest

from tests.training.live.test_live_training import (
    EPOCHS,
    STEPS,
    assert_as_undisturbed,
    died,
    run,
    undisturbed,
)

pytestmark = pytest.mark.processes

__all__ = ["undisturbed"]

LIVE, RESTARTS = True, False
FAULTS = [
    (LIVE, {"member": 0, "at": "forward", "step": 0}),
    (LIVE, {"member": 1, "at": "before_step", "step": STEPS - 1}),
    (LIVE, {"member": 1, "at": "evaluation", "epoch": 0}),
    (RESTARTS, {"member": 1, "at": "backward", "step": 7}),
    (RESTARTS, {"member": 0, "at": "after_step", "step": 2 * STEPS - 1}),
    (RESTARTS, {"member": 0, "at": "backward", "step": EPOCHS * STEPS - 1}),
]


@pytest.mark.parametrize(("live", "fault"), FAULTS)
def test_a_killed_member_of_a_job_over_a_stream_costs_nothing(tmp_path, undisturbed, fault, live):
    features = ["stream"] if live else ["stream", "workers"]
    settings = {"features": features, "faults": [{**fault, "once": True}]}
    found, log = run(tmp_path, settings, replicas=2 if not live else 3, live=live)
    assert died(tmp_path) == [f"{fault['at']} {fault['member']}"]
    assert_as_undisturbed(found, undisturbed(["stream"]))
    assert live == ("restart" not in log)


@pytest.mark.nightly(part="jobs")
def test_a_joiner_of_a_job_over_a_stream_reads_on_where_the_others_are(tmp_path, undisturbed):
    settings = {
        "features": ["stream", "workers"],
        "faults": [{"member": 1, "at": "backward", "step": 3}],
        "wait_at": [8],
    }
    found, _ = run(tmp_path, settings, replicas=2)
    assert died(tmp_path) == ["backward 1"]
    assert {each["replicas"] for each in found} == {2}
    assert len(found) == 2
    assert_as_undisturbed(found, undisturbed(["stream"]))
