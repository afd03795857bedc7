"""Makes the picture of docs/guides/live.md from two runs that really happened.

Both are the script of `resilin demo` on three workers, one of which kills itself: once with
`--live`, once with a restart. What is drawn is in their events.

    python docs/figures/live.py                       # half a minute, writes docs/assets/live.png
    python docs/figures/live.py --runs LIVE RESTART   # from runs that were made before
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.axes import Axes

from resilin.cli.demo import JOB
from resilin.core.events import Event, FaultEvent, RescaleEvent, StepEvent
from resilin.lab import style
from resilin.telemetry.read import read_events

HERE = Path(__file__).parent
KILL_AT, PAUSE = 60, 0.02
BEFORE, AFTER = 1.0, 6.0
"""Seconds around the kill that are drawn."""


def make_runs(directory: Path) -> tuple[Path, Path]:
    """Trains twice; returns where the events are."""
    live, restart = directory / "live", directory / "restart"
    for run_dir, options in ((live, ["--live"]), (restart, [])):
        command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "3", *options]
        command += ["--run-dir", str(run_dir), str(JOB)]
        command += ["--kill-at", str(KILL_AT), "--pause", str(PAUSE)]
        subprocess.run(command, check=True, timeout=300)
    return live, restart


def timeline(ax: Axes, events: list[Event], title: str) -> None:
    """One bar per step, as high as there are replicas; the changes are marked."""
    (lost,) = [event for event in events if isinstance(event, FaultEvent)]
    drawn = [e for e in events if -BEFORE <= e.time - lost.time <= AFTER]
    steps = [event for event in drawn if isinstance(event, StepEvent)]
    times = [event.time - lost.time for event in steps]
    ax.vlines(times, 0, [event.replicas for event in steps], color=style.colour(0), linewidth=1)
    gap = max(b.time - a.time for a, b in itertools.pairwise(steps))
    ax.axvline(0, color=style.ALARM, linewidth=1.4)
    ax.text(0, 3.15, "SIGKILL ", color=style.ALARM, ha="right", fontsize=8.5)
    for event in drawn:
        if not isinstance(event, RescaleEvent):
            continue
        when = event.time - lost.time
        ax.axvline(when, color=style.colour(1), linewidth=1.4)
        text = f" {event.replicas} replicas after {event.seconds:.2f} s"
        if event.replicas == event.replicas_before:
            text += " (restarted)"
        elif event.replicas > event.replicas_before:
            text += " (a new worker has joined)"
        ax.text(when, 3.15, text, color=style.colour(1), fontsize=8.5)
    ax.set_ylim(0, 3.6)
    ax.set_xlim(-BEFORE, AFTER)
    ax.set_yticks([0, 1, 2, 3])
    style.describe(ax, title=f"{title}: longest time between two steps {gap:.2f} s", y="replicas")


def draw(live: Path, restart: Path, out: Path) -> None:
    """Both runs, above each other, from the moment in which the launcher saw the loss."""
    figure = style.figure(9, 4.2)
    above, below = style.panels(figure, 2, sharex=True)
    timeline(above, list(read_events(live)), "resilin run --warm --live")
    timeline(below, list(read_events(restart)), "resilin run --warm")
    style.describe(below, x="seconds since the launcher saw the loss; each blue line is a step")
    style.save_png(figure, out)


def main() -> None:
    """Makes the runs unless they are given, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, nargs=2, metavar=("LIVE", "RESTART"))
    parser.add_argument("--out", type=Path, default=HERE.parent / "assets" / "live.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        draw(*(args.runs or make_runs(Path(scratch))), args.out)


if __name__ == "__main__":
    main()
