"""`resilin trace`: make, check, plot and convert traces.

Both kinds are CSV files, distinguished by their header: `step,batchsize` is a global batch size
over optimizer steps, `time,replicas` a number of replicas over seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilin.cli import tables, values
from resilin.cli.errors import say, told, user_errors
from resilin.core.trace import (
    TRACE_ENDS,
    TRACE_RESTARTS,
    BatchTrace,
    CapacityTrace,
    TraceError,
    TraceRestarts,
)
from resilin.lab.replay import read_trace
from resilin.lab.trace_summary import summarise
from resilin.telemetry.extras import load

HEADER = ("file", "kind", "lines", "length", "min", "mean", "max", "changes", "at zero")
"""The columns of `resilin trace check`."""
EPILOG = """\
examples:
  resilin trace make spot --max-replicas 16 --duration 4h --seed 1 -o spot.csv
  resilin trace check spot.csv
  resilin trace convert spot.csv --local-bsz 8 --step-seconds 30 -o batches.csv
  resilin trace plot spot.csv batches.csv -o traces.png

resilin trace VERB --help lists the options of a verb.
"""
MAKE_EPILOG = """\
examples:
  resilin trace make constant --size 256 --steps 1000
  resilin trace make constant --replicas 4 --duration 1h
  resilin trace make ramp --from 64 --to 1024 --steps 1000 -o ramp.csv
  resilin trace make walk --min 32 --max 512 --steps 1000 --seed 1 -o walk.csv
  resilin trace make spot --max-replicas 16 --duration 4h --seed 1 -o spot.csv
"""
CHECK_EPILOG = """\
example:
  resilin trace check spot.csv batches.csv

  file         kind      lines     length  min   mean  max  changes  at zero
  spot.csv     capacity     18    14400 s    0   8.12   16       15     2.1%
  batches.csv  batches      16  472 steps    8  66.29  128       14        -

The mean is over steps or time. A file that cannot be read is reported on standard error; the
others are still shown, and the exit code is 1.
"""
PLOT_EPILOG = """\
example:
  resilin trace plot spot.csv batches.csv -o traces.png

One panel per file. The output is always a PNG, whatever its name; - writes it to standard output.
It needs matplotlib: pip install 'resilin[lab]'.
"""
CONVERT_EPILOG = """\
example:
  resilin trace convert spot.csv --max-replicas 16 --local-bsz 8 --step-seconds 30 -o batches.csv

Each step takes 30 seconds of the trace and has 8 samples for each replica that is present when it
begins; the counts are scaled to at most 16. While there are no replicas, there are no steps.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin trace",
        description="Makes, checks, plots and converts traces: CSV files with the header "
        "step,batchsize or time,replicas.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = ours.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_make(_verb(verbs, "make", "make a trace", MAKE_EPILOG))
    check = _verb(verbs, "check", "summarise traces, and report errors in them", CHECK_EPILOG)
    plot = _verb(verbs, "plot", "draw traces", PLOT_EPILOG)
    for verb in (check, plot):
        verb.add_argument("files", nargs="+", metavar="FILE", help="Traces of either kind.")
        verb.add_argument(
            "--restarts",
            choices=TRACE_RESTARTS,
            default="error",
            help="How to treat steps that restart at 0: reject them, or append them (default: "
            "%(default)s).",
        )
    tables.add_json_option(check)
    plot.add_argument("-o", "--out", required=True, metavar="FILE", help="PNG file to write.")
    _add_convert(_verb(verbs, "convert", "turn capacity into batch sizes", CONVERT_EPILOG))
    return ours


