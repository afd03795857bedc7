"""Which steps the noise of the gradient is measured in."""

import numpy as np
import pytest

from resilin.training.scaling.estimates import MeasureSchedule


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
