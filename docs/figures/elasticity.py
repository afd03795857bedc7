"""Draws who keeps training under faults, from what `benchmarks/elasticity/run.py` has measured.

    python benchmarks/elasticity/run.py      # writes docs/figures/elasticity.json
    python docs/figures/elasticity.py        # the chart, and the table in docs/elasticity.md

The figures are kept beside this file: measuring takes most of an hour, and a picture comes out the
same.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from picture import write

FIGURES = Path(__file__).with_suffix(".json")
OUT = Path(__file__).parents[1] / "assets" / "elasticity.svg"
PAGE = Path(__file__).parents[1] / "elasticity.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
"""The place of the table in the page."""
ROUNDING = 1e-12
"""Deviations below it, in float64, are those of sums in another order."""
BLUE, ORANGE, GREY, GREEN, INK = "#0072b2", "#e08a3c", "#666666", "#00795a", "#24292f"
TRACES = {"schedule": ("kills, losses, joins", BLUE), "spot": ("spot market", ORANGE)}
COLUMNS = {
    "waits": "seconds to\nnext step",
    "redone": "steps\nredone",
    "repeated": "samples\nrepeated",
    "missing": "samples\nmissing",
    "finished": "runs\nfinished",
}


def goodput(ax: Axes, rows: dict[str, Any]) -> None:
    """Two bars for each contender: the median, and from the least to the most."""
    for place, row in enumerate(rows.values()):
        for shift, (trace, (_, colour)) in zip((-0.19, 0.19), TRACES.items(), strict=True):
            if trace not in row:
                continue
            middle, least, most = row[trace]["goodput"]
            ax.barh(place + shift, middle, 0.34, color=colour)
            ax.plot([least, most], [place + shift] * 2, color=INK, linewidth=1)
            ax.text(max(middle, most) + 0.015, place + shift, f"{middle:.2f}", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1])
    ax.set_xlabel("goodput (1: no fault)")
    ax.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def counts(ax: Axes, runs: dict[str, Any]) -> None:
    """What faults cost a run: the median over both traces."""
    for column, (key, title) in enumerate(COLUMNS.items()):
        ax.text(column, -0.72, title, ha="center", va="bottom", fontsize=8.5, color=GREY)
        for place, traces in enumerate(runs.values()):
            runs_of = [run for trace in TRACES for run in traces.get(trace, [])]
            if key == "finished":
                done = sum(run["finished"] for run in runs_of)
                ax.text(column, place, f"{done} of {len(runs_of)}", ha="center", va="center")
                continue
            taken = [run.get(key) for run in runs_of]
            if key == "waits":
                taken = [wait for waits in taken if waits for wait in waits]
            known = [value for value in taken if value is not None]
            how = ".1f" if key == "waits" else ".0f"
            text = f"{statistics.median(known):{how}}" if known else "?"
            colour, weight = (GREEN, "bold") if known and not any(known) else (INK, "normal")
            ax.text(column, place, text, ha="center", va="center", color=colour, weight=weight)
    ax.set_xlim(-0.5, len(COLUMNS) - 0.5)
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.axis("off")


def table(found: dict[str, Any]) -> str:
    """The figures of all disturbed runs, in Markdown: medians, and from the least to the most."""
    lines = [
        "| contender | goodput, schedule | goodput, spot | seconds to the next step | steps redone "
        "| samples repeated | samples missing | loss deviates by | runs finished | lines changed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["contenders"].items():
        disturbed = [run for trace in TRACES for run in found["runs"][name].get(trace, [])]
        goodputs = [_spread(row[t]["goodput"], ".2f") if t in row else "" for t in TRACES]
        waits = [wait for run in disturbed for wait in run.get("waits", [])]
        keys = {"redone": ".0f", "repeated": ".0f", "missing": ".0f", "loss_deviation": "%"}
        cells = [
            name,
            *goodputs,
            _spread(_middle(waits), ".1f"),
            *(
                _spread(_middle(run.get(key) for run in disturbed), how)
                for key, how in keys.items()
            ),
            f"{sum(run['finished'] for run in disturbed)} of {len(disturbed)}",
            str(row["lines_changed"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _middle(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    known = [value for value in values if value is not None]
    return (statistics.median(known), min(known), max(known)) if known else None


def _spread(three: Iterable[float] | None, how: str) -> str:
    """The median, and the others if they differ from it; a question mark if nothing is known."""
    if three is None:
        return "?"
    middle, least, most = (_text(value, how) for value in three)
    return middle if least == most else f"{middle} ({least} to {most})"


def _text(value: float, how: str) -> str:
    if how == "%":
        return f"{100 * value:.1g}%" if value > ROUNDING else "0"
    return f"{value:{how}}"


def draw() -> Figure:
    """Goodput at the left, what faults cost at the right."""
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    rows = found["contenders"]
    with mpl.rc_context({"font.size": 10.5}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(7.6, 0.5 * len(rows) + 1.6), width_ratios=(1, 1.5)
        )
        goodput(left, rows)
        counts(right, {name: found["runs"][name] for name in rows})
        handles = [
            mpl.patches.Patch(color=colour, label=label) for label, colour in TRACES.values()
        ]
        figure.legend(handles=handles, loc="upper left", ncols=2, frameon=False, fontsize=9.5)
        figure.tight_layout(rect=(0, 0, 1, 0.94), w_pad=0.5)
    return figure


if __name__ == "__main__":
    write(draw, __doc__, OUT)
    text = PAGE.read_text(encoding="utf-8")
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(TABLE.sub(lambda _: table(measured), text), encoding="utf-8")
