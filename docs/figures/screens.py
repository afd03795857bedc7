"""Makes the pictures of docs/guides/watching.md from a run that really happened.

The run loses a worker, goes on, is stopped, and goes on with fewer replicas. Its events are what
`resilin top` and `resilin report` are shown with.

    python docs/figures/screens.py                  # about two minutes, writes docs/assets/*.png
    python docs/figures/screens.py --run DIR        # from the events of another run
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme

from resilin.core.events import StepEvent
from resilin.lab import style
from resilin.lab.panels import time_panels
from resilin.lab.plots import draw
from resilin.telemetry.read import last_event, read_events
from resilin.telemetry.run import Run
from resilin.telemetry.status import Status
from resilin.telemetry.view import View

HERE = Path(__file__).parent
JOB = "screens_job.py"
THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


# A run -------------------------------------------------------------------------------------------


def make_run(directory: Path, *, epochs: int, kill_at: int, stop_at: int) -> Path:
    """Trains until a worker was lost and the job was stopped, and then to the end on one replica.

    Args:
        directory: Where the run goes; must not exist.
        epochs: Length of the run.
        kill_at: Step at which replica 1 dies.
        stop_at: Step at which the job is asked to stop, as by the scheduler of a cluster.
    """
    run = directory / "spot-17"
    _launch(directory, run, ["--nproc", "2"], epochs, kill_at=kill_at, stop_at=stop_at)
    _launch(directory, run, ["--nproc", "1"], epochs)
    return run


def _launch(
    directory: Path,
    run: Path,
    options: list[str],
    epochs: int,
    *,
    kill_at: int | None = None,
    stop_at: int | None = None,
) -> None:
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", *options]
    command += ["--run-dir", str(run), "--checkpoint-dir", str(directory / "checkpoints")]
    command += ["--memory-dir", str(directory / "memory"), "--rdzv-id", "spot-17"]
    command += [JOB, "--epochs", str(epochs)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESILIN_")}
    agent = subprocess.Popen(command, env={**env, "OMP_NUM_THREADS": "1"}, cwd=HERE)
    try:
        if stop_at is None:
            if agent.wait(timeout=300):
                raise RuntimeError(f"the job failed with {agent.returncode}")
            return
        end = time.monotonic() + 300
        while (last := last_event(run)) is None or last.step < stop_at:
            if agent.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job did not come to step {stop_at}: {last}")
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        agent.wait(timeout=60)
    finally:
        if agent.poll() is None:
            agent.terminate()
            try:
                agent.wait(timeout=30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait(timeout=30)


# Its pictures ------------------------------------------------------------------------------------


def picture_of_top(run: Path, out: Path, *, at: float = 0.8, width: int = 100) -> None:
    """What `resilin top` showed when this part of the run's steps was told of."""
    told = list(read_events(run))
    steps = [event for event in told if isinstance(event, StepEvent)]
    moment = steps[int(at * (len(steps) - 1))].time
    status = Status(run.name)
    status.take(event for event in told if event.time <= moment)
    console = Console(
        width=width, height=26, force_terminal=True, color_system="truecolor", file=sys.stderr
    )
    lines = console.render_lines(View(status, moment + 0.4, height=26))
    terminal(lines, width).quantize(128).save(out, optimize=True)


def picture_of_report(run: Path, out: Path) -> None:
    """The charts of `resilin report`."""
    runs = [Run.load(run)]
    style.save_png(draw(time_panels(runs), runs), out)


def terminal(lines: list[list[Segment]], width: int, size: int = 26) -> Image.Image:
    """A terminal window with these lines in it."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    plain = ImageFont.truetype(str(folder / "DejaVuSansMono.ttf"), size)
    bold = ImageFont.truetype(str(folder / "DejaVuSansMono-Bold.ttf"), size)
    across, (ascent, descent) = plain.getlength("x"), plain.getmetrics()
    down = ascent + descent
    edge, bar = 24, 44
    image = Image.new(
        "RGB",
        (round(across * width) + 2 * edge, down * len(lines) + bar + edge + 12),
        tuple(THEME.background_color),
    )
    canvas = ImageDraw.Draw(image)
    canvas.rectangle((0, 0, image.width, bar), fill=(33, 38, 45))
    for number, colour in enumerate([(255, 95, 86), (255, 189, 46), (39, 201, 63)]):
        x = edge + 8 + 28 * number
        canvas.ellipse((x - 8, bar // 2 - 8, x + 8, bar // 2 + 8), fill=colour)
    title = "resilin top resilin-runs/spot-17"
    middle = (image.width - plain.getlength(title)) / 2
    canvas.text((middle, (bar - down) / 2), title, font=plain, fill=(139, 148, 158))
    for row, line in enumerate(lines):
        column = 0
        for text, how, _ in line:
            fill = _colour(how)
            font = bold if how is not None and how.bold else plain
            for character in text.rstrip("\n"):
                at = (edge + across * column, bar + 12 + down * row)
                _draw(canvas, at, (across, down), character, font, fill)
                column += 1
    return image


def _draw(canvas, at, cell, character, font, fill) -> None:  # type: ignore[no-untyped-def]
    height = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588".find(character)
    if height < 0:
        canvas.text(at, character, font=font, fill=fill)
        return
    # Blocks of neighbouring cells have to meet, which glyphs do not always do.
    (x, y), (across, down) = at, cell
    top = y + down * (1 - 0.86 * (height + 1) / 8)
    canvas.rectangle((round(x), round(top), round(x + across) - 1, round(y + down) - 3), fill=fill)


def _colour(how: Style | None) -> tuple[int, ...]:
    ground, fill = THEME.background_color, tuple(THEME.foreground_color)
    if how is not None and how.color is not None:
        fill = tuple(how.color.get_truecolor(THEME))
    if how is not None and how.dim:
        fill = tuple(round(0.6 * f + 0.4 * g) for f, g in zip(fill, ground, strict=True))
    return fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="take the events of this run")
    parser.add_argument("--out", type=Path, default=HERE.parent / "assets", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = args.run
        if run is None:
            length = (
                {"epochs": 4, "kill_at": 60, "stop_at": 120}
                if args.quick
                else {"epochs": 60, "kill_at": 900, "stop_at": 2000}
            )
            run = make_run(Path(scratch), **length)
        picture_of_top(run, args.out / "top.png")
        picture_of_report(run, args.out / "report.png")


if __name__ == "__main__":
    main()
