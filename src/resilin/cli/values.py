"""Values of options as a person writes them, and the default run directory.

Each function but the last is a `type=` of argparse: the error it raises is reported for that
option.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from resilin.engine.environment import RUNS

_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_MOST_COUNTS = 10_000
_LAST_PORT = 65535


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def count_or_none(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if re.fullmatch("0{1,15}", text) else count(text)


def port(text: str) -> int:
    """A port, from 0 (any free one) to 65535."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {_LAST_PORT}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Counts and ranges of counts, such as `1,2,4-8`; sorted, each one once."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = (piece.strip() for piece in part.partition("-"))
        low = count(first)
        high = count(last) if last or "-" in part else low
        if high < low:
            raise argparse.ArgumentTypeError(f"{part!r} ends ({high}) before it begins ({low})")
        if len(found) + high - low >= _MOST_COUNTS:
            raise argparse.ArgumentTypeError(f"{text!r} holds more than {_MOST_COUNTS} counts")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def seconds(text: str) -> float:
    """A time in seconds above 0, or with a unit: `90`, `90s`, `10min`, `1.5h`, `2d`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(|s|min|h|d)\s*", text)
    time = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not 0 < time < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time above 0 such as 90, 90s, 10min, 1.5h or 2d"
        )
    return time


def newest_run() -> str:
    """Directory of the latest run under the current directory.

    Raises:
        ValueError: There is no run.
    """
    runs = [path for path in Path(RUNS).glob("*") if path.is_dir()]
    if not runs:
        raise ValueError(f"there is no run in {Path(RUNS).resolve()}: name a RUN_DIR")
    return str(max(runs, key=lambda path: path.stat().st_mtime))
