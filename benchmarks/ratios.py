"""Ratios of contenders that take turns: their medians, how sure they are, and what they decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

LEVEL = 0.95
"""Probability that an interval contains the true median."""
SHARP = 0.005
"""Widest interval of a control that can decide, and farthest from 1 that its median may be."""

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median ratio with its confidence interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"

    @property
    def rounded(self) -> list[float] | None:
        """The interval for people; None while there is none."""
        if not math.isfinite(self.width):
            return None
        return [round(self.low, 4), round(self.high, 4)]


def median_ratio(values: Sequence[float], level: float = LEVEL) -> Ratio:
    """The median of some ratios, with an interval between two of them.

    The interval is that of the sign test: it assumes independent values, and nothing of how they
    are distributed. It is infinite if there are too few for the level, as with five for 95%.

    Args:
        values: At least one ratio.
        level: Probability with which the interval contains the true median, at least.
    """
    ordered, num = sorted(values), len(values)
    # Values left out on one side. That no more of them than these lie beyond the median there
    # happens in `cases` of 2^num cases.
    outside, cases, few = 0, 1, Fraction(1 - level) / 2 * 2**num
    while cases <= few:
        outside += 1
        cases += math.comb(num, outside)
    median = statistics.median(ordered)
    if outside == 0:
        return Ratio(median, -math.inf, math.inf)
    return Ratio(median, ordered[outside - 1], ordered[num - outside])


def is_sharp(control: Ratio) -> bool:
    """Whether a control of two equal contenders is close to 1, and surely so."""
    return control.width <= SHARP and abs(control.median - 1) <= SHARP


def verdict(figure: Ratio, limit: float, control: Ratio) -> Verdict:
    """Whether a ratio is within its limit, as far as this control can tell.

    A figure passes or fails if its interval leaves out the limit and the control is sharp. Without
    a sharp control none passes, and one fails only if it stays above the limit when the control's
    distance from 1 is taken off.

    Args:
        figure: A ratio.
        limit: The most that it may be.
        control: The ratio of two equal contenders, from the same turns.
    """
    if is_sharp(control):
        if figure.high <= limit:
            return "pass"
        return "fail" if figure.low > limit else "undecided"
    off = max(control.high - 1, 1 - control.low)
    return "fail" if figure.low - off > limit else "undecided"
