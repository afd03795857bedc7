"""Confidence intervals of a mean over a few runs: Student's t, for single and paired samples.

A comparison has a handful of seeds, so the normal distribution would be overconfident. The interval
assumes that runs with different seeds are independent and approximately normal; with three or five
of them this cannot be checked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from resilin.core import _validate

LEVEL = 0.95
"""Probability that an interval contains the true mean, if its assumptions hold."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    """The mean of the sample; NaN if there is none."""
    half: float
    """Half the width of the confidence interval; NaN for fewer than two values."""
    num: int
    """Values in the sample."""


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of some values, with its confidence interval.

    Args:
        values: Independent values, such as one per seed.
        level: Probability with which the interval contains the true mean.
    """
    num = len(values)
    if num == 0:
        return Interval(math.nan, math.nan, 0)
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, num)
    mean = statistics.fmean(values)
    if num == 1:
        return Interval(mean, math.nan, 1)
    spread = statistics.stdev(values, mean)
    return Interval(mean, t_quantile((1 + level) / 2, num - 1) * spread / math.sqrt(num), num)


def paired_interval(
    values: Sequence[float], others: Sequence[float], level: float = LEVEL
) -> Interval:
    """The mean of the differences `value - other`, with its confidence interval.

    Effects that both of a pair share, such as an easy seed, cancel out.

    Raises:
        ValueError: The two sequences have different lengths.
    """
    if len(values) != len(others):
        raise ValueError(
            f"pairs need equally many values ({len(values)}) and others ({len(others)})"
        )
    differences = [value - other for value, other in zip(values, others, strict=True)]
    return mean_interval(differences, level)


def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t stays below with this probability.

    Args:
        probability: Between 0 and 1.
        degrees: Degrees of freedom, an integer. The cost grows with it.
    """
    _validate.real("probability", probability, above=0)
    _validate.whole("degrees", degrees, at_least=1)
    if probability >= 1:
        raise ValueError(f"probability ({probability}) must be below 1")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    # In the angle atan(t / sqrt(degrees)) the whole range is finite, so bisection always ends.
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if (1 + _within(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Probability of `|t| < sqrt(degrees) * tan(angle)`: a finite sum for integer degrees."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
