"""Makes the recording of `resilin demo --live` that README and site show, from a run that happened.

The command runs in a terminal of its own (a pty). Its lines are kept with the time at which they
appeared, and the steps of each worker come from the event log of the same run. Nothing is sped up;
only the start of the processes, before the first step, is left out.

    python docs/figures/recording.py --record   # runs the demo, writes recording.json
    python docs/figures/recording.py            # draws docs/assets/recording.svg from it
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from resilin.core.events import FaultEvent, RescaleEvent, StepEvent
from resilin.telemetry.read import read_events

HERE = Path(__file__).parent
DATA = HERE / "recording.json"
COMMAND = ["demo", "--live", "--nproc", "3"]
COLUMNS = 74
"""Width of the terminal, in characters."""
LIMIT = 240
"""Seconds that the demo may take."""
Recording: TypeAlias = "dict[str, Any]"

# The run -----------------------------------------------------------------------------------------


def record() -> Recording:
    """Runs the demo; returns its lines, steps and changes, with seconds since the first step."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = run_in_a_terminal([sys.executable, "-m", "resilin.cli", *COMMAND], Path(scratch))
        (run,) = Path(scratch, "resilin-runs").iterdir()
        events = list(read_events(run))
    steps = [event for event in events if isinstance(event, StepEvent)]
    zero = steps[0].time - steps[0].seconds
    members = {0: list(range(steps[0].replicas))}
    for event in events:
        if isinstance(event, RescaleEvent):
            members[event.generation] = changed(members[event.generation - 1], event)
    (lost,) = [event for event in events if isinstance(event, FaultEvent)]
    return {
        "command": " ".join(["resilin", *COMMAND]),
        "lines": [[round(when - zero, 3), text] for when, text in lines],
        "steps": [[round(event.time - zero, 3), event.generation] for event in steps],
        "members": [members[number] for number in sorted(members)],
        "lost": [round(lost.time - zero, 3), lost.replica],
    }


def changed(members: list[int], event: RescaleEvent) -> list[int]:
    """Workers of the next generation: the reason of an event names those that left or joined."""
    found = re.findall(r"-(\d+) (left|joined)", event.reason)
    left = {int(number) for number, what in found if what == "left"}
    joined = [int(number) for number, what in found if what == "joined"]
    now = [number for number in members if number not in left] + joined
    if len(now) != event.replicas:
        raise ValueError(f"{event.reason!r} leaves {now}, but there are {event.replicas} replicas")
    return now


