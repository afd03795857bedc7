"""Curves reduced to a drawable size: decimated without losing spikes, or averaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

POINTS = 2000
"""Approximate largest number of points of a curve: more than the pixels of a page."""
BINS = 160
"""Number of averages along a noisy curve."""
LARGEST = 1e30
"""Largest value that an axis can handle."""
_UNITS = ((2 * 86400.0, 86400.0, "d"), (2 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"))


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """Unit of a time axis."""

    seconds: float
    """Its length in seconds."""
    name: str
    """Its symbol."""


def time_unit(longest: float) -> TimeUnit:
    """The unit for a time axis of this many seconds."""
    for least, seconds, name in _UNITS:
        if longest >= least:
            return TimeUnit(seconds, name)
    return TimeUnit(1.0, "s")


def drawable(values: Array) -> Array:
    """The values, with NaN for those that no axis can show."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(values) < LARGEST, values, np.nan)


def decimate(x: Array, y: Array, points: int = POINTS) -> tuple[Array, Array]:
    """A curve with about `points` points that keeps every peak and every dip.

    Neighbours form groups, of which the smallest and the largest value are kept. Gaps (NaN) stay
    gaps as long as there are few of them. Points without an x are left out.

    Args:
        x: Positions, in the order in which they are drawn.
        y: The values.
        points: Approximate number of points to keep.
    """
    known = np.isfinite(drawable(x))
    x, y = x[known], drawable(y[known])
    if len(x) <= points:
        return x, y
    size = -(-2 * len(x) // points)
    groups = -(-len(x) // size)
    padded = np.full(groups * size, np.nan)
    padded[: len(y)] = y
    table = padded.reshape(groups, size)
    some = ~np.isnan(table).all(axis=1)
    rows = np.flatnonzero(some) * size
    keep = [
        rows + np.nanargmin(table[some], axis=1),
        rows + np.nanargmax(table[some], axis=1),
        np.array([0, len(x) - 1]),
    ]
    gaps = np.flatnonzero(np.isnan(y))
    if len(gaps) <= points // 4:
        keep.append(gaps)
    chosen = np.unique(np.concatenate(keep))
    return x[chosen], y[chosen]


def is_noisy(y: Array, bins: int = BINS) -> bool:
    """Whether there are so many points that an average is more informative."""
    return int(np.isfinite(y).sum()) > 3 * bins


def averaged(
    x: Array,
    y: Array,
    *,
    weights: Array | None = None,
    ends: Array | None = None,
    bins: int = BINS,
) -> tuple[Array, Array]:
    """The mean of a curve in each non-empty interval of equal length.

    Args:
        x: Positions.
        y: The values.
        weights: Weights of the values; None weighs them equally.
        ends: Positions at which the curve is interrupted, unless another point follows directly.
        bins: Number of intervals.
    """
    weights = np.ones(len(y)) if weights is None else weights
    x, y = drawable(x), drawable(y)
    known = np.isfinite(x) & np.isfinite(y) & np.isfinite(weights)
    if not known.any():
        return np.empty(0), np.empty(0)
    x, y, weights = x[known], y[known], weights[known]
    low, high = float(x.min()), float(x.max())
    if not low < high:
        return np.array([low]), np.array([float(y.mean())])
    edges = np.linspace(low, high, bins + 1)
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    total = np.bincount(place, weights, minlength=bins)
    with np.errstate(all="ignore"):
        mean = np.bincount(place, weights * y, minlength=bins) / total
    centres = (edges[:-1] + edges[1:]) / 2
    filled = np.isfinite(mean)
    # Steps may be rarer than intervals: an empty interval is a gap only after an end.
    last = np.searchsorted(edges, drawable(np.empty(0) if ends is None else ends), side="right")
    filled[last[(last > 0) & (last < bins)]] = True
    return centres[filled], mean[filled]
