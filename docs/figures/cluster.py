"""Draws which job had which node, from a run of `resilin sched demo`.

    resilin sched demo --state /tmp/demo
    python docs/figures/cluster.py --journal /tmp/demo    # writes the stretches beside this file
    python docs/figures/cluster.py

The stretches are kept beside this file: a run takes two minutes, and a picture comes out the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from picture import write

RUN = Path(__file__).with_suffix(".json")
OUT = Path(__file__).parents[1] / "assets" / "cluster.svg"
COLOURS = ("#0072b2", "#d55e00", "#009e73")
HEIGHT = 0.7


def read(directory: Path) -> dict[str, object]:
    """The parts of all jobs, and what was done to nodes, in seconds since the first submission."""
    from resilin.cluster.controller.journal import Journal

    journal = Journal(directory)
    state = journal.state
    journal.close()
    began = min(job.spec.submitted for job in state.jobs.values())
    parts = [
        {
            "job": part.job,
            "node": part.node,
            "from": round(part.began - began, 1),
            "to": round(part.ended - began, 1),
        }
        for part in state.history
        if part.began is not None
    ]
    drains = {node: round(at - began, 1) for node, at in state.drains.items()}
    lost = sorted({part.node for part in state.history} - set(state.nodes))
    return {"jobs": list(state.jobs), "parts": parts, "drained": drains, "lost": lost}


def draw() -> Figure:
    """One row for each node, one colour for each job."""
    run = json.loads(RUN.read_text(encoding="utf-8"))
    nodes = sorted({part["node"] for part in run["parts"]} | set(run["drained"]))
    figure, axes = plt.subplots(figsize=(9, 2.9))
    for part in run["parts"]:
        colour = COLOURS[run["jobs"].index(part["job"])]
        row, length = nodes.index(part["node"]), part["to"] - part["from"]
        axes.barh(row, length, HEIGHT, left=part["from"], color=colour, edgecolor="white")
        if length > 6:
            middle = part["from"] + length / 2
            axes.text(middle, row, part["job"], color="white", ha="center", va="center", size=9)
    for node, at in run["drained"].items():
        row = nodes.index(node)
        left = max(part["to"] for part in run["parts"] if part["node"] == node)
        axes.plot([at, at], [row - 0.48, row + 0.48], color="black")
        axes.text(left + 1.5, row, "drained", size=8, va="center")
    for node in run["lost"]:
        at = max(part["to"] for part in run["parts"] if part["node"] == node)
        axes.plot(at, nodes.index(node), "x", color="black", markersize=8)
        axes.text(at + 1.5, nodes.index(node), "lost", size=8, va="center")
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(nodes)), nodes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the jobs were submitted")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    if "--journal" in sys.argv:
        place = Path(sys.argv[sys.argv.index("--journal") + 1])
        RUN.write_text(json.dumps(read(place), indent=1) + "\n", encoding="utf-8")
    else:
        write(draw, __doc__, OUT)
