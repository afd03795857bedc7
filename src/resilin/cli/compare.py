"""`resilin compare`: scaling rules under traces with several seeds, as a table and a picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from resilin.cli import tables, values
from resilin.cli.errors import say, user_errors
from resilin.cli.replay import add_trace_options
from resilin.core.rules import RULES
from resilin.core.trace import BatchTrace
from resilin.engine import environment
from resilin.lab import launch
from resilin.lab.compare import Comparison, compare
from resilin.lab.grid import Grid
from resilin.lab.replay import as_batches, read_trace
from resilin.telemetry.extras import load

NAMES = tuple(name for name in RULES if name != "legw")
"""The rules that can be chosen by name alone; LEGW needs a warm-up."""
PICTURE = "compare.png"
"""Name of the figure in the directory of the comparison."""
EXAMPLE = f"""\
example:
    resilin compare --rules constant,linear,sqrt,adascale --trace batches.csv \\
        --trace spot.csv --max-replicas 16 --local-bsz 8 --step-seconds 30 \\
        --seeds 5 examples/lab_digits.py --epochs 10

  runs the script on each trace with each rule and each seed, and once per seed without a
  trace as the reference. It prints a table; DIR holds it as table.md and table.json, with
  {PICTURE}.

After each evaluation the script records the metric to compare: resilin.record(accuracy=...).
{{seed}} in its arguments is replaced by the seed. After an interruption, the same command
resumes the comparison. If a run fails, the other runs continue and the exit code is 1.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin compare",
        description="Compares scaling rules under traces: the same script with each rule, trace\n"
        "and seed, against a reference that follows no trace. Options come before the\nscript.",
        usage="resilin compare --rules A,B --trace FILE [options] script.py [arguments]",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("script", metavar="script.py", help="Script to run.")
    ours.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="Arguments of the script."
    )
    ours.add_argument(
        "--rules",
        required=True,
        metavar="A,B",
        help=f"Rules to compare: {', '.join(NAMES)}, or module:NAME for your own rule; the "
        "directory of the script is on the path.",
    )
    ours.add_argument(
        "--trace",
        required=True,
        action="append",
        metavar="FILE",
        help="CSV file with the header step,batchsize or time,replicas. May be repeated.",
    )
    ours.add_argument(
        "--seeds", type=values.count, default=5, metavar="N", help="Seeds 0 to N - 1 (5)."
    )
    ours.add_argument("--metric", help="Metric to compare, if the script records several.")
    ours.add_argument("--unit", help="Unit of the metric, for the figure.")
    ours.add_argument(
        "--jobs",
        type=values.count,
        metavar="N",
        help="Number of parallel runs. Default: one per core.",
    )
    ours.add_argument(
        "--out", metavar="DIR", help="Output directory. Default: resilin-runs/compare-SCRIPT."
    )
    ours.add_argument(
        "--again", action="store_true", help="Remove the results in DIR and start over."
    )
    add_trace_options(ours)
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Run a comparison, or the rest of an interrupted one.

    Returns:
        1 if a run failed, else 0.
    """
    args = parser().parse_args(arguments)
    # Checked before an hour of runs, not after it.
    load("matplotlib", "lab", "resilin compare")
    script = launch.check_script(args.script)
    grid = Grid(
        script=script,
        arguments=tuple(args.arguments),
        rules=tuple(rule.strip() for rule in args.rules.split(",")),
        traces=_traces(args),
        num_seeds=args.seeds,
        out=Path(args.out or Path(environment.RUNS) / f"compare-{script.stem}"),
    )
    with launch.stoppable():
        comparison = compare(
            grid, metric=args.metric, jobs=args.jobs or _cores(), again=args.again, say=say
        )
    _draw(comparison, args.unit, grid.out / PICTURE)
    header, body = comparison.cells()
    print(tables.to_json(comparison.to_dict()) if args.json else tables.to_text(header, body))
    for warning in comparison.warnings:
        say(f"warning: {warning}")
    for failure in comparison.failures:
        say(f"{failure.cell.place} {failure.reason}; the end of its log:")
        for line in failure.log.splitlines():
            say(f"  {line}")
    say(f"wrote the table and the figure to {grid.out}")
    return int(bool(comparison.failures))


def _traces(args: argparse.Namespace) -> dict[str, BatchTrace]:
    traces: dict[str, BatchTrace] = {}
    for path in args.trace:
        name = Path(path).stem
        if name in traces:
            raise ValueError(
                f"two traces are named {name!r}, and results are stored under that name: {path}"
            )
        trace = read_trace(path, end=args.end, restarts=args.restarts)
        traces[name] = as_batches(
            trace,
            local_bsz=args.local_bsz,
            step_seconds=args.step_seconds,
            max_replicas=args.max_replicas,
            name=path,
        )
    return traces


def _draw(comparison: Comparison, unit: str | None, path: Path) -> None:
    # matplotlib takes half a second to load, and `--help` does not need it.
    from resilin.lab import style
    from resilin.lab.compare_plots import draw

    style.save_png(draw(comparison, unit), path)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
