"""Common parts of all benchmarks: its arguments, its one JSON line, and its verdict."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser of the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller form, about a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
    return parser


def parse_args(description: str, **flags: str) -> argparse.Namespace:
    """Reads the arguments that all benchmarks have, and the flags of one: their help by name."""
    parser = make_parser(description)
    for name, help in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=help)
    return parser.parse_args()


def seconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Sorted wall times of single calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)


def finish(
    name: str,
    figures: Mapping[str, Any],
    limits: Mapping[str, float],
    *,
    check: bool,
    undecided: Collection[str] | None = None,
) -> None:
    """Prints the figures as one JSON line; with `check`, exits 1 if one exceeds its limit.

    Args:
        name: Name of the benchmark.
        figures: What it has measured.
        limits: The most that some of them may be.
        check: Whether a figure above its limit is a failure.
        undecided: Figures too unsure to be compared with their limits; None if it has no such.
    """

    def comparison(key: str) -> str:
        return f"{key} is {figures[key]:g}, limit {limits[key]:g}"

    unsure = undecided or ()
    decided = (key for key in limits if key not in unsure)
    missed = [comparison(key) for key in decided if not figures[key] <= limits[key]]
    line = {"benchmark": name, **figures, "limits": dict(limits), "missed": missed}
    if undecided is not None:
        line["undecided"] = list(undecided)
    print(json.dumps(line), flush=True)
    for key in unsure:
        print(f"undecided: {comparison(key)}", file=sys.stderr)
    if check and missed:
        raise SystemExit("; ".join(missed))
