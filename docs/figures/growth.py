"""Draws how costs grow, from the points that `benchmarks/growth.py` has measured.

    python benchmarks/growth.py > docs/figures/growth.json
    python docs/figures/growth.py

The points are kept beside this file: measuring takes minutes, and a picture comes out the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture import write

POINTS = Path(__file__).with_suffix(".json")
OUT = Path(__file__).parents[1] / "assets" / "growth.svg"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"


def frame(ax: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Axes in powers of ten, with a name on each."""
    ax.set_xscale("log")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def curve(ax: Axes, points: list[dict[str, float]], x: str, y: str, name: str, colour: str) -> None:
    """The points that have this number, joined."""
    known = [(point[x], point[y]) for point in points if y in point]
    ax.plot(*zip(*known, strict=True), "o-", color=colour, linewidth=2, markersize=4, label=name)


def draw() -> Figure:
    """Four panels, one for each thing that grows."""
    measured = json.loads(POINTS.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.2))
    (replicas, samples), (parameters, steps) = axes

    frame(replicas, "Replicas", "replicas in the job", "CPU time of one replica (ms)")
    replicas.set_yscale("log")
    curve(replicas, measured["replicas"], "replicas", "step_ms", "a whole step", BLUE)
    shares = [{**point, "share_ms": point["share_us"] / 1e3} for point in measured["replicas"]]
    curve(replicas, shares, "replicas", "share_ms", "its share of plan and data", ORANGE)
    replicas.set_ylim(1e-3, 1e3)

    frame(samples, "Samples", "samples in an epoch", "CPU time (ms)")
    samples.set_yscale("log")
    curve(samples, measured["samples"], "samples", "indices_ms", "1000 indices anywhere", BLUE)
    curve(samples, measured["samples"], "samples", "randperm_ms", "torch.randperm", GREY)
    samples.set_ylim(1e-2, 1e5)

    frame(parameters, "Parameters", "parameters of the model", "CPU time of a step / plain DDP")
    every, auto = "statistics in each step", "as often as 2% of the time allow"
    curve(parameters, measured["parameters"], "parameters", "every", every, ORANGE)
    curve(parameters, measured["parameters"], "parameters", "auto", auto, BLUE)
    parameters.axhline(1, linestyle="--", color=GREY, linewidth=1)
    parameters.set_ylim(0.9, 1.6)

    frame(steps, "Steps", "steps in a run", "event log (MB)")
    steps.set_yscale("log")
    curve(steps, measured["steps"], "steps", "megabytes", "what is kept", BLUE)
    first, last = measured["steps"][0], measured["steps"][-1]
    whole = first["megabytes"] * last["steps"] / first["steps"]
    ends = (first["steps"], last["steps"])
    name = "if nothing were thinned out"
    steps.plot(ends, (first["megabytes"], whole), "--", color=GREY, linewidth=1, label=name)

    for ax in axes.flat:
        ax.legend(frameon=False, fontsize=9, labelcolor="linecolor", loc="best")
    figure.tight_layout(w_pad=2.5, h_pad=2)
    return figure


if __name__ == "__main__":
    write(draw, __doc__, OUT)
