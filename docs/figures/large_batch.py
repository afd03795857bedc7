"""Draws what a large batch costs, from the losses that `benchmarks/accuracy.py` has measured.

    python benchmarks/accuracy.py > docs/figures/large_batch.json
    python docs/figures/large_batch.py

The figures are kept beside this file: measuring takes an hour, and a picture comes out the same.
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

FIGURES = Path(__file__).with_suffix(".json")
OUT = Path(__file__).parents[1] / "assets" / "large_batch.svg"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"
CELLS = [(rule, trace) for trace in ("8x", "16x") for rule in ("before", "sgdscale")]


def regime(ax: Axes, rows: dict[str, dict[str, float]], task: str, title: str) -> None:
    """Both losses at the end, minus those of the reference run, for two rules and two batches."""
    for shift, what, name, colour in (
        (-0.18, "d_train_loss", "training loss", ORANGE),
        (0.18, "d_test_loss", "test loss", BLUE),
    ):
        cells = [rows[f"{task}_sgd_{rule}_{trace}"] for rule, trace in CELLS]
        ax.bar(
            [place + shift for place in range(len(CELLS))],
            [cell[what] for cell in cells],
            0.34,
            yerr=[cell[f"{what}_se"] for cell in cells],
            color=colour,
            ecolor=GREY,
            capsize=3,
            label=name,
        )
    ax.axhline(0, color=GREY, linewidth=1)
    ax.set_xticks(range(len(CELLS)), [f"{rule}\n{trace}" for rule, trace in CELLS])
    ax.set_ylabel("loss at the end, minus the reference run (nats)")
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)


def draw() -> Figure:
    """One panel for each regime."""
    rows = json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]
    figure, (fresh, few) = plt.subplots(1, 2, figsize=(10, 4.2))
    regime(fresh, rows, "fresh", "Fresh data: a gap of optimisation")
    regime(few, rows, "digits", "Many epochs, few rows: a gap of generalisation")
    figure.tight_layout(w_pad=2.5)
    return figure


if __name__ == "__main__":
    write(draw, __doc__, OUT)
