"""`resilin sched simulate`: recorded workloads under several policies, as a table and a page.

Each row is one policy under one assumption about the cost of a rescale and about the end of jobs.
Whether jobs know their end changes results more than most policies do: without `--end`, both are
shown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from resilin.cli import tables, values
from resilin.cli.errors import user_errors
from resilin.cluster.policies.by_name import POLICIES, by_name
from resilin.cluster.simulation import gantt, report, workload
from resilin.cluster.simulation.run import ENDS, Result, Settings, simulate
from resilin.core.trace import CapacityTrace

HEADER = (
    "policy",
    "end",
    "rescale",
    "mean",
    "median",
    "p99",
    "makespan",
    "restarts",
    "use",
    "no slower",
    "worst",
    "typical",
)
"""The columns of the table."""
EPILOG = """\
columns:
  end        what policies know of the work of a job: known, unknown, or wrong (known, times a
             random factor e^N(0, 0.5)); FIFO and Tiresias do not ask for it
  rescale    seconds that a running job loses at a change of its size or nodes
  mean       seconds from submission to end of a job; median and p99 likewise
  makespan   seconds from the first submission to the last end
  restarts   changes of the allocation of a job after its first start
  use        share of the accelerator-seconds that jobs had
  no slower  share of the jobs that take no longer than in the first row, or in --against
  worst      largest ratio of a job's time to its time there
  typical    geometric mean of these ratios

With several workloads, figures are means over workloads, and ratios those of all jobs.

example:
  resilin sched simulate data/workloads/workload-1.csv --traces data/traces --policy pollux,ours

A workload has the columns name, time, application, num_replicas and batch_size. The traces have a
directory for each application, in the form of the Pollux artifact.
"""


@dataclass(frozen=True)
class _Row:
    """One row of the table."""

    policy: str
    settings: Settings
    results: tuple[Result, ...]


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin sched simulate",
        description="Runs recorded workloads under several policies, without any machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = ours.add_argument
    add("workloads", nargs="+", type=Path, metavar="WORKLOAD.csv", help="Jobs and when they came.")
    add(
        "--traces",
        type=Path,
        metavar="DIR",
        help="Records of the applications (default: the directory `traces` beside that of the "
        "first workload).",
    )
    add(
        "--policy",
        default="pollux,ours",
        metavar="NAMES",
        help=f"Policies, of {', '.join(POLICIES)} (default: %(default)s).",
    )
    add(
        "--rescale",
        default="30",
        metavar="SECONDS",
        help="Costs of a rescale, such as 30,8,1 (default: %(default)s).",
    )
    add(
        "--end",
        default="known,unknown",
        metavar="NAMES",
        help=f"Of {', '.join(ENDS)} (default: %(default)s).",
    )
    add(
        "--start",
        type=values.seconds,
        default=30.0,
        metavar="SECONDS",
        help="Cost of a start from nothing (default: %(default)g).",
    )
    add(
        "--interval",
        type=values.seconds,
        default=60.0,
        metavar="SECONDS",
        help="Time between decisions (default: %(default)g).",
    )
    add("--events", action="store_true", help="Decide also when a job comes or ends.")
    add("--nodes", type=values.count, default=16, metavar="N", help="Nodes (default: %(default)s).")
    add(
        "--per-node",
        type=values.count,
        default=4,
        metavar="N",
        help="Accelerators of a node (default: %(default)s).",
    )
    add(
        "--capacity",
        type=Path,
        metavar="TRACE.csv",
        help="Nodes come and go with this trace of accelerators over time, which repeats.",
    )
    add(
        "--notice",
        type=values.seconds,
        default=30.0,
        metavar="SECONDS",
        help="Warning before a node of --capacity leaves (default: %(default)g).",
    )
    add("--seed", type=values.count_or_none, default=0, metavar="N", help="Of all that is random.")
    add("--against", type=Path, metavar="FILE", help="Published summary.json to compare jobs with.")
    add("--html", type=Path, metavar="FILE", help="Write the table and charts as one page.")
    add(
        "--processes",
        type=values.count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Simulations at a time (default: %(default)s).",
    )
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Print the table.

    Returns:
        0; errors in the files are exceptions.
    """
    args = parser().parse_args(arguments)
    traces = args.traces or args.workloads[0].resolve().parent.parent / "traces"
    tasks = [(name, settings) for name in _names(args.policy) for settings in _settings(args)]
    parts = [(task, path, traces) for task in tasks for path in args.workloads]
    for path in args.workloads:
        workload.read(path, traces)  # a mistake in a file is found before minutes are spent
    if min(args.processes, len(parts)) == 1:
        found = [_simulated(*part) for part in parts]
    else:
        # Workers start from scratch: threads of this process, if any, are not copied.
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_simulated, *zip(*parts, strict=True)))
    count = len(args.workloads)
    rows = [
        _Row(name, settings, tuple(found[index * count : (index + 1) * count]))
        for index, (name, settings) in enumerate(tasks)
    ]
    others = _others(args, rows[0])
    told = [_fields(row, others) for row in rows]
    if args.json:
        print(tables.to_json(told))
    else:
        print(tables.to_text(HEADER, [_cells(row) for row in told]))
        print(f"\n{_note(args)}")
    if args.html:
        _write(args, rows, told)
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        by_name(name)
    return names


