"""`resilin clean`: states in memory that jobs have left on this machine.

A job that failed keeps its latest state, so that it can be resumed under its id. A job that nobody
resumes keeps it too, and shared memory is memory: this command shows what is left, and removes it
when asked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilin.cli import tables, values
from resilin.cli.errors import user_errors
from resilin.cli.memory import abandoned, remove_abandoned
from resilin.core.text import clean
from resilin.engine import environment
from resilin.telemetry.wording import amount, span

EPILOG = """\
example:
  resilin clean                     # what is left, of jobs that have no process here
  resilin clean --remove 8cd5f030c418
  resilin clean --remove --older 2d

A job of which only this machine had a part can no longer be resumed from memory afterwards; its
checkpoints are not touched.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin clean",
        description="Shows the states in memory of jobs that have no process on this machine, and "
        "removes them with --remove.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("ids", nargs="*", metavar="ID", help="Only those of these jobs.")
    ours.add_argument("--remove", action="store_true", help="Remove them.")
    ours.add_argument(
        "--older",
        type=values.seconds,
        default=0.0,
        metavar="TIME",
        help="Only those that were not changed for this time: 90s, 10min, 1.5h, 2d.",
    )
    ours.add_argument(
        "--memory-dir",
        type=Path,
        metavar="DIR",
        help="Directory in which jobs keep their state (default: that of this user in /dev/shm).",
    )
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Show or remove what is left.

    Returns:
        0; 1 if a job that was named has nothing here, or runs.
    """
    args = parser().parse_args(arguments)
    parent = args.memory_dir or environment.memory_parent()
    found = {path.name: path for path in abandoned(parent)}
    for name in args.ids:
        if name not in found:
            if (parent / name).is_dir():
                raise ValueError(f"job {name} has processes on this machine: its state is in use")
            raise ValueError(f"there is no state of a job {name} in {parent}")
    chosen = [path for name, path in found.items() if not args.ids or name in args.ids]
    rows: list[dict[str, Any]] = []
    for path in chosen:
        size, changed = _extent(path)
        age = time.time() - changed
        if age < args.older:
            continue
        if args.remove and not remove_abandoned(path):
            continue  # a job has just been started under this id
        rows.append({"job": path.name, "bytes": size, "seconds": age, "removed": args.remove})
    if args.json:
        print(tables.to_json(rows))
        return 0
    if not rows:
        print(f"nothing is left in {clean(str(parent))}")
        return 0
    cells = [(row["job"], f"{amount(row['bytes'])}B", span(row["seconds"])) for row in rows]
    print(tables.to_text(["job", "size", "unchanged for"], cells))
    print("removed" if args.remove else "to remove them: resilin clean --remove")
    return 0


def _extent(path: Path) -> tuple[int, float]:
    """Bytes of all files below a directory, and the time of its last change."""
    size, changed = 0, path.stat().st_mtime
    for each in path.rglob("*"):
        with suppress(FileNotFoundError):
            status = each.lstat()
            size += status.st_size if each.is_file() else 0
            changed = max(changed, status.st_mtime)
    return size, changed
