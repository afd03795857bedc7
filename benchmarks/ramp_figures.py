"""Figures of `ramp.py`: what its runs say, paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from resilin.lab.intervals import mean_interval

CONTENDERS = ("doubling", "ramp")


class Point(NamedTuple):
    steps: int
    samples: int
    progress: float
    loss: float


@dataclass(frozen=True)
class Run:
    name: str
    seed: int
    points: tuple[Point, ...]
    reached: tuple[float, float] | None
    """Steps and samples at which it reaches the target; None if it never does."""
    last_size: int
    cpu_seconds: float


def crossing(points: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Steps and samples at which the loss first reaches the target, between two evaluations."""
    for index, point in enumerate(points):
        if point.loss > target:
            continue
        if not index:
            return float(point.steps), float(point.samples)
        before = points[index - 1]
        part = (before.loss - target) / (before.loss - point.loss)
        return (
            before.steps + part * (point.steps - before.steps),
            before.samples + part * (point.samples - before.samples),
        )
    return None


def summarise(runs: Sequence[Run]) -> dict[str, float | None]:
    """Figures of each contender against the constant batch, paired by seed, with 95% intervals."""
    base = {run.seed: run for run in runs if run.name == "constant"}
    figures: dict[str, float | None] = {"num_seeds": len(base)}
    for name in CONTENDERS:
        mine = [run for run in runs if run.name == name]
        pairs = [(run.reached, base[run.seed].reached) for run in mine]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        for what, index in (("steps", 0), ("samples", 1)):
            ratio = mean_interval([a[index] / b[index] for a, b in known])
            figures[f"{name}_{what}_ratio"] = ratio.mean
            figures[f"{name}_{what}_ratio_low"] = ratio.mean - ratio.half
            figures[f"{name}_{what}_ratio_high"] = ratio.mean + ratio.half
        figures[f"{name}_never"] = len(pairs) - len(known)
        figures[f"{name}_last_size"] = statistics.fmean(run.last_size for run in mine)
    return figures
