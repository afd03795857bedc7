"""The result of a run, from its events: the last value and the curve of each metric.

A metric is recorded by the script between steps, for example after an evaluation, with
`resilin.record(...)`. The last value counts, not the best one, which would be a choice made with
the test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resilin.core.events import EpochEvent, MetricsEvent, StepEvent
from resilin.telemetry.read import read_events

LOSS = "loss"
"""The metric that is also recorded within steps."""
LAST_PART = 0.1
"""Fraction of the reported steps, at the end, over which the loss of a run is averaged."""
MOST_POINTS = 100
"""Largest number of points of a stored curve; each is the mean of several recorded values."""


Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Samples used, and the values of a metric there."""


class ConcernsAllRuns(ValueError):
    """A reason why no run of the script can have a result."""


class UnclearMetric(ConcernsAllRuns):
    """The metric to compare was not recorded, or there are several to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run."""

    metrics: Mapping[str, float]
    """The last value of each metric that was recorded between steps."""
    step_loss: float | None
    """Mean loss of the last steps, if it was recorded in them."""
    curves: Mapping[str, Curve]
    """The curve of each metric along the run."""
    steps: int
    """Optimizer steps."""
    samples: int
    """Samples used."""
    progress: float
    """Reference steps of progress."""
    seconds: float
    """Seconds from the first event to the last."""

    def value(self, metric: str) -> float:
        """The result in one metric.

        Raises:
            UnclearMetric: The run did not record it.
        """
        if metric in self.metrics:
            return self.metrics[metric]
        if metric == LOSS and self.step_loss is not None:
            return self.step_loss
        raise UnclearMetric(
            f"metric {metric!r} was not recorded between steps; recorded were: "
            f"{', '.join(self.names()) or 'none'}"
        )

    def names(self) -> list[str]:
        """Names of the metrics that have a value."""
        return sorted(self.metrics) or ([] if self.step_loss is None else [LOSS])

    @classmethod
    def from_run(cls, run_dir: Path) -> Result:
        """Reads the events of a run."""
        metrics: dict[str, float] = {}
        curves: dict[str, list[tuple[float, float]]] = {}
        losses: list[tuple[float, float]] = []
        steps = samples = 0
        progress, first, last = 0.0, math.inf, -math.inf
        for event in read_events(run_dir):
            first, last = min(first, event.time), max(last, event.time)
            steps = max(steps, event.step)
            if isinstance(event, StepEvent | EpochEvent):
                samples, progress = event.samples, event.progress
            if isinstance(event, StepEvent) and event.loss is not None:
                losses.append((event.samples, event.loss))
            if isinstance(event, MetricsEvent):
                metrics.update(event.values)
                for name, value in event.values.items():
                    curves.setdefault(name, []).append((samples, value))
        tail = [loss for _, loss in losses[-max(1, round(LAST_PART * len(losses))) :]]
        if losses:
            curves.setdefault(LOSS, losses)
        return cls(
            metrics=metrics,
            step_loss=math.fsum(tail) / len(tail) if tail else None,
            curves={name: _thinned(points) for name, points in curves.items()},
            steps=steps,
            samples=samples,
            progress=progress,
            seconds=max(0.0, last - first),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None."""
        plain: dict[str, Any] = without_nan(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Result:
        """The inverse of `to_dict`."""
        restored = dict(plain)
        restored["metrics"] = {name: _number(v) for name, v in plain["metrics"].items()}
        restored["curves"] = {
            name: (tuple(map(_number, x)), tuple(map(_number, y)))
            for name, (x, y) in plain["curves"].items()
        }
        return cls(**restored)


def _thinned(points: Sequence[tuple[float, float]]) -> Curve:
    blocks = np.array_split(np.array(points, dtype=np.float64), min(len(points), MOST_POINTS))
    # The end position of a block is exact; its values are noisy and therefore averaged.
    return (
        tuple(float(block[-1, 0]) for block in blocks),
        tuple(float(np.mean(block[:, 1])) for block in blocks),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def without_nan(value: Any) -> Any:
    """Plain values, with None for each number that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def choose_metric(results: Sequence[Result], wanted: str | None) -> str:
    """The metric to compare: the wanted one, or the only one there is.

    Raises:
        UnclearMetric: The metric was not recorded, or there are several to choose from.
    """
    if wanted is not None:
        for result in results:
            result.value(wanted)
        return wanted
    names = sorted({name for result in results for name in result.names()})
    if not names:
        raise UnclearMetric(
            "the script records no metric: call resilin.record(accuracy=...) after an evaluation"
        )
    if len(names) > 1:
        raise UnclearMetric(f"the script records {', '.join(names)}: choose one with --metric")
    return names[0]
