"""`resilin top`: a running job on one screen."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resilin.cli import values
from resilin.cli.errors import user_errors
from resilin.telemetry.extras import load
from resilin.telemetry.read import Follower
from resilin.telemetry.status import Status

SHORTEST = 0.05
"""Shortest interval between two polls, in seconds."""
STALE = 1.0
"""Seconds after which the screen is redrawn without new events, because its times have changed."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin top",
        description="Shows a run while it is running: replicas, batch size, learning rate, gain, "
        "noise,\ngoodput, progress and the latest events. It only reads the event log of the run, "
        "so it needs\nno connection to the job. Ctrl-C ends the view, not the job.",
        epilog="example:\n"
        "  resilin run --nproc 4 --run-dir runs/a train.py     # in one terminal\n"
        "  resilin top runs/a                                  # in another one\n"
        "  resilin top --json runs/a | jq .seconds_left        # for a script\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="?",
        help="Directory with the events of a run (default: the latest in resilin-runs).",
    )
    ours.add_argument(
        "--once",
        action="store_true",
        help="Print one screen and exit. Implied if standard output is not a terminal.",
    )
    ours.add_argument(
        "--json", action="store_true", help="Print the state as one JSON object and exit."
    )
    ours.add_argument(
        "--every",
        type=values.seconds,
        default=0.5,
        metavar="SECONDS",
        help="Interval between two reads of the event log (default: %(default)s).",
    )
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Show a run until Ctrl-C, or once.

    Returns:
        0; 1 if the run has no events, or a package is missing.
    """
    args = parser().parse_args(arguments)
    args.run_dir = args.run_dir or values.newest_run()
    status, follower = Status(Path(args.run_dir).resolve().name), Follower(args.run_dir)
    try:
        if args.json:
            return _print_json(status, follower, args.run_dir)
        load("rich", "lab", "resilin top")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Characters that the terminal cannot show must not end the view.
            sys.stdout.reconfigure(errors="replace")
        if args.once or not sys.stdout.isatty():
            return _print_once(status, follower, args.run_dir)
        return _follow(status, follower, args.every)
    except KeyboardInterrupt:
        return 0


def _read(status: Status, follower: Follower, run_dir: str) -> None:
    status.take(follower.poll())
    if status.last is None:
        raise ValueError(
            f"{run_dir} has no events: a job writes them with `resilin run --run-dir {run_dir} "
            f"...`, or with `resilin.events_to({run_dir!r})` in its script"
        )


def _print_json(status: Status, follower: Follower, run_dir: str) -> int:
    _read(status, follower, run_dir)
    state = status.as_dict(time.time())
    state["damaged_lines"] = len(follower.damage)
    print(json.dumps(state, indent=2, allow_nan=False))
    return 0


def _print_once(status: Status, follower: Follower, run_dir: str) -> int:
    from rich.console import Console

    from resilin.telemetry.view import View

    _read(status, follower, run_dir)
    Console().print(View(status, time.time(), note=_note(follower)))
    return 0


def _follow(status: Status, follower: Follower, every: float) -> int:
    from rich.console import Console
    from rich.live import Live

    from resilin.telemetry.view import View

    console = Console()

    def picture() -> View:
        return View(status, time.time(), height=console.height, note=_note(follower))

    with Live(picture(), console=console, screen=True, auto_refresh=False) as live:
        drawn, size = 0.0, console.size
        while True:
            told = follower.poll()
            status.take(told)
            now = time.monotonic()
            if told or size != console.size or now - drawn >= STALE:
                live.update(picture(), refresh=True)
                drawn, size = now, console.size
            time.sleep(max(every, SHORTEST))


def _note(follower: Follower) -> str:
    if not follower.damage:
        return ""
    return f"{len(follower.damage)} lines could not be read; the last one: {follower.damage[-1]}"
