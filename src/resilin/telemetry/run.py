"""`Run`: an event log as columns, for computing and plotting.

Not every step of a run is in its log, and a job that resumed from an older checkpoint has reported
some steps twice. Over time, everything is shown as it happened; over steps or progress, the last
execution of a step counts, and `Run.kept` selects those steps.

Events come from files, so they may contain any numbers. Derived values are NaN where they have no
meaning; nothing here fails or warns.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from resilin.core.events import (
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    Event,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    StartEvent,
    StepEvent,
    begins_anew,
)
from resilin.core.noise import noise_scale
from resilin.telemetry.columns import (
    STEP_FIELDS,
    STEP_ROW,
    Array,
    Columns,
    Series,
    Steps,
    number,
)
from resilin.telemetry.read import Damage, read_events

_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, slots=True)
class Run:
    """The events of one run."""

    name: str
    """Last part of its directory."""
    starts: tuple[StartEvent, ...]
    """Starts of generations."""
    steps: Steps
    """The reported steps."""
    metrics: Mapping[str, Series]
    """Metrics of the user by name; the loss of a step is in `steps`."""
    rescales: tuple[RescaleEvent, ...] = ()
    """Changes of the set of replicas."""
    faults: tuple[FaultEvent, ...] = ()
    """Faults."""
    checkpoints: tuple[CheckpointEvent, ...] = ()
    """Checkpoints that were saved, loaded or failed."""
    decisions: tuple[DecisionEvent, ...] = ()
    """Choices of the batch size."""
    epochs: tuple[EpochEvent, ...] = ()
    """Completed epochs."""
    damage: tuple[Damage, ...] = ()
    """Lines of the log that could not be read."""

    @classmethod
    def load(cls, run_dir: str | os.PathLike[str]) -> Run:
        """Reads the event log of a run; lines that cannot be read are in `damage`.

        Raises:
            ValueError: There is no event log.
        """
        damage: list[Damage] = []
        events = read_events(run_dir, damage)
        run = cls.from_events(events, name=Path(run_dir).resolve().name)
        return replace(run, damage=tuple(damage))

    @classmethod
    def from_events(
        cls, events: Iterable[Event], name: str = "run", damage: Iterable[Damage] = ()
    ) -> Run:
        """A run from its events, in order of time. Events of unknown kinds are ignored.

        A job that starts from scratch in the directory of an earlier one is another run; this
        returns the last run in the directory.
        """
        steps = Columns(len(STEP_FIELDS))
        recorded: dict[str, Columns] = {}
        others: dict[type[Event], list[Any]] = {}

        for event in events:
            if isinstance(event, StepEvent):
                steps.append(STEP_ROW(event))
                _record(recorded, event, event.progress, event.metrics)
            elif isinstance(event, MetricsEvent):
                _record(recorded, event, math.nan, event.values)
            else:
                if begins_anew(event) and StartEvent in others:
                    steps, recorded, others = Columns(len(STEP_FIELDS)), {}, {}
                others.setdefault(type(event), []).append(event)

        def of(kind: type[_E]) -> tuple[_E, ...]:
            return tuple(others.get(kind, ()))

        run = cls(
            name=name,
            starts=of(StartEvent),
            steps=Steps(**dict(zip(STEP_FIELDS, steps.arrays(), strict=True))),
            metrics={},
            rescales=of(RescaleEvent),
            faults=of(FaultEvent),
            checkpoints=of(CheckpointEvent),
            decisions=of(DecisionEvent),
            epochs=of(EpochEvent),
            damage=tuple(damage),
        )
        metrics = {key: Series(*rows.arrays()) for key, rows in recorded.items()}
        return replace(run, metrics=run._placed(metrics))

    @property
    def start(self) -> StartEvent | None:
        """The latest start."""
        return self.starts[-1] if self.starts else None

    @property
    def reference(self) -> int | None:
        """The reference batch, if it is known."""
        return self.starts[-1].reference if self.starts else None

    @property
    def goodput(self) -> Array:
        """Reference samples per second, over the time since the previous reported step.

        NaN for the first step of a generation, and without a reference batch.
        """
        seconds, worth = self._intervals()
        reference = math.nan if self.reference is None else number(self.reference)
        with np.errstate(all="ignore"):
            rates = worth * reference / seconds
        return np.concatenate([np.full(min(1, len(self.steps)), np.nan), rates])

    @property
    def noise_scale(self) -> Array:
        """Trace over squared norm: at about this batch size, noise and signal weigh the same.

        NaN without an estimate of both, and where the norm is not positive.
        """
        return noise_scale(self.steps.sqr_norm, self.steps.trace)

    @property
    def learning_rate(self) -> Array:
        """The first group's learning rate, as the optimizer used it."""
        with np.errstate(all="ignore"):
            return np.asarray(self.steps.lr * self.steps.lr_factor)

    @property
    def duration(self) -> float:
        """Seconds from the first event to the last, with all pauses."""
        kinds = (self.starts, self.rescales, self.faults, self.checkpoints, self.epochs)
        times = [event.time for kind in kinds for event in kind]
        columns = [self.steps.time, np.array(times, dtype=np.float64)]
        every = np.concatenate([*columns, *(series.time for series in self.metrics.values())])
        every = every[np.isfinite(every)]
        return float(every.max()) - float(every.min()) if len(every) else 0.0

    def kept(self, points: Steps | Series | None = None) -> npt.NDArray[np.bool_]:
        """Mask of the steps, or points of a series, that were not repeated later.

        A job that resumes from an older checkpoint repeats the steps since then: those of the later
        generation count. The same holds for a script that is started again with the same log.
        """
        points = self.steps if points is None else points
        own, count = self.steps, len(points)
        starts = np.array(
            [[number(s.generation), s.time, number(s.step)] for s in self.starts]
        ).reshape(-1, 3)
        generation = np.concatenate([points.generation, own.generation, starts[:, 0]])
        time = np.concatenate([points.time, own.time, starts[:, 1]])
        # A life is one start of a generation: lives are numbered in order of the generation and of
        # its number of starts so far.
        life = np.unique(generation, return_inverse=True)[1] * (len(starts) + 1)
        for known in np.unique(starts[:, 0]):
            same = np.flatnonzero(generation == known)
            began = np.sort(starts[starts[:, 0] == known, 1])
            life[same] += np.searchsorted(began, time[same], side="right")
        lives, life = np.unique(life, return_inverse=True)
        # The step from which each life resumed, and the earliest of all later ones.
        origin = np.full(len(lives) + 1, np.inf)
        np.minimum.at(origin, life[count:], np.concatenate([own.step - 1, starts[:, 2]]))
        later = np.minimum.accumulate(origin[::-1])[::-1][1:]
        return np.asarray(points.step <= later[life[:count]])

    def _intervals(self) -> tuple[Array, Array]:
        """Seconds and reference steps between reported steps; NaN where they have no meaning."""
        steps = self.steps
        with np.errstate(all="ignore"):
            seconds, worth = np.diff(steps.time), np.diff(steps.progress)
            usable = (np.diff(steps.generation) == 0) & (seconds > 0) & (worth >= 0)
        usable &= np.isfinite(seconds) & np.isfinite(worth)
        return np.where(usable, seconds, np.nan), np.where(usable, worth, np.nan)

    def _placed(self, metrics: Mapping[str, Series]) -> dict[str, Series]:
        """The series with progress filled in where only the step is known."""
        kept = self.kept()
        if not kept.any():
            return dict(metrics)
        step, progress = self.steps.step[kept], self.steps.progress[kept]
        order = np.argsort(step, kind="stable")
        # Step 0 has progress 0.
        known_steps, known_progress = np.r_[0.0, step[order]], np.r_[0.0, progress[order]]
        placed = {}
        for key, series in metrics.items():
            with np.errstate(all="ignore"):
                guess = np.interp(series.step, known_steps, known_progress, left=np.nan)
            is_missing = np.isnan(series.progress)
            placed[key] = replace(series, progress=np.where(is_missing, guess, series.progress))
        return placed


def _record(
    recorded: dict[str, Columns], event: Event, progress: float, values: Mapping[str, float]
) -> None:
    """Adds numbers of the user to their columns."""
    for key, value in values.items():
        row = (event.time, event.step, progress, value, event.generation)
        recorded.setdefault(key, Columns(5)).append(row)
