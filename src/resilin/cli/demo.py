"""`resilin demo`: a job that loses a worker on purpose and resumes, in one command.

It is `resilin run --warm` with a script that is part of the package, `demo_job.py`; with `--live`
the other workers keep running.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from resilin.cli import values

JOB = Path(__file__).with_name("demo_job.py")
KILL_AT = 40
LIVE_PAUSE = 0.02
"""Seconds that a step of the live demo waits, so that the replacement joins while it trains."""
EPILOG = f"""\
example:
  resilin demo --nproc 3 --kill-at 100
  resilin demo --live

Trains a small network on generated data. At step {KILL_AT} one worker is killed with SIGKILL; all
workers are restarted and resume after the last completed step, and each sample is still used
exactly once per epoch. With --live the others continue without it, and a new worker joins them.
The exit code is 1 if a sample was lost or repeated.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin demo",
        description="Trains on this machine, kills one of its own workers, and resumes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "--nproc",
        type=values.count,
        default=2,
        metavar="N",
        help="Number of workers (default: %(default)s).",
    )
    ours.add_argument(
        "--kill-at",
        type=values.count,
        default=KILL_AT,
        metavar="STEP",
        help="Step at which the last worker is killed (default: %(default)s, of 225 steps).",
    )
    ours.add_argument(
        "--live", action="store_true", help="Keep the other workers running, and replace that one."
    )
    return ours


def main(arguments: Sequence[str]) -> int:
    """Run the job; the exit code is that of `resilin run`."""
    args = parser().parse_args(arguments)
    from resilin.cli import run

    options = ["--warm", "--nproc", str(args.nproc), *(["--live"] if args.live else [])]
    pause = ["--pause", str(LIVE_PAUSE)] if args.live else []
    return run.main([*options, str(JOB), "--kill-at", str(args.kill_at), *pause])