def _verb(verbs: Any, name: str, purpose: str, epilog: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return verb


def _add_make(make: argparse.ArgumentParser) -> None:
    kinds = make.add_subparsers(dest="kind", metavar="KIND", required=True)
    constant = kinds.add_parser("constant", help="the same size, or number of replicas, throughout")
    what = constant.add_mutually_exclusive_group(required=True)
    what.add_argument("--size", type=values.count, metavar="N", help="Global batch size.")
    what.add_argument("--replicas", type=values.count_or_none, metavar="N", help="Replicas.")
    length = constant.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=values.count, metavar="N", help="Steps, with --size.")
    length.add_argument(
        "--duration", type=values.seconds, metavar="TIME", help="Seconds, or 4h, with --replicas."
    )
    ramp = kinds.add_parser("ramp", help="batch sizes along a straight line")
    ramp.add_argument("--from", dest="first", type=values.count, required=True, metavar="N")
    ramp.add_argument("--to", dest="last", type=values.count, required=True, metavar="N")
    walk = kinds.add_parser("walk", help="batch sizes that wander between two bounds")
    walk.add_argument("--min", dest="lower", type=values.count, required=True, metavar="N")
    walk.add_argument("--max", dest="upper", type=values.count, required=True, metavar="N")
    walk.add_argument(
        "--ratio",
        type=float,
        default=1.1,
        metavar="X",
        help="Approximate factor between the sizes of two steps (default: %(default)s).",
    )
    for kind in (ramp, walk):
        kind.add_argument("--steps", type=values.count, required=True, metavar="N", help="Steps.")
    spot = kinds.add_parser("spot", help="replicas of a simulated spot market")
    spot.add_argument(
        "--max-replicas", type=values.count, required=True, metavar="N", help="Most replicas."
    )
    spot.add_argument(
        "--min-replicas",
        type=values.count_or_none,
        default=0,
        metavar="N",
        help="Fewest replicas (default: %(default)s).",
    )
    spot.add_argument(
        "--duration", type=values.seconds, required=True, metavar="TIME", help="Seconds, or 4h."
    )
    spot.add_argument(
        "--mean-hold",
        type=values.seconds,
        default="10min",
        metavar="TIME",
        help="Mean time between two changes (default: %(default)s).",
    )
    for kind in (walk, spot):
        kind.add_argument(
            "--seed", type=values.count_or_none, default=0, metavar="N", help="Seed of the trace."
        )
    for kind in (constant, ramp, walk, spot):
        _add_out(kind)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument(
        "capacity", metavar="CAPACITY", help="A file with the header time,replicas."
    )
    convert.add_argument(
        "--local-bsz",
        type=values.count,
        required=True,
        metavar="N",
        help="Samples per replica and step.",
    )
    convert.add_argument(
        "--step-seconds",
        type=values.seconds,
        required=True,
        metavar="TIME",
        help="Duration of a step in the time of the trace.",
    )
    convert.add_argument(
        "--max-replicas",
        type=values.count,
        metavar="N",
        help="Scale the replica counts of the trace to at most N.",
    )
    convert.add_argument(
        "--end",
        choices=TRACE_ENDS,
        default="hold",
        help="Behaviour after the end of the trace; hold adds one more step, with the last number "
        "of replicas (default: %(default)s).",
    )
    _add_out(convert)


def _add_out(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-o",
        "--out",
        default="-",
        metavar="FILE",
        help="Output file; - is standard output (default).",
    )


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Run one verb.

    Returns:
        0; 1 if a trace cannot be read, made or converted.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    if args.verb == "make":
        if args.kind == "constant" and (args.size is None) != (args.steps is None):
            ours.error("make constant takes --size with --steps, or --replicas with --duration")
        return _write(_make(args).format(), args.out)
    if args.verb == "check":
        return _check(args)
    if args.verb == "plot":
        return _plot(args)
    trace = read_trace(args.capacity)
    if isinstance(trace, BatchTrace):
        raise TraceError(f"{args.capacity} already has batch sizes: there is nothing to convert")
    batches = trace.batches(
        args.local_bsz,
        step_seconds=args.step_seconds,
        max_replicas=args.max_replicas,
        end=args.end,
    )
    return _write(batches.format(), args.out)


def _make(args: argparse.Namespace) -> BatchTrace | CapacityTrace:
    if args.kind == "ramp":
        return BatchTrace.ramp(args.first, args.last, args.steps)
    if args.kind == "walk":
        bounds = (args.lower, args.upper)
        return BatchTrace.random_walk(bounds, args.steps, seed=args.seed, step_ratio=args.ratio)
    if args.kind == "spot":
        return CapacityTrace.spot(
            args.max_replicas,
            args.duration,
            seed=args.seed,
            min_replicas=args.min_replicas,
            mean_hold=args.mean_hold,
        )
    if args.size is None:
        return CapacityTrace.constant(args.replicas, args.duration)
    return BatchTrace.constant(args.size, args.steps)


def _write(text: str, out: str) -> int:
    if out == "-":
        sys.stdout.write(text)
    else:
        Path(out).write_text(text, encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> int:
    rows = [_summary(file, args.restarts) for file in args.files]
    for row in rows:
        if "error" in row:
            say(row["error"])
    if args.json:
        print(tables.to_json(rows))
    elif good := [_cells(row) for row in rows if "error" not in row]:
        print(tables.to_text(HEADER, good))
    return int(any("error" in row for row in rows))


def _summary(file: str, restarts: TraceRestarts) -> dict[str, Any]:
    try:
        return {"file": file, **summarise(read_trace(file, restarts=restarts))}
    except (TraceError, OSError) as error:
        return {"file": file, "error": told(error)}


def _cells(row: dict[str, Any]) -> list[object]:
    zero = None if row["zero"] is None else f"{row['zero']:.1%}"
    length = f"{row['length']:g} {row['unit']}"
    numbers = [row["min"], f"{row['mean']:.2f}", row["max"], row["changes"]]
    return [row["file"], row["kind"], row["lines"], length, *numbers, zero]


def _plot(args: argparse.Namespace) -> int:
    load("matplotlib", "lab", "resilin trace plot")
    # matplotlib takes half a second to load, and nothing else here needs it.
    from resilin.lab import style
    from resilin.lab.trace_plots import draw

    traces = {file: read_trace(file, restarts=args.restarts) for file in args.files}
    out = sys.stdout.buffer if args.out == "-" else args.out
    style.save_png(draw(traces), out)  # type: ignore[arg-type]
    return 0
