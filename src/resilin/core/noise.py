"""Gradient noise: unbiased estimates of signal and noise from the parts of a gradient.

One pair of numbers, `|G|^2` (squared norm of the true gradient) and `T` (trace of the
covariance of one sample's gradient), drives the learning rate, the clock, clipping and
goodput. A mean gradient over b samples has `E|g|^2 = |G|^2 + T/b`; comparing two or more
batch sizes within one step separates the two. All sizes are in samples, or in tokens
throughout if batches are weighted by tokens.

Estimators return a `NoiseSample`, which is noisy and may be negative; `NoiseAverage` pools
them, and only the average is clipped at zero, because clipping each sample would bias it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resilin.core import _exact, _validate


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of the gradient at one point of training; both parts are at least 0."""

    sqr_norm: float
    """Squared norm of the true gradient."""
    trace: float
    """Trace of the covariance of one sample's gradient."""

    def __post_init__(self) -> None:
        _validate.real("sqr_norm", self.sqr_norm, at_least=0)
        _validate.real("trace", self.trace, at_least=0)

    @property
    def phi(self) -> float:
        """The noise scale `trace / sqr_norm`: the batch size at which noise equals signal."""
        if self.sqr_norm == 0 and self.trace:
            return math.inf
        return float(noise_scale(self.sqr_norm, self.trace))

    def efficiency(self, batch_size: ArrayLike, reference: float) -> NDArray[np.float64]:
        """Progress per sample at `batch_size`, relative to the reference batch.

        `(phi + reference) / (phi + batch_size)`: 1 at the reference batch, less above it, more
        below. Without signal and noise, a larger batch has no benefit.
        """
        _validate.real("reference", reference, above=0)
        size = np.asarray(batch_size, dtype=np.float64)
        if not (size > 0).all():
            raise ValueError(f"batch_size ({batch_size!r}) must be above 0")
        if self.sqr_norm == 0 and self.trace == 0:
            return np.asarray(np.minimum(1.0, reference / size))
        return np.asarray(
            (self.trace + reference * self.sqr_norm) / (self.trace + size * self.sqr_norm)
        )

    def gain(self, batch_size: float, reference: float) -> float:
        """Worth of one step at `batch_size`, in reference steps.

        With scale `S = batch_size / reference` this is between 1 and S for S >= 1, and between S
        and 1 below. It assumes that both batches are drawn at this same point of training.
        """
        _validate.real("reference", reference, above=0)
        if not batch_size > 0:
            raise ValueError(f"batch_size ({batch_size!r}) must be above 0")
        scale = float(batch_size / reference)
        if self.sqr_norm == 0 and self.trace == 0:
            return scale * min(1.0, 1 / scale)
        # As `efficiency`, without an array: each step asks for it several times.
        signal, noise = self.sqr_norm, self.trace
        return scale * float((noise + reference * signal) / (noise + batch_size * signal))

    def __add__(self, other: Noise) -> Noise:
        """Noise of two parameter groups taken together: squared norms and traces add up."""
        return Noise(self.sqr_norm + other.sqr_norm, self.trace + other.trace)


