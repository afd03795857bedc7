"""Plots of traces: one step function each, with periods without replicas marked.

Batch sizes are drawn over optimizer steps, and replicas over time in a suitable unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from resilin.core.trace import BatchTrace, CapacityTrace
from resilin.lab import style
from resilin.lab.trace_summary import summarise

_UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (2 * 60, 60, "minutes"))
"""Shortest duration in seconds for which a unit is used, its seconds, and its name."""
_WIDTH = 9.0
_PANEL = 2.3
"""Width of the figure and height of one panel, in inches."""


def draw(traces: Mapping[str, BatchTrace | CapacityTrace]) -> Figure:
    """One panel below the other, a trace in each.

    Args:
        traces: The traces by title of their panels, such as file names.
    """
    figure = style.figure(_WIDTH, _PANEL * len(traces) + 0.5)
    axes = style.panels(figure, len(traces))
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        style.describe(ax, title=style.plain(Path(name).name, 60))
        if isinstance(trace, BatchTrace):
            _draw_batches(ax, trace)
        else:
            _draw_capacity(ax, trace)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    figure.align_ylabels(axes)
    has_gaps = any(isinstance(t, CapacityTrace) and 0 in t.replicas[:-1] for t in traces.values())
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=style.colour(0), label="value"),
        Line2D([], [], color=style.SOFT, linestyle="--", linewidth=1, label="mean"),
    ]
    if has_gaps:
        handles.append(Patch(color=style.ALARM, alpha=0.18, linewidth=0, label="no replicas"))
    style.heading(figure, handles)
    return figure


def _draw_batches(ax: Axes, trace: BatchTrace) -> None:
    style.describe(ax, x="optimizer step", y="global batch (samples)")
    _steps(ax, np.array([*trace.starts, trace.num_steps], np.float64), np.array(trace.sizes))
    _finish(ax, trace, float(trace.num_steps))


def _draw_capacity(ax: Axes, trace: CapacityTrace) -> None:
    second, unit = next(
        ((size, name) for least, size, name in _UNITS if trace.duration >= least), (1, "seconds")
    )
    style.describe(ax, x=f"time ({unit})", y="replicas (count)")
    # The last line is the end of the trace; a trace of a single moment is drawn one second long.
    until = trace.duration / second or 1.0
    edges = np.array([*trace.times[:-1], trace.duration], np.float64) / second
    counts = np.array(trace.replicas[:-1] if len(trace.replicas) > 1 else trace.replicas)
    if len(trace.replicas) == 1:
        edges = np.array([0.0, until])
    _steps(ax, edges, counts)
    for start, stop in _gaps(edges, counts):
        ax.axvspan(start, stop, color=style.ALARM, alpha=0.18, linewidth=0)
    _finish(ax, trace, until)


def _gaps(edges: np.ndarray, counts: np.ndarray) -> list[tuple[float, float]]:
    """Spans without replicas; adjacent spans are joined, as they would show a seam."""
    is_gap = np.concatenate(([False], counts == 0, [False]))
    changes = np.flatnonzero(is_gap[1:] != is_gap[:-1])
    return [(edges[i], edges[j]) for i, j in changes.reshape(-1, 2).tolist()]


def _steps(ax: Axes, edges: np.ndarray, values: np.ndarray) -> None:
    ax.stairs(values, edges, color=style.colour(0), linewidth=1.3, baseline=None)
    ax.fill_between(
        edges, [*values, values[-1]], step="post", color=style.colour(0), alpha=0.10, linewidth=0
    )


def _finish(ax: Axes, trace: BatchTrace | CapacityTrace, until: float) -> None:
    summary = summarise(trace)
    ax.axhline(summary["mean"], color=style.SOFT, linestyle="--", linewidth=1)
    ax.set_xlim(0, until)
    ax.set_ylim(0, max(1, summary["max"]) * 1.08)
