"""The figure of branches: the loss over samples, and the differences at the end by batch size."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resilin.lab import style
from resilin.lab.branch_table import Measurement, Row
from resilin.lab.results import Curve

Array = npt.NDArray[np.float64]
MOST_BINS = 24
"""Largest number of points of a curve."""


def draw(measurement: Measurement, unit: str | None = None) -> Figure:
    """Draw branches.

    Args:
        measurement: The results.
        unit: Unit of the loss, if it has one.
    """
    figure = style.figure(9.6, 3.6)
    left, right = style.panels(figure, 1, 2)
    smallest = measurement.rows[0]
    label = f"loss ({unit or 'as recorded'})"
    # A bin has at least a step of each size, and all sizes have the same bins.
    bins = max(1, min(MOST_BINS, measurement.samples // measurement.rows[-1].batch_size))
    edges = np.linspace(0, measurement.samples, bins + 1)
    for number, row in enumerate(measurement.rows):
        means = np.array([binned(curve, edges, row.batch_size) for curve in row.curves])
        middle = (edges[1:] + edges[:-1]) / 2000
        name = f"{row.size}x ({row.batch_size})"
        colour, dash = style.colour(number), style.dashes(number)
        left.plot(middle, means.mean(axis=0), dash, color=colour, label=name, marker=".")
        if row is not smallest:
            _difference(right, row, number, colour)
    start = (measurement.samples - measurement.window) / 1000
    left.axvspan(start, measurement.samples / 1000, color=style.INK, alpha=0.06, linewidth=0)
    style.describe(
        left,
        title=f"from step {measurement.step}, rule {style.plain(measurement.rule)}",
        x="samples since the checkpoint (thousands); shaded: the window",
        y=label,
    )
    right.axhline(0, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)))
    right.axhline(measurement.tolerance, color=style.ALARM, linewidth=1.2)
    right.set_xticks(
        range(1, len(measurement.rows)), [f"{row.size}x" for row in measurement.rows[1:]]
    )
    right.set_xlim(0.4, len(measurement.rows) - 0.4)
    right.grid(axis="x", visible=False)
    style.describe(
        right,
        title=f"minus {smallest.size}x, 95% intervals; line: tolerance {measurement.tolerance:g}",
        x="batch size",
        y=f"difference in {label}",
    )
    style.legend(left, loc="best", bbox_to_anchor=None)
    return figure


def _difference(ax: Axes, row: Row, place: int, colour: str) -> None:
    difference = row.difference
    assert difference is not None
    half = difference.half if math.isfinite(difference.half) else 0.0
    ax.errorbar(
        place, difference.mean, half, fmt="D", color=colour, capsize=5, markersize=6, linewidth=2
    )


def binned(curve: Curve, edges: Array, batch_size: int) -> Array:
    """The mean loss of the steps in each bin, by their share of samples in it; NaN without one.

    Args:
        curve: Samples at the ends of steps, and their losses.
        edges: Edges of the bins, in samples.
        batch_size: Samples in a step.
    """
    stops, losses = np.array(curve[0]), np.array(curve[1])
    starts = np.maximum(stops - batch_size, 0)
    shared = np.minimum.outer(stops, edges[1:]) - np.maximum.outer(starts, edges[:-1])
    shared = np.maximum(shared, 0)
    total = shared.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Array = (losses[:, None] * shared).sum(axis=0) / total
    return mean
