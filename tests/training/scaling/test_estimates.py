"""Which steps the noise of the gradient is measured in."""

import numpy as np
import pytest
import torch

from resilin.engine.devices import Fetched
from resilin.training.gradient.norms import Measured
from resilin.training.scaling.estimates import MeasureSchedule, NoiseEstimates


def test_the_schedule_of_measurements():
    every = MeasureSchedule(3)
    pattern = []
    for _ in range(8):
        due = every.due()
        pattern.append(due)
        every.committed(measured=due)
    assert pattern == [True, False, False, True, False, False, True, False]

    auto = MeasureSchedule("auto", 0.02)
    pattern = []
    for _ in range(100):
        due = auto.due()
        pattern.append(due)
        if due:
            auto.observe(0.09)
        auto.committed(measured=due)
    assert all(pattern[:8])
    # 9% of a step may be spent every fifth step.
    assert np.diff(np.flatnonzero(pattern[8:])).tolist() == [5] * 17
    for bad in (0, 1.5):
        with pytest.raises(ValueError, match="stats_every"):
            MeasureSchedule(bad)
    with pytest.raises(ValueError, match=r"stats_budget \(0.1\) is for .*'auto', which is 3"):
        MeasureSchedule(3, 0.1)


def measured(*norms, num=2):
    return Measured(Fetched(torch.tensor(norms, dtype=torch.float64)), weight=8.0, num=num)


def estimates(*steps):
    """Estimates after these steps: what each has measured, and the scale of its gradients."""
    made = NoiseEstimates(1, MeasureSchedule(1))
    for noise, scale in steps:
        after(made, noise, scale)
    return made


def after(made, noise=None, scale=None):
    fetched = None if scale is None else Fetched(torch.tensor([scale]))
    made.averages = made.averages.after(
        noise, weight=8.0, gradient_scale=fetched, reference=4.0, total_steps=100.0
    )


def test_a_step_is_read_by_the_next_one_and_the_first_one_at_once():
    one = estimates((measured(3.0, 1.0), None))
    first = one.group_noise
    assert first == one.newest()
    assert first[0].sqr_norm > 0
    after(one, measured(5.0, 2.0))
    assert one.group_noise == first
    newest = one.newest()
    assert newest != first
    assert one.group_noise == first  # who looks changes nothing
    after(one)
    assert one.group_noise == one.newest() == newest


def test_what_was_not_taken_in_yet_survives_in_the_state():
    steps = [(measured(3.0, 1.0), None), (None, None), (None, None), (measured(300.0, 50.0), 4.0)]
    whole, resumed = estimates(*steps), NoiseEstimates(1, MeasureSchedule(1))
    state = whole.state_dict()
    assert state["unread"]["elapsed"] == 24.0
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.group_noise == whole.group_noise != whole.newest()
    after(whole)
    after(resumed)
    assert resumed.group_noise == whole.group_noise
    # A state from before there was such a measurement.
    del state["unread"]
    resumed.load_state_dict(state)
    assert resumed.newest() == resumed.group_noise
    with pytest.raises(ValueError, match="has 1 parameter groups, the optimizer has 2"):
        NoiseEstimates(2, MeasureSchedule(1)).load_state_dict(whole.state_dict())


def test_the_scale_of_gradients_does_not_reach_the_noise():
    scaled, plain = (measured(3000.0, 50.0), 10.0), (measured(30.0, 0.5), None)
    found, expected = estimates(scaled).newest()[0], estimates(plain).newest()[0]
    assert found.trace == pytest.approx(expected.trace)
    assert found.trace > 0


@pytest.mark.parametrize(
    "noise", [measured(np.inf, 1.0), measured(3.0, np.nan), measured(3.0, 1.0, num=1)]
)
def test_a_step_that_cannot_tell_counts_as_not_measured(noise):
    good = (measured(3.0, 1.0), None)
    with_it, without = estimates(good, (noise, None), good), estimates(good, (None, None), good)
    assert with_it.newest() == without.newest()
    assert with_it.state_dict()["unread"] == without.state_dict()["unread"]
