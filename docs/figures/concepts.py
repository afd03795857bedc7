"""Draws the picture of the Concepts page from the functions that training uses.

Left: what a step is worth, for several noise scales. Right: what the named rules make of it.
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

from resilin.core.noise import Noise
from resilin.core.rules import get_rule, group_factors

OUT = Path(__file__).parents[1] / "assets" / "concepts.svg"
REFERENCE = 256
SCALES = np.geomspace(1 / 4, 64, 161)
RATIOS = {1: "#5aa3d0", 3: "#3585c0", 15: "#1a5fa3", 63: "#08306b"}
"""Noise scale over reference batch, and its colour."""
RATIO = 3
"""The one of the right panel, and of the numbers in the text."""
RULES = {
    "linear": "#d55e00",
    "sqrt": "#c98a00",
    "adascale": "#0072b2",
    "adamscale": "#009e73",
    "constant": "#666666",
    "surge": "#cc79a7",
}


def noise_for(ratio: float) -> Noise:
    """Noise whose scale phi is `ratio` reference batches."""
    return Noise(sqr_norm=1.0, trace=ratio * REFERENCE)


def lr_factors(rule: str) -> list[float]:
    """What the rule multiplies the learning rate by, at each scale."""
    chosen, noise = get_rule(rule), [noise_for(RATIO)]
    factors = []
    for size in SCALES * REFERENCE:
        (group,) = group_factors(chosen, batch_size=size, reference=REFERENCE, noise=noise)
        factors.append(group.lr)
    return factors


def label(ax: Axes, y: float, text: str, colour: str) -> None:
    """Names a line at its right end."""
    ax.annotate(
        text, (SCALES[-1], y), (6, 0), textcoords="offset points", va="center", color=colour
    )


def frame(ax: Axes, title: str, ylabel: str, low: float) -> None:
    """Axes in powers of two, with the reference batch marked."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlim(SCALES[0], SCALES[-1])
    ax.set_ylim(low, 80)
    for axis, lowest in ((ax.xaxis, -2), (ax.yaxis, round(np.log2(low)))):
        ticks = [2.0**power for power in range(lowest, 7)]
        axis.set_ticks(ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks])
        axis.set_ticks([], minor=True)
    ax.set_xlabel("scale S = global batch / reference batch (ratio)")
    ax.set_ylabel(ylabel)
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.plot(1, 1, "o", color="black", markersize=5, zorder=5)
    ax.annotate("reference batch", (1, 1), (8, -13), textcoords="offset points", fontsize=9)


def draw() -> Figure:
    """Both panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4))

    frame(left, "What one step is worth", "gain r (reference steps per step)", 1 / 4)
    left.plot(SCALES, SCALES, "--", color="#666666", linewidth=1)
    label(left, SCALES[-1], "r = S", "#666666")
    left.axhline(1, linestyle="--", color="#666666", linewidth=1)
    label(left, 1, "r = 1", "#666666")
    for ratio, colour in RATIOS.items():
        gains = [noise_for(ratio).gain(s * REFERENCE, REFERENCE) for s in SCALES]
        left.plot(SCALES, gains, color=colour, linewidth=2)
        label(left, gains[-1], f"phi = {ratio} B0", colour)

    title = f"What the rules do with it, at phi = {RATIO} B0"
    frame(right, title, "learning-rate factor (ratio)", 1 / 4)
    for rule, colour in RULES.items():
        factors = lr_factors(rule)
        right.plot(SCALES, factors, color=colour, linewidth=2)
        label(right, factors[-1], rule, colour)

    figure.tight_layout(w_pad=2.5)
    return figure


if __name__ == "__main__":
    write(draw, __doc__, OUT)
