"""`resilin sched ls`: jobs and nodes of a cluster."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cli import tables
from resilin.cli.errors import user_errors
from resilin.cli.sched import access

JOBS = ("job", "phase", "replicas", "wanted", "sizes", "nodes", "tenant", "restarts", "done")
"""Columns of jobs."""
NODES = ("node", "accelerators", "used", "jobs", "leaves")
"""Columns of nodes."""
EPILOG = """\
columns of jobs:
  replicas  how many run now
  wanted    how many the controller wants it to have
  sizes     smallest and largest that its user allows
  done      share of its planned length, if that is known

example:
  resilin sched ls
  resilin sched ls --nodes
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched ls",
        description="Lists the jobs of a cluster, or its nodes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("--nodes", action="store_true", help="List nodes.")
    access.add_connection(ours)
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Print the table.

    Returns:
        0; 1 if the controller does not answer.
    """
    args = parser().parse_args(arguments)
    client = access.client(args)
    rows = client.nodes() if args.nodes else client.jobs()
    if args.json:
        print(tables.to_json(rows))
    elif args.nodes:
        print(tables.to_text(NODES, [_node(row) for row in rows]))
    else:
        print(tables.to_text(JOBS, [_job(row) for row in rows]))
    return 0


def _job(row: Mapping[str, Any]) -> list[object]:
    done = None
    if row["progress"] is not None and row["total"]:
        done = f"{row['progress'] / row['total']:.0%}"
    least, most = row["min"], row["max"]
    return [
        row["id"],
        row["phase"],
        row["replicas"],
        row["wanted"],
        f"{least}" if least == most else f"{least}-{most}",
        _counts(row["nodes"]),
        row["tenant"],
        row["restarts"],
        done,
    ]


def _node(row: Mapping[str, Any]) -> list[object]:
    leaves = None
    if row["leaves"] is not None:
        left = row["leaves"] - time.time()
        leaves = f"in {left:.0f} s" if left > 0 else "drained"
    total = f"{row['accelerators']} {row['kind']}"
    return [row["name"], total, sum(row["jobs"].values()), _counts(row["jobs"]), leaves]


def _counts(counts: Mapping[str, int]) -> str | None:
    return ",".join(f"{name}={count}" for name, count in counts.items()) or None
