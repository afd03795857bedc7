"""`resilin replay`: run a script under a trace, by accumulation or with real processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from resilin.cli import values
from resilin.cli.errors import say, user_errors
from resilin.core.trace import TRACE_ENDS, TRACE_RESTARTS, BatchTrace, CapacityTrace
from resilin.lab import launch
from resilin.lab.capacity import log_of, replay_capacity
from resilin.lab.grid import log_end
from resilin.lab.replay import as_batches, new_run_dir, read_trace, replay_batches

EXAMPLE = """\
examples:
  a batch-size trace (step,batchsize), on this machine alone:
    resilin replay batches.csv train.py --epochs 10

  16 spot machines with 8 samples each, emulated by accumulation:
    resilin replay spot.csv --max-replicas 16 --local-bsz 8 --step-seconds 30 train.py

  the same market with real processes that join and leave, one hour in six seconds:
    resilin replay spot.csv --processes --max-replicas 3 --speed 600 train.py

The exit code is that of the script; 1 also if the script did not follow the trace.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin replay",
        description="Runs a script built on resilin while its batch size, or the machines that\n"
        "it runs on, follow a trace. Options come before the script.",
        usage="resilin replay TRACE [options] script.py [arguments of the script]",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "trace", metavar="TRACE", help="CSV file with the header step,batchsize or time,replicas."
    )
    ours.add_argument("script", metavar="script.py", help="Script to run.")
    ours.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="Arguments of the script."
    )
    ours.add_argument(
        "--run-dir",
        metavar="DIR",
        help="Directory for the event log. Default: resilin-runs/replay-TIME.",
    )
    ours.add_argument("--rule", help="Scaling rule, overriding the script's: NAME or module:NAME.")
    ours.add_argument(
        "--seed",
        type=values.count_or_none,
        help="Seed of the order of samples, unless the script sets one, and of random generators.",
    )
    add_trace_options(ours)
    ours.add_argument(
        "--replicas",
        type=values.count,
        metavar="N",
        help="Number of replicas on this machine that share each batch. Default: run the script "
        "as one process.",
    )
    group = ours.add_argument_group("a capacity trace with real processes")
    group.add_argument(
        "--processes",
        action="store_true",
        help="Start and stop agents of resilin run as the trace prescribes.",
    )
    group.add_argument(
        "--speed", type=float, help="Seconds of the trace per real second. Default: 1."
    )
    return ours


def add_trace_options(ours: argparse.ArgumentParser) -> None:
    """Add the options for reading a trace and for turning capacity into batch sizes."""
    ours.add_argument(
        "--end",
        choices=TRACE_ENDS,
        default="hold",
        help="Behaviour after the end of the trace (hold).",
    )
    ours.add_argument(
        "--restarts",
        choices=TRACE_RESTARTS,
        default="error",
        help="How to treat steps that restart at 0: reject them, or append them (error).",
    )
    group = ours.add_argument_group("a capacity trace turned into batch sizes")
    group.add_argument(
        "--local-bsz", type=values.count, metavar="N", help="Samples per replica and step."
    )
    group.add_argument(
        "--step-seconds",
        type=values.seconds,
        metavar="TIME",
        help="Duration of a step in the time of the trace.",
    )
    group.add_argument(
        "--max-replicas",
        type=values.count,
        metavar="N",
        help="Scale the replica counts of the trace to at most N.",
    )


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Replay a trace.

    Returns:
        The exit code of the script, or 1 if the script did not follow the trace.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    trace = read_trace(args.trace, end=args.end, restarts=args.restarts)
    _check(ours, args, trace)
    launch.check_script(args.script)
    if args.rule is not None:
        launch.check_rule(args.rule)
    with launch.stoppable():
        if args.processes:
            assert isinstance(trace, CapacityTrace)
            return _with_processes(args, trace)
        batches = as_batches(
            trace,
            local_bsz=args.local_bsz,
            step_seconds=args.step_seconds,
            max_replicas=args.max_replicas,
            name=args.trace,
        )
        run_dir = new_run_dir(args.run_dir)
        say(f"writing events to {run_dir}")
        return replay_batches(
            batches,
            args.script,
            args.arguments,
            run_dir=run_dir,
            replicas=args.replicas,
            rule=args.rule,
            seed=args.seed,
        )


def _with_processes(args: argparse.Namespace, trace: CapacityTrace) -> int:
    run_dir = new_run_dir(args.run_dir)
    say(f"writing events, checkpoints and the logs of the agents to {run_dir}")
    code = replay_capacity(
        trace,
        args.script,
        args.arguments,
        run_dir=run_dir,
        speed=1.0 if args.speed is None else args.speed,
        max_replicas=args.max_replicas,
        rule=args.rule,
        seed=args.seed,
        say=say,
    )
    if code:
        say(f"the job failed; the last lines of {log_of(Path(run_dir), 0)}:")
        say("\n" + log_end(log_of(Path(run_dir), 0)))
    return code


def _check(
    ours: argparse.ArgumentParser,
    args: argparse.Namespace,
    trace: BatchTrace | CapacityTrace,
) -> None:
    """Reject options that do not apply to the trace or to the mode of replay."""
    sizes = {"--local-bsz": args.local_bsz, "--step-seconds": args.step_seconds}
    given = [name for name, value in sizes.items() if value is not None]
    if isinstance(trace, BatchTrace):
        given += [] if args.max_replicas is None else ["--max-replicas"]
        given += ["--processes"] if args.processes else []
        if given:
            ours.error(
                f"{args.trace} has batch sizes; only for capacity traces: {', '.join(given)}"
            )
    if args.processes:
        given += [] if args.replicas is None else ["--replicas"]
        if given:
            ours.error(
                f"with --processes the script chooses its batch size, so these options have no "
                f"meaning: {', '.join(given)}"
            )
    elif args.speed is not None:
        ours.error("--speed needs --processes: batch sizes follow steps, not time")
    elif isinstance(trace, CapacityTrace) and len(given) < 2:
        ours.error(
            f"{args.trace} has replicas over time: give --local-bsz and --step-seconds to turn "
            "them into batch sizes, or --processes for real processes"
        )