def noise_scale(sqr_norm: ArrayLike, trace: ArrayLike) -> NDArray[np.float64]:
    """The noise scale `trace / sqr_norm` of estimates, for each entry.

    NaN without an estimate of both, and where the squared norm, which is estimated, is not above 0:
    then there is no signal to compare with.
    """
    norm = np.asarray(sqr_norm, dtype=np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(np.asarray(trace) / np.where(norm > 0, norm, np.nan))


def gain(noise: Noise | None, batch_size: float, reference: float) -> float:
    """The gain, also without an estimate of the noise.

    Without an estimate it is the smallest gain that any noise could give: 1 above the
    reference batch, the scale itself below. It never trains faster than the evidence allows.
    """
    if noise is None:
        return min(1.0, batch_size / reference)
    return noise.gain(batch_size, reference)


@dataclass(frozen=True, slots=True)
class NoiseSample:
    """One step's unbiased estimate. Single samples are noisy and may be negative."""

    sqr_norm: float
    """Estimate of the squared norm of the true gradient."""
    trace: float
    """Estimate of the trace of one sample's covariance."""
    batch_size: float
    """Number of samples in the estimate."""
    dof: float
    """Degrees of freedom of `trace`: its variance falls as 1 / dof."""


def from_micro_batches(
    sizes: Sequence[float],
    sqr_norms: Sequence[float],
    mean_sqr_norm: float,
    *,
    weights: Sequence[float] | None = None,
    population: float | None = None,
) -> NoiseSample:
    """Estimates noise from the micro-batches of one step, of any unequal sizes.

    Unbiased for every split. It assumes that samples are drawn independently (or, with
    `population`, without replacement) and that each micro-gradient is the mean over its own
    samples. BatchNorm violates the second: its gradient depends on the micro-batch, and the
    estimate is then approximate. Splitting an ordinary batch in two ("probe") and per-sample
    gradients (sizes of 1) are special cases, and as unbiased.

    Args:
        sizes: Samples in each micro-batch, over all replicas and accumulation steps.
        sqr_norms: Squared norm of each micro-batch's mean gradient.
        mean_sqr_norm: Squared norm of the combined gradient, `|sum_i weights_i g_i|^2`.
        weights: Weight of each micro-gradient in the combined gradient; they sum to 1. The
            default is its share of the samples, as in a resilin step. Plain DDP averages instead:
            pass `1/n` each.
        population: Samples in the training set, to estimate the gradient of that set rather
            than of the underlying distribution.

    Raises:
        ValueError: Fewer than two micro-batches, whose difference carries the information.
    """
    size = np.asarray(sizes, dtype=np.float64)
    norms = np.asarray(sqr_norms, dtype=np.float64)
    if len(size) < 2 or len(size) != len(norms):
        raise ValueError(
            f"need at least two micro-batches with one norm each, got {len(size)} sizes and "
            f"{len(norms)} norms"
        )
    if not (size > 0).all():
        raise ValueError(f"sizes ({sizes!r}) must be above 0")
    total = float(size.sum())
    share = size / total
    weighted = float(share @ norms)
    if weights is None:
        return from_sums(
            batch_size=total,
            num_micro_batches=len(size),
            weighted_sqr_norm=weighted,
            mean_sqr_norm=mean_sqr_norm,
            population=population,
        )
    weight = np.asarray(weights, dtype=np.float64)
    if len(weight) != len(size) or abs(float(weight.sum()) - 1) > 1e-6:
        raise ValueError(f"weights ({weights!r}) must be {len(size)} numbers that sum to 1")
    variance_of_mean = float((weight**2 / size).sum())
    trace = (weighted - mean_sqr_norm) / (len(size) / total - variance_of_mean)
    unseen = 0.0 if population is None else 1 / population
    return NoiseSample(
        sqr_norm=mean_sqr_norm - trace * (variance_of_mean - unseen),
        trace=trace,
        batch_size=1 / variance_of_mean,
        dof=len(size) - 1,
    )


def from_sums(
    *,
    batch_size: float,
    num_micro_batches: int,
    weighted_sqr_norm: float,
    mean_sqr_norm: float,
    population: float | None = None,
) -> NoiseSample:
    """`from_micro_batches` from sums that one reduction over the replicas can compute.

    Args:
        batch_size: Samples in all micro-batches.
        num_micro_batches: Number of micro-batches over all replicas.
        weighted_sqr_norm: `sum_i (b_i / B) |g_i|^2`: each replica adds its own terms.
        mean_sqr_norm: `|sum_i (b_i / B) g_i|^2`, the squared norm of the step's gradient.
        population: As in `from_micro_batches`.
    """
    dof = _validate.whole("num_micro_batches", num_micro_batches, at_least=2) - 1
    _validate.real("batch_size", batch_size, above=0)
    trace = batch_size * (weighted_sqr_norm - mean_sqr_norm) / dof
    unseen = 0.0 if population is None else 1 / population
    return NoiseSample(
        sqr_norm=mean_sqr_norm - trace * (1 / batch_size - unseen),
        trace=trace,
        batch_size=batch_size,
        dof=dof,
    )


class NoiseErrors(NamedTuple):
    """Standard errors of averaged noise, by the spread of its samples."""

    sqr_norm: float
    """Standard error of the squared norm."""
    trace: float
    """Standard error of the trace."""
    dof: float
    """Effective number of samples that they were estimated from, less 1."""


@dataclass(frozen=True, slots=True)
class NoiseAverage:
    """Moving average of noise samples. A value: `update` returns the next one.

    Numerators and denominators are kept apart, so a young average is the plain weighted mean of
    its samples. `trace` is weighted by degrees of freedom, `sqr_norm` by samples, which determine
    the precision of each. Both are in units of one sample, so a change of the batch
    size or of the number of replicas needs no conversion.
    """

    horizon: float
    """Samples after which an estimate's weight has fallen to 1/e."""
    sqr_norm_sum: float = 0.0
    """Decayed sum of `batch_size * sqr_norm`."""
    sqr_norm_weight: float = 0.0
    """Decayed sum of `batch_size`."""
    trace_sum: float = 0.0
    """Decayed sum of `dof * trace`."""
    trace_weight: float = 0.0
    """Decayed sum of `dof`."""
    sqr_norm_spread: float = 0.0
    """Decayed sum of `batch_size * (sqr_norm - mean)^2`."""
    sqr_norm_sqr_weight: float = 0.0
    """Sum of the squares of the weights in `sqr_norm_weight`, as decayed as they are."""
    trace_spread: float = 0.0
    """Decayed sum of `dof * (trace - mean)^2`."""
    trace_sqr_weight: float = 0.0
    """Sum of the squares of the weights in `trace_weight`, as decayed as they are."""

    def __post_init__(self) -> None:
        _validate.real("horizon", self.horizon, above=0)

    def update(self, sample: NoiseSample, *, elapsed: float | None = None) -> NoiseAverage:
        """Adds one sample.

        Args:
            sample: The estimate of this step.
            elapsed: Samples trained since the last update, including this step; more than those of
                the step if not every step is measured. None means only those of this step.

        Raises:
            ValueError: The sample is not finite; such a step must not be counted at all.
        """
        _validate.real("sqr_norm of the noise sample", sample.sqr_norm)
        _validate.real("trace of the noise sample", sample.trace)
        keep = _exact.exp(-(sample.batch_size if elapsed is None else elapsed) / self.horizon)
        size, dof = sample.batch_size, sample.dof
        norm_weight, trace_weight = keep * self.sqr_norm_weight, keep * self.trace_weight
        norm_sum, trace_sum = keep * self.sqr_norm_sum, keep * self.trace_sum
        return NoiseAverage(
            horizon=self.horizon,
            sqr_norm_sum=norm_sum + size * sample.sqr_norm,
            sqr_norm_weight=norm_weight + size,
            trace_sum=trace_sum + dof * sample.trace,
            trace_weight=trace_weight + dof,
            sqr_norm_spread=keep * self.sqr_norm_spread
            + _distance(sample.sqr_norm, size, norm_sum, norm_weight),
            sqr_norm_sqr_weight=keep * keep * self.sqr_norm_sqr_weight + size * size,
            trace_spread=keep * self.trace_spread
            + _distance(sample.trace, dof, trace_sum, trace_weight),
            trace_sqr_weight=keep * keep * self.trace_sqr_weight + dof * dof,
        )

    @property
    def noise(self) -> Noise | None:
        """The pooled estimate, clipped at zero; None before the first sample."""
        if self.trace_weight == 0:
            return None
        return Noise(
            sqr_norm=max(0.0, self.sqr_norm_sum / self.sqr_norm_weight),
            trace=max(0.0, self.trace_sum / self.trace_weight),
        )

    @property
    def errors(self) -> NoiseErrors | None:
        """Standard errors of the pooled estimate; None before the second sample.

        With n the effective number of samples, `(sum of weights)^2 / sum of squared weights`, the
        variance of the mean is the weighted mean square of the deviations, over n - 1. It assumes
        samples that are independent of each other, as the gradients of fresh batches are. Where
        the noise itself moves within the horizon, its path adds to the spread: the errors are too
        large then, but the average lags, which they do not cover.
        """
        if not (self.sqr_norm_sqr_weight and self.trace_sqr_weight):
            return None
        norm_dof = self.sqr_norm_weight**2 / self.sqr_norm_sqr_weight - 1
        trace_dof = self.trace_weight**2 / self.trace_sqr_weight - 1
        # One sample has 0, up to rounding.
        if min(norm_dof, trace_dof) < 1e-6:
            return None
        return NoiseErrors(
            sqr_norm=math.sqrt(self.sqr_norm_spread / self.sqr_norm_weight / norm_dof),
            trace=math.sqrt(self.trace_spread / self.trace_weight / trace_dof),
            dof=min(norm_dof, trace_dof),
        )

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; JSON-compatible."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NoiseAverage:
        """The inverse of `state`.

        In a state of an older version, without a spread, all samples so far count as one.
        """
        numbers = {name: float(value) for name, value in state.items()}
        for name in ("sqr_norm", "trace"):
            numbers.setdefault(f"{name}_sqr_weight", numbers[f"{name}_weight"] ** 2)
        return cls(**numbers)


def _distance(value: float, weight: float, total: float, total_weight: float) -> float:
    """The part of a weighted sum of squared deviations that one more value adds."""
    if total_weight == 0:
        return 0.0
    off = value - total / total_weight
    return total_weight * weight / (total_weight + weight) * off * off


def default_horizon(reference: float, total_steps: float | None = None) -> float:
    """Samples to average over: 1000 reference batches, or 5% of a run, whichever is less.

    Args:
        reference: The reference batch size.
        total_steps: Length of the run in reference steps, if known.
    """
    _validate.real("reference", reference, above=0)
    steps = 1000.0
    if total_steps is not None:
        steps = min(steps, 0.05 * _validate.real("total_steps", total_steps, above=0))
    return reference * max(1.0, steps)
