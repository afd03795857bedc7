"""`StepTimer`: the durations of whole steps, for reports, hints and the budget of measuring.

The autoscaler, the hints and the memory copies have clocks of their own beside it: they leave out
what is no part of their question, such as a pause between two passes or the first step of a size.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

_RECENT = 9
"""Steps whose median is the usual duration."""


class StepTimer:
    """Measures steps on this replica, from the place between two steps to the next one.

    `begin` is called when a step may begin, before its data are fetched; `end` when its loop body
    is over. What lies between `end` and the next `begin` (memory copies, checkpoints, reports) is
    part of the period of a step, and not of its body.
    """

    def __init__(self) -> None:
        self.began: float | None = None
        """Start of the current step, by `time.perf_counter`; None before the first one."""
        self.body: float | None = None
        """Seconds of the last step, from its beginning to the end of its loop body."""
        self.period: float | None = None
        """Seconds from the beginning of the step before the current one to that of the current."""
        self._periods: deque[float] = deque(maxlen=_RECENT)

    def begin(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        if self.began is not None:
            self.period = now - self.began
            self._periods.append(self.period)
        self.began = now

    def end(self) -> None:
        """The loop body of the current step is over."""
        if self.began is not None:
            self.body = time.perf_counter() - self.began

    @property
    def usual(self) -> float:
        """Typical period of a step; infinite while none is known.

        The median of the recent ones: an evaluation between two steps is not a long step.
        """
        return statistics.median(self._periods) if self._periods else math.inf
