"""The figure of a comparison: one column per trace, final results above and curves below.

Curves are drawn over samples, which all rules count in the same way. Progress is not comparable: a
rule that measures no noise counts each step at its smallest possible worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from resilin.lab import style
from resilin.lab.compare import Comparison, Row
from resilin.lab.grid import REFERENCE
from resilin.lab.intervals import mean_interval
from resilin.lab.results import Curve

Array = npt.NDArray[np.float64]
NUM_GRID = 60
"""Points of a mean curve."""


def draw(comparison: Comparison, unit: str | None = None) -> Figure:
    """Draw a comparison.

    Args:
        comparison: The results.
        unit: Unit of the metric, if it has one.
    """
    label = f"{comparison.metric} ({unit or 'as recorded'})"
    rows = [row for row in comparison.rows if row.trace]
    reference = next((row for row in comparison.rows if row.rule == REFERENCE), None)
    traces = list(dict.fromkeys(row.trace for row in rows)) or [""]
    rules = list(dict.fromkeys(row.rule for row in rows))
    colours = {rule: style.colour(number) for number, rule in enumerate(rules)}
    num = len(traces)
    figure = style.figure(1.6 + 3.4 * num, 6.2)
    axes = style.panels(figure, 2, num)
    for number, trace in enumerate(traces):
        above, below = axes[number], axes[num + number]
        here = [row for row in rows if row.trace == trace]
        _results(above, here, reference, colours)
        _ways(below, here, reference, colours)
        _limit(below, [row for row in comparison.rows if row.trace in ("", trace)])
        style.describe(above, title=trace, x="scaling rule", y=label)
        style.describe(below, x="samples used (thousands)", y=label)
    style.legend(axes[2 * num - 1], _handles(axes[num:]))
    return figure


def _results(
    ax: Axes, rows: Sequence[Row], reference: Row | None, colours: Mapping[str, str]
) -> None:
    """The metric by rule, with its interval, and each seed as a dot."""
    if reference is not None:
        mean, half = reference.value.mean, reference.value.half
        ax.axhline(mean, color=style.INK, linewidth=1.2, linestyle=(0, (4, 2)))
        if math.isfinite(half):
            ax.axhspan(mean - half, mean + half, color=style.INK, alpha=0.10, linewidth=0)
    for place, row in enumerate(rows):
        colour = colours[row.rule]
        num = len(row.values)
        spread = np.linspace(-0.16, 0.16, num) if num > 1 else np.zeros(num)
        ax.plot(place + spread, row.values, "o", color=colour, alpha=0.35, markersize=4)
        half = row.value.half if math.isfinite(row.value.half) else 0.0
        ax.errorbar(
            place, row.value.mean, half, fmt="D", color=colour, capsize=5, markersize=6, linewidth=2
        )
    ax.set_xlim(-0.6, max(1, len(rows)) - 0.4)
    names = [row.rule.rpartition(":")[2] for row in rows]
    crowded = sum(map(len, names)) > 30
    ax.set_xticks(
        range(len(rows)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center"
    )
    ax.grid(axis="x", visible=False)
    # The interval of a rule that diverged is cut off at the edge: it carries no information.
    ends = [] if reference is None else [reference.value.mean]
    values = np.array([*ends, *(value for row in rows for value in row.values)], dtype=float)
    values = values[np.isfinite(values)]
    if len(values) and (reach := values.max() - values.min()) > 0:
        low, high = ax.get_ylim()
        room = 0.5 * reach
        ax.set_ylim(max(low, values.min() - room), min(high, values.max() + room))


def _ways(ax: Axes, rows: Sequence[Row], reference: Row | None, colours: Mapping[str, str]) -> None:
    """The metric over samples: the mean over seeds, and its interval as a band."""
    if reference is not None:
        dashes = (0, (4, 2))
        _way(ax, reference, style.INK, label=REFERENCE, linestyle=dashes, linewidth=1.2)
    for row in rows:
        _way(ax, row, colours[row.rule], label=row.rule)


def _way(ax: Axes, row: Row, colour: str, **kwargs: Any) -> None:
    samples, mean, half = mean_curve(row.curves)
    thousands = samples / 1000
    marker = "o" if len(samples) == 1 else None
    ax.plot(thousands, mean, color=colour, marker=marker, **kwargs)
    ax.fill_between(thousands, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)


def mean_curve(
    curves: Sequence[Curve],
) -> tuple[Array, Array, Array]:
    """Samples, mean and half-width of the interval, where all curves are defined.

    Curves are interpolated linearly between recorded values. A NaN in any curve makes the mean NaN.
    """
    known = [curve for curve in curves if curve[0]]
    if not known:
        nothing = np.empty(0)
        return nothing, nothing, nothing
    start = max(curve[0][0] for curve in known)
    stop = min(curve[0][-1] for curve in known)
    if start > stop:
        nothing = np.empty(0)
        return nothing, nothing, nothing
    grid = np.linspace(start, stop, NUM_GRID if stop > start else 1)
    values = np.array([np.interp(grid, *curve) for curve in known])
    intervals = [mean_interval(list(map(float, column))) for column in values.T]
    mean = np.array([interval.mean for interval in intervals])
    half = np.array([interval.half for interval in intervals])
    return grid, mean, np.nan_to_num(half)


def _limit(ax: Axes, rows: Sequence[Row]) -> None:
    """Limit the y axis, so that one diverged run does not flatten all others."""
    values = np.array([v for row in rows for curve in row.curves for v in curve[1]], dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return
    low, high = np.quantile(values, [0.02, 0.98])
    room = 0.08 * (high - low)
    if room > 0:
        top, bottom = min(values.max(), high + 3 * room), max(values.min(), low - 3 * room)
        ax.set_ylim(bottom - room, top + room)


def _handles(axes: Sequence[Axes]) -> list[object]:
    """One legend entry per rule, whichever trace has it."""
    found: dict[str, object] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values())