def run_in_a_terminal(command: list[str], directory: Path) -> list[tuple[float, str]]:
    """Runs a command in a pty; returns its lines, each with the time at which it was complete."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESILIN_")}
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=env
    )
    os.close(theirs)
    lines, rest, end = [], b"", time.monotonic() + LIMIT
    try:
        while time.monotonic() < end:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # EIO: the last process has closed the terminal
                break
            if not chunk:
                break
            *complete, rest = (rest + chunk).split(b"\n")
            lines += [(time.time(), line.decode().rstrip("\r")) for line in complete]
        if child.wait(timeout=30):
            raise RuntimeError(f"{command} ended with {child.returncode}: {lines}")
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(timeout=30)
        os.close(ours)
    return lines


def load() -> Recording:
    """The run that was recorded."""
    return json.loads(DATA.read_text(encoding="utf-8"))


# The picture -------------------------------------------------------------------------------------

WIDTH, EDGE, SIZE, DOWN, LANE = 620, 16, 13, 19, 22
LABELS = 78
"""Width of the names of the workers."""
BEFORE, AFTER = 0.6, 3.0
"""Seconds that are shown before the first step, and after the last one."""
STYLE = """\
text{{font:{size}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
fill:#c9d1d9;white-space:pre}}
.dim{{fill:#8b949e}}.lost{{fill:#ff7b72}}.live{{fill:#56d364}}.new{{fill:#79c0ff}}
.cover{{transform:translateX({across}px);animation:cover {seconds}s linear infinite}}
@keyframes cover{{0%,{first}%{{transform:none}}{last}%,100%{{transform:translateX({across}px)}}}}
{lines}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}"""


def draw(data: Recording) -> str:
    """A terminal and, below it, one row for each worker with a mark for each of its steps."""
    rows = [
        (when, text[start : start + COLUMNS], kind(text))
        for when, text in data["lines"]
        for start in range(0, max(1, len(text)), COLUMNS)
    ]
    last = data["steps"][-1][0]
    seconds = BEFORE + max(last, rows[-1][0]) + AFTER
    workers = 1 + max(max(members) for members in data["members"])
    terminal = 62 + DOWN * len(rows)
    height = terminal + 40 + LANE * workers + EDGE
    across = WIDTH - LABELS - 2 * EDGE
    per_second = across / last

    def share(when: float) -> float:
        return round(100 * (BEFORE + when) / seconds, 2)

    keyframes, texts = [], []
    for number, (when, text, how) in enumerate(rows):
        y = 62 + DOWN * number
        name = ""
        if when > 0:
            name = f"l{number} "
            keyframes.append(
                f".l{number}{{animation:l{number} {seconds:.1f}s step-end infinite}}"
                f"@keyframes l{number}{{0%{{opacity:0}}{share(when)}%{{opacity:1}}}}"
            )
        texts.append(f'<text class="{name}{how}" x="{EDGE}" y="{y}">{escape(text)}</text>')
    style = STYLE.format(
        size=SIZE,
        across=across + EDGE,
        seconds=f"{seconds:.1f}",
        first=share(0),
        last=share(last),
        lines="\n".join(keyframes),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>{escape(data["command"])}, recorded</title>',
        f"<style>{style}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117" stroke="#30363d"/>',
        *(
            f'<circle cx="{EDGE + 6 + 18 * number}" cy="18" r="5" fill="{colour}"/>'
            for number, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
        ),
        f'<text x="{EDGE}" y="43">$ {escape(data["command"])}</text>',
        *texts,
        lanes(data, terminal, per_second),
        f'<rect class="cover" x="{EDGE + LABELS}" y="{terminal + 18}" width="{across + EDGE - 2}" '
        f'height="{LANE * workers + 8}" fill="#0d1117"/></svg>',
    ]
    return "\n".join(parts) + "\n"


def lanes(data: Recording, top: int, per_second: float) -> str:
    """One row for each worker: a mark for each step that it has made, and where it was killed."""
    parts = [
        f'<text class="dim" x="{EDGE}" y="{top + 12}">'
        f"each mark is a step of a worker; {data['steps'][-1][0]:.0f} s, not sped up</text>"
    ]
    left = EDGE + LABELS
    for worker in range(1 + max(max(members) for members in data["members"])):
        y = top + 24 + LANE * worker
        parts.append(f'<text class="dim" x="{EDGE}" y="{y + 12}">worker {worker}</text>')
        made = [
            left + when * per_second
            for when, generation in data["steps"]
            if worker in data["members"][generation]
        ]
        marks = "".join(f"M{x:.1f} {y}v14" for x in made)
        new = worker not in data["members"][0]
        colour = "#79c0ff" if new else "#56d364"
        parts.append(f'<path d="{marks}" stroke="{colour}" fill="none"/>')
        if new:
            at = f'x="{made[0] - 8:.1f}" y="{y + 12}"'
            parts.append(f'<text class="new" text-anchor="end" {at}>joins</text>')
    when, worker = data["lost"]
    x, y = left + when * per_second, top + 24 + LANE * worker
    parts.append(f'<path d="M{x:.1f} {y - 2}v18" stroke="#ff7b72" stroke-width="3"/>')
    parts.append(f'<text class="lost" x="{x + 8:.1f}" y="{y + 12}">killed (SIGKILL)</text>')
    return "\n".join(parts)


def kind(text: str) -> str:
    """Class of a line: the loss, those that continue, or another one."""
    if "SIGKILL" in text:
        return "lost"
    if "continue" in text and "worker" not in text.partition("continue")[0]:
        return "live"
    return "dim" if text.startswith("resilin: writing") else ""


def main() -> None:
    """Runs the demo if asked, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the demo again")
    parser.add_argument("--out", type=Path, default=HERE.parent / "assets" / "recording.svg")
    args = parser.parse_args()
    if args.record:
        DATA.write_text(json.dumps(record(), indent=1) + "\n")
    args.out.write_text(draw(load()))


if __name__ == "__main__":
    main()
