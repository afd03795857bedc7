"""Common parts of all benchmarks: its arguments, its one JSON line, and its verdict."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller form, about a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
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
    name: str, figures: Mapping[str, Any], limits: Mapping[str, float], *, check: bool
) -> None:
    """Prints the figures as one JSON line; with `check`, exits 1 if one exceeds its limit."""
    missed = [
        f"{key} is {figures[key]:g}, limit {limit:g}"
        for key, limit in limits.items()
        if not figures[key] <= limit
    ]
    print(json.dumps({"benchmark": name, **figures, "limits": dict(limits), "missed": missed}))
    if check and missed:
        raise SystemExit("; ".join(missed))