def _settings(args: argparse.Namespace) -> list[Settings]:
    trace = None
    if args.capacity:
        lines = args.capacity.read_text()
        trace = CapacityTrace.parse(lines, source=str(args.capacity), end="repeat").simplified()
    return [
        Settings(
            nodes=args.nodes,
            per_node=args.per_node,
            interval=args.interval,
            events=args.events,
            start_seconds=args.start,
            rescale_seconds=_cost(rescale),
            end=end.strip(),
            seed=args.seed,
            trace=trace,
            notice=args.notice,
        )
        for rescale in args.rescale.split(",")
        for end in args.end.split(",")
    ]


def _cost(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rescale ({text!r}) must be seconds, such as 30,8,1") from None


def _simulated(task: tuple[str, Settings], path: Path, traces: Path) -> Result:
    name, settings = task
    return simulate(workload.read(path, traces), by_name(name), settings)


def _others(args: argparse.Namespace, first: _Row) -> list[report.Times]:
    """Times to compare with, for each workload."""
    if args.against is None:
        return [report.times(result) for result in first.results]
    known = report.published(args.against)
    names = [path.stem for path in args.workloads]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{args.against}: must have the workload {missing[0]}")
    return [known[name] for name in names]


def _fields(row: _Row, others: Sequence[report.Times]) -> dict[str, Any]:
    pairs = [(report.times(one), other) for one, other in zip(row.results, others, strict=True)]
    return {
        "policy": row.policy,
        "end": row.settings.end,
        "rescale": row.settings.rescale_seconds,
        **asdict(report.mean([report.figures(result) for result in row.results])),
        **asdict(report.fairness(pairs)),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["policy"],
        row["end"],
        f"{row['rescale']:g}",
        *(f"{row[name]:.0f}" for name in ("mean", "median", "p99", "makespan")),
        f"{row['restarts']:.1f}",
        f"{row['use']:.1%}",
        f"{row['no_slower']:.1%}",
        f"{row['worst']:.2f}",
        f"{row['typical']:.3f}",
    ]


def _note(args: argparse.Namespace) -> str:
    count = len(args.workloads)
    cluster = f"{args.nodes} nodes of {args.per_node}"
    if args.capacity:
        cluster = f"at most {cluster}, as in {args.capacity.name}"
    other = args.against.name if args.against else "the first row"
    return (
        f"{count} workload{'s' * (count > 1)} on {cluster}; {args.start:g} s for a start from "
        f"nothing. Jobs are compared with {other}. Simulated: no failures, no interference, and "
        "the end of recorded jobs is exact where it is known."
    )


def _write(args: argparse.Namespace, rows: Sequence[_Row], told: Sequence[dict[str, Any]]) -> None:
    charts = [
        (
            f"{row.policy}, end {row.settings.end}, rescale {row.settings.rescale_seconds:g} s: "
            f"{args.workloads[0].stem}",
            row.results[0],
        )
        for row in rows
    ]
    page = gantt.page(
        "Simulated cluster", [_note(args)], HEADER, [_cells(row) for row in told], charts
    )
    args.html.write_text(page, encoding="utf-8")
