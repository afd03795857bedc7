"""`resilin report`: one self-contained HTML file about a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from resilin.cli import values
from resilin.cli.errors import say, user_errors
from resilin.telemetry.extras import load


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin report",
        description="Writes one self-contained HTML file about a run: batch size, replicas, gain, "
        "learning\nrate, goodput and loss over time, with rescales and faults marked. Several runs "
        "share the\ncharts, each from its own start.",
        epilog="example:\n"
        "  resilin report runs/a                               # writes report.html\n"
        "  resilin report runs/a runs/b --out ab.html --png ab # and the charts as PNG\n"
        "  resilin report runs/a --json                        # only the summary, no file\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        nargs="*",
        help="Directory with the events of a run (default: the latest in resilin-runs).",
    )
    ours.add_argument(
        "--out", metavar="FILE", help="The HTML file to write (default: report.html)."
    )
    ours.add_argument("--png", metavar="DIR", help="Also write the charts as PNG files to DIR.")
    ours.add_argument(
        "--json",
        action="store_true",
        help="Print the summary as a JSON list; files are then written only if requested.",
    )
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Write a report.

    Returns:
        0; 1 if a run cannot be read or a file cannot be written.
    """
    args = parser().parse_args(arguments)
    from resilin.lab.summary import summarise
    from resilin.telemetry.run import Run

    args.run_dirs = args.run_dirs or [values.newest_run()]
    runs = [Run.load(run_dir) for run_dir in args.run_dirs]
    for run_dir, run in zip(args.run_dirs, runs, strict=True):
        if run.damage:
            say(
                f"{run_dir}: {len(run.damage)} lines could not be read and were skipped; the "
                f"first: {run.damage[0]}"
            )
    if args.json:
        rows = [summarise(run).as_dict() for run in runs]
        print(json.dumps(rows, indent=2, allow_nan=False))
        if args.out is None and args.png is None:
            return 0
    load("matplotlib", "lab", "resilin report")
    from resilin.lab.report import write_report

    out = "report.html" if args.out is None and not args.json else args.out
    for path in write_report(runs, out, png=args.png):
        say(f"wrote {path}")
    return 0
