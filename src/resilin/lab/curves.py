"""Numbers over a run, made small enough to draw: thinned without losing a spike, or averaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

POINTS = 2000
"""About as many points as a curve may have: more than a page has pixels for."""
BINS = 160
"""Averages along a curve that is noisy."""
LARGEST = 1e30
"""Beyond this an axis loses its arithmetic."""
_UNITS = ((2 * 86400.0, 86400.0, "d"), (2 * 3600.0, 3600.0, "h"), (180.0, 60.0, "min"))


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """What a time axis is written in."""

    seconds: float
    """How long one is."""
    name: str
    """Its symbol."""


def time_unit(longest: float) -> TimeUnit:
    """The unit that suits a time axis of this many seconds."""
    for least, seconds, name in _UNITS:
        if longest >= least:
            return TimeUnit(seconds, name)
    return TimeUnit(1.0, "s")


def drawable(values: Array) -> Array:
    """The values, with NaN for what no axis can show."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(values) < LARGEST, values, np.nan)


def decimate(x: Array, y: Array, points: int = POINTS) -> tuple[Array, Array]:
    """A curve with about that many points, in which each peak and each dip is still there.

    Neighbours form groups, of which the smallest and the largest value stay. Gaps (NaN) stay gaps
    while there are few of them. Points without an x are left out.

    Args:
        x: Where, in any order that is worth drawing.
        y: The values.
        points: About how many to keep.
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
    """Whether there are so many points that an average says more."""
    return int(np.isfinite(y).sum()) > 3 * bins


def averaged(
    x: Array,
    y: Array,
    *,
    weights: Array | None = None,
    ends: Array | None = None,
    bins: int = BINS,
) -> tuple[Array, Array]:
    """The mean of a curve in intervals of one length, where these have a point.

    Args:
        x: Where.
        y: The values.
        weights: What each value counts; None counts them alike.
        ends: Where the curve is interrupted, if nothing follows at once.
        bins: How many intervals.
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
    # Steps may be rarer than intervals: an empty one is no gap unless it follows an end.
    last = np.searchsorted(edges, drawable(np.empty(0) if ends is None else ends), side="right")
    filled[last[(last > 0) & (last < bins)]] = True
    return centres[filled], mean[filled]
