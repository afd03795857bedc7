"""A ramp: a batch that grows only as far as the measured noise is sure to allow.

Below the critical batch, twice the batch is worth nearly two steps; above it, nearly one. The
noise scale `phi = trace / sqr_norm` is the measurable stand-in for it. Both parts are averages of
measurements, and each has an error that the spread of the measurements shows. The lower bound of
phi takes the trace less its margin over the squared norm plus its margin, so it holds whatever
the correlation of the two errors.

What the bound does not cover: an average over a horizon lags. Where phi falls, as after a jump of
the learning rate, the bound is too high for about one horizon. It is the bound of one look; over a
run there are as many independent looks as horizons. And phi is not the critical batch itself:
measured by branched runs on language models, that is larger (Merrill et al. 2025), so a ramp by
phi is rather too slow than too fast. With BatchNorm phi is approximate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from resilin.core import _validate
from resilin.core.noise import NoiseAverage

CONFIDENCE = 0.95
"""Probability that phi is above its lower bound, at one look."""
FEWEST = 7
"""Effective number of measurements below which nothing is concluded from their spread. The first
eight steps of a job are always measured, and count a little less than eight, as they decay."""


def lower_phi(averages: Sequence[NoiseAverage], confidence: float = CONFIDENCE) -> float | None:
    """A lower confidence bound of the noise scale of a model, in the units of its weights.

    Args:
        averages: Averages of the noise, one for each parameter group. Their errors are added up, as
            if they went together: the bound holds whatever their correlation.
        confidence: Probability that the noise scale is above the bound, at one look.

    Returns:
        The bound, at least 0; infinity if no signal is left. None while too few steps were
        measured.
    """
    errors = [average.errors for average in averages]
    known = [each for each in errors if each is not None]
    if not known or len(known) < len(errors) or min(each.dof for each in known) < FEWEST - 1:
        return None
    # Two one-sided bounds have to hold at once.
    width = student(1 - (1 - confidence) / 2, min(each.dof for each in known))
    trace = sum(average.trace_sum / average.trace_weight for average in averages)
    sqr_norm = sum(average.sqr_norm_sum / average.sqr_norm_weight for average in averages)
    low = max(0.0, trace - width * sum(each.trace for each in known))
    high = max(0.0, sqr_norm + width * sum(each.sqr_norm for each in known))
    if low == 0:
        return 0.0
    return low / high if high else math.inf


def student(probability: float, dof: float) -> float:
    """Quantile of Student's t by its expansion around the normal one; within 1% from 6 dof on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / dof + second / dof**2 + third / dof**3


@dataclass(frozen=True, slots=True)
class NoiseRamp:
    """A global batch that grows along a list, when the noise is sure to allow the next size.

    It never shrinks. The size that was reached is its only state, and survives restarts.

    Examples:
        >>> ramp = NoiseRamp((32, 64, 128))
        >>> [ramp.next(32, bound) for bound in (None, 40.0, 64.0, 65.0, 500.0)]
        [32, 32, 32, 64, 64]
    """

    sizes: tuple[int, ...]
    """Global batch sizes, which ascend; training begins with the first."""
    confidence: float = CONFIDENCE
    """Probability that the noise scale is above the bound that a size is compared with."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes:
            raise ValueError(f"a ramp needs at least one size, and sizes is {self.sizes}")
        for size in self.sizes:
            _validate.whole("batch size", size, at_least=1)
        for before, after in itertools.pairwise(self.sizes):
            if after <= before:
                raise ValueError(f"size {after} of a ramp must be above the one before ({before})")
        if not 0.5 <= _validate.real("confidence", self.confidence) < 1:
            raise ValueError(f"confidence ({self.confidence}) must be at least 0.5 and below 1")

    def next(self, size: int, bound: float | None) -> int:
        """The batch size after a step of this size: the same, or the next one of the list.

        Args:
            size: One of the sizes.
            bound: Lower bound of the noise scale, in samples; None while it is unknown.
        """
        index = self.sizes.index(size) + 1
        if bound is None or index == len(self.sizes) or bound <= self.sizes[index]:
            return size
        return self.sizes[index]

    def resume(self, reached: int) -> int:
        """The size that a ramp continues with: the largest one up to `reached`, or the first.

        Args:
            reached: Size that was reached, perhaps along another list.
        """
        return max((size for size in self.sizes if size <= reached), default=self.sizes[0])
