"""Draws goodput against batch size along training, from the functions that the tuner uses.

The job is made up, in the size of a small image classifier: on one replica, and on 16 replicas of
4 hosts. The gradient gets noisier as training goes on, so larger batches become worth their cost.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture import write

from resilin.core.goodput import best_plan
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import ThroughputModel

OUT = Path(__file__).parents[1] / "assets" / "goodput.svg"
REFERENCE = 128
BOUNDS = BatchBounds(max_batch_size=16384, local_bsz_bounds=(8, 512))
MODEL = ThroughputModel(
    compute_start=0.06,
    compute_per_sample=0.0006,
    local_sync=0.03,
    local_growth=0.0005,
    host_sync=0.12,
    host_growth=0.001,
    overlap=2.0,
    ring=0.5,
)
PLACEMENTS = {"One replica": (1, 1), "16 replicas on 4 hosts": (4, 16)}
"""Title of a panel, and its hosts and replicas."""
MOMENTS = {1: "#5aa3d0", 8: "#3585c0", 64: "#1a5fa3", 512: "#08306b"}
"""Noise scale over reference batch at four moments of training, and the colour of each."""


def frame(ax: Axes, title: str) -> None:
    """Axes in powers, with a name on each."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    sizes = [2**power for power in range(7, 15)]
    ax.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.1)
    ax.xaxis.set_ticks(sizes, [str(size) if i % 2 == 0 else "" for i, size in enumerate(sizes)])
    ticks = [2.0**power for power in range(-6, 6)]
    ax.yaxis.set_ticks(ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks])
    ax.xaxis.set_ticks([], minor=True)
    ax.yaxis.set_ticks([], minor=True)
    ax.set_xlabel("global batch size (samples)")
    ax.set_ylabel("goodput over that of the reference batch (ratio)")
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def draw_placement(ax: Axes, hosts: int, replicas: int) -> None:
    """A curve for each moment, with its best batch marked."""
    for ratio, colour in MOMENTS.items():
        noise = Noise(sqr_norm=1.0, trace=ratio * REFERENCE)
        choice = best_plan(MODEL, noise, REFERENCE, BOUNDS, hosts, replicas)
        # Micro-batches of one size only: others cost a little more, and would blur the curve.
        even = [
            c for c in choice.candidates if c.batch_size % (replicas * c.accumulation_steps) == 0
        ]
        base = even[0].goodput
        sizes = np.array([c.batch_size for c in even])
        values = np.array([c.goodput for c in even]) / base
        ax.plot(sizes, values, color=colour, linewidth=2)
        best = choice.plan.global_batch_size
        ax.plot(best, choice.goodput / base, "o", color=colour, markersize=7, zorder=5)
        ax.annotate(
            f"phi = {ratio} B0",
            (sizes[-1], values[-1]),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )


def draw() -> Figure:
    """A panel per placement."""
    figure, axes = plt.subplots(1, len(PLACEMENTS), figsize=(10.5, 4.4))
    for ax, (title, (hosts, replicas)) in zip(axes, PLACEMENTS.items(), strict=True):
        frame(ax, title)
        draw_placement(ax, hosts, replicas)
    figure.tight_layout(w_pad=2.5)
    return figure


if __name__ == "__main__":
    write(draw, __doc__, OUT)
