"""The one rule for what may take "at most x% of the time".

Measuring noise, comparing replicas, copying state to memory, reporting steps and trying batch sizes
all cost time that is not training. Each has a share of the time. What can be run every n steps
takes its n from `interval`; what is decided each time asks `is_within`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def interval(cost: float, share: float, *, longest: int | None = None) -> int:
    """Steps from one run to the next, if runs may take `share` of the time of the steps.

    Args:
        cost: Time of one run over time of one step; finite.
        share: Part of the time that runs may take; above 0.
        longest: Most steps between two runs, whatever they cost; None sets no limit.

    Examples:
        >>> interval(0.5, 0.02)
        25
    """
    steps = max(1, math.ceil(cost / share))
    return steps if longest is None else min(longest, steps)


def is_within(spent: float, seconds: float, share: float, *, free: float = 0.0) -> bool:
    """Whether more may be spent: less than `share` of the time was so far.

    Args:
        spent: Time that was spent so far.
        seconds: All of the time so far.
        share: Part of the time that may be spent.
        free: Seconds that are free, so that a short run is not limited.
    """
    return spent < free + share * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Time that was spent on something, of all the time that was measured."""

    seconds: float = 0.0
    """All of the time."""
    spent: float = 0.0
    """The part of it."""

    def add(self, seconds: float, *, spent: float) -> TimeSpent:
        """With more time, and the part of it that was spent."""
        return TimeSpent(seconds=self.seconds + seconds, spent=self.spent + spent)

    @property
    def share(self) -> float:
        """The part as a share of the time; 0 while there is none."""
        return self.spent / self.seconds if self.seconds else 0.0
