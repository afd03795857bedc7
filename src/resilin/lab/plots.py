"""Figures of runs: all quantities over time, and loss and metrics over progress.

Several runs share the panels, with one colour each, and time counts from the start of each. A thin
line through all panels over time marks each rescale and each fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from resilin.lab import style
from resilin.lab.curves import Array, TimeUnit, averaged, decimate, drawable, is_noisy, time_unit
from resilin.lab.panels import Curve, Panel, origin
from resilin.telemetry.run import Run
from resilin.telemetry.wording import amount

MOST_MARKS = 300
"""Largest number of marks of one kind in one run: more would be unreadable."""


def draw(panels: Sequence[Panel], runs: Sequence[Run], *, columns: int = 2) -> Figure:
    """One figure with these panels, all over time or all over progress.

    Args:
        panels: The panels to draw.
        runs: The runs to draw.
        columns: Number of panels side by side.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = style.figure(5.6 * columns, 2.4 * rows + 0.75)
    axes = style.panels(figure, rows, columns, sharex=True)
    unit = time_unit(max((run.duration for run in runs), default=0.0))
    for panel, ax in zip(panels, axes, strict=False):
        _draw_panel(ax, panel, runs, unit)
    for ax in axes[len(panels) :]:
        ax.remove()
    by_time = all(panel.by_time for panel in panels)
    label = f"time since the start ({unit.name})" if by_time else "progress (reference steps)"
    # The lowest axes of each column carry the label for all.
    for ax in axes[max(0, len(panels) - columns) : len(panels)]:
        style.describe(ax, x=label)
        ax.tick_params(labelbottom=True)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
    handles = _handles(runs, marks=by_time)
    if handles:
        style.heading(figure, handles)
    return figure


def _draw_panel(ax: Axes, panel: Panel, runs: Sequence[Run], unit: TimeUnit) -> None:
    style.describe(ax, title=panel.title, y=panel.unit)
    drawn: list[Array] = []
    lines: list[Line2D] = []
    for number, run in enumerate(runs):
        curves = panel.curves(run)
        for index, curve in enumerate(curves if len(runs) == 1 else curves[:1]):
            if panel.by_time:
                curve = _since(curve, origin(run), unit)
            # For a single run, further curves are less prominent.
            colour = style.colour(7 if index else number)
            line = _draw_curve(ax, curve, colour, "--" if index else style.dashes(number))
            if line is not None:
                drawn.append(drawable(curve.y))
                lines.append(line)
        if panel.by_time:
            _mark(ax, run, unit, style.colour(number) if len(runs) > 1 else None)
    if len(runs) == 1 and len(lines) > 1:
        style.legend(ax, lines, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(lines))
    _scale_y(ax, panel, np.concatenate(drawn) if drawn else np.empty(0))


def _since(curve: Curve, began: float, unit: TimeUnit) -> Curve:
    ends = None if curve.ends is None else (curve.ends - began) / unit.seconds
    return replace(curve, x=(curve.x - began) / unit.seconds, ends=ends)


def _draw_curve(ax: Axes, curve: Curve, colour: str, dashes: Any) -> Line2D | None:
    if not np.isfinite(drawable(curve.x) + drawable(curve.y)).any():
        return None
    common: dict[str, Any] = {"color": colour, "linestyle": dashes, "label": curve.label}
    if colour == style.colour(7):
        common.update(linewidth=1.1, zorder=1.9)
    px, py = decimate(curve.x, curve.y)
    if curve.stairs:
        (line,) = ax.plot(px, py, drawstyle="steps-post", **common)
    elif curve.noisy and is_noisy(curve.y):
        ax.plot(px, py, **{**common, "linewidth": 0.7, "alpha": 0.3})
        mean = averaged(curve.x, curve.y, weights=curve.weights, ends=curve.ends)
        (line,) = ax.plot(*mean, **common)
    else:
        if len(px) <= 40:
            common.update(marker="o", markersize=3)
        (line,) = ax.plot(px, py, **common)
    return line


def _mark(ax: Axes, run: Run, unit: TimeUnit, colour: str | None) -> None:
    began = origin(run)
    for marks, own, dashes in (
        (run.rescales, style.SOFT, (0, (4, 2))),
        (run.faults, style.ALARM, (0, (1, 1.2))),
    ):
        times = np.array([mark.time for mark in marks], dtype=np.float64)
        times = np.unique(times[np.isfinite(times)])
        # An even selection, if there are too many to distinguish.
        times = times[:: -(-len(times) // MOST_MARKS) or 1]
        ax.vlines(
            (times - began) / unit.seconds,
            0.0,
            1.0,
            transform=ax.get_xaxis_transform(),
            color=colour or own,
            linestyle=dashes,
            linewidth=0.9,
            zorder=1.5,
        )


def _handles(runs: Sequence[Run], *, marks: bool) -> list[Line2D]:
    handles: list[Line2D] = []
    if len(runs) > 1:
        handles += [
            Line2D(
                [],
                [],
                color=style.colour(number),
                linestyle=style.dashes(number),
                label=style.plain(run.name),
            )
            for number, run in enumerate(runs)
        ]
    if marks and any(run.rescales for run in runs):
        handles.append(
            Line2D([], [], color=style.SOFT, linestyle=(0, (4, 2)), linewidth=0.9, label="rescale")
        )
    if marks and any(run.faults for run in runs):
        colour = style.ALARM if len(runs) == 1 else style.SOFT
        handles.append(
            Line2D([], [], color=colour, linestyle=(0, (1, 1.2)), linewidth=0.9, label="fault")
        )
    return handles


def _scale_y(ax: Axes, panel: Panel, values: Array) -> None:
    if not np.isfinite(values).any():
        return
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if panel.name == "batch-size" and low > 0 and high >= 8 * low:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_locator(LogLocator(base=2, numticks=7))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylim(low / 1.3, high * 1.3)
    elif panel.whole:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ax.set_ylim(0, high * 1.15 + 0.2)
    elif panel.floor is not None and low >= panel.floor:
        ax.set_ylim(panel.floor, (high - panel.floor) * 1.08 + panel.floor or 1.0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
