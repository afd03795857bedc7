"""The figures of the elasticity benchmark as a table of Markdown.

python benchmarks/elasticity/table.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "elasticity.json"
TRACES = ("schedule", "spot")
EXACT = 1e-12
"""A smaller deviation is rounding: numbers are float64."""
HEADS = (
    "",
    "goodput, schedule",
    "goodput, spot",
    "seconds to the next step",
    "steps redone",
    "samples repeated",
    "samples missing",
    "loss deviates by",
    "lines changed",
)


def spread(values: Sequence[float], form: str) -> str:
    """Median, and in brackets the least and the most unless all are equal."""
    if not values:
        return "-"
    middle, least, most = statistics.median(values), min(values), max(values)
    told = [format(value, form) for value in (middle, least, most)]
    return told[0] if told[1] == told[2] else f"{told[0]} ({told[1]} to {told[2]})"


def row(name: str, entry: dict[str, Any], traces: dict[str, Any]) -> list[str]:
    """The cells of one contender; what is no goodput is over both traces."""
    runs = [run for trace in TRACES for run in traces.get(trace, [])]
    cells = [name]
    for trace in TRACES:
        middle, least, most = entry[trace]["goodput"] if trace in entry else (None,) * 3
        cells.append("-" if middle is None else spread([least, middle, most], ".2f"))
    cells.append(spread([wait for run in runs for wait in run.get("waits", [])], ".1f"))
    cells += [
        spread([run[key] for run in runs if run[key] is not None], ".0f")
        for key in ("redone", "repeated", "missing")
    ]
    deviations = [run["loss_deviation"] for run in runs if "loss_deviation" in run]
    exact = deviations and max(deviations) < EXACT
    cells.append(f"less than {EXACT:.0e}" if exact else spread(deviations, ".0e"))
    cells.append(str(entry["lines_changed"]))
    unfinished = sum(not run["finished"] for run in runs)
    if unfinished:
        cells[0] += f" (did not finish: {unfinished} of {len(runs)})"
    return cells


def table(found: dict[str, Any]) -> str:
    """All contenders."""
    entries = found["contenders"].items()
    rows = [row(name, entry, found["runs"][name]) for name, entry in entries]
    lines = [HEADS, ["---"] * len(HEADS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(table(json.loads(FIGURES.read_text())))
