"""`Status`: the current state of a run, updated from its events.

It receives each event once and keeps the latest values, recent rates and a few short histories. A
run of ten million steps takes no more memory than one of a thousand.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal

from resilin.core import events
from resilin.telemetry.history import History

RECENT = 30.0
"""Window for rates, in seconds."""
SILENT = 20.0
"""Seconds without an event after which a run counts as silent."""
_ELSEWHERE = {"generation", "loss", "metrics", "sqr_norm", "trace"}
NOTED = 64
"""Number of latest events that are kept: of marks, and of other events."""

State = Literal["waiting", "running", "silent", "hung", "stopped", "gave up", "ended", "finished"]
"""State of a run: `waiting` has no event yet, `silent` had none recently; `hung` had a worker that
was ended for it, and no step since; `ended` has left its loop before its epochs were over."""
_AFTER: dict[str, State] = {
    "worker_hung": "hung",
    "stopped": "stopped",
    "gave_up": "gave up",
    "left": "ended",
}
"""Faults that are the state of a run until its next start or step."""


class Status:
    """The state of a run so far.

    Args:
        name: Name of the run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the run."""
        self.began: float | None = None
        """Time of the first event."""
        self.last: float | None = None
        """Time of the last event."""
        self.start: events.StartEvent | None = None
        """Start of the latest generation."""
        self.step: events.StepEvent | None = None
        """The latest reported step."""
        self.generation = 0
        """The latest generation."""
        self.at_risk: int | None = None
        """Largest number of completed steps that a lost worker can cost, if reported."""
        self.loss: float | None = None
        """The latest recorded loss."""
        self.metrics: dict[str, float] = {}
        """The latest value of every other metric."""
        self.noted: deque[events.Event] = deque(maxlen=NOTED)
        """The last decisions and checkpoints, oldest first."""
        self.marks: deque[events.Event] = deque(maxlen=NOTED)
        """The last rescales and faults, oldest first."""
        self.counts: dict[str, int] = {}
        """Number of events of each kind."""
        self.batch, self.goodput_history, self.losses = History(), History(), History()
        self._recent: deque[events.StepEvent] = deque(maxlen=4096)
        self._finished = False
        self._fault: State | None = None

    def take(self, told: Iterable[events.Event]) -> None:
        """Add events, in the order in which they happened."""
        for event in told:
            self.began = event.time if self.began is None else min(self.began, event.time)
            self.last = event.time if self.last is None else max(self.last, event.time)
            self.generation = max(self.generation, event.generation)
            self.counts[event.name] = self.counts.get(event.name, 0) + 1
            if isinstance(event, events.StepEvent | events.StartEvent):
                self._fault = None
            elif isinstance(event, events.FaultEvent):
                self._fault = _AFTER.get(event.kind, self._fault)
            if isinstance(event, events.StepEvent):
                self._take_step(event)
            elif isinstance(event, events.MetricsEvent):
                self._record(event.time, event.values)
            elif isinstance(event, events.StartEvent):
                if self.start is not None and events.begins_anew(event):
                    # Another job in the same directory: earlier events do not belong to it.
                    Status.__init__(self, self.name)
                    self.began = self.last = event.time
                    self.counts[event.name] = 1
                self.start = event
                self._finished = False
            elif isinstance(event, events.RiskEvent):
                self.at_risk = event.steps
            elif isinstance(event, events.EpochEvent):
                self._finished = self._is_last(event.epoch)
            elif isinstance(event, events.RescaleEvent | events.FaultEvent):
                self.marks.append(event)
            elif not isinstance(event, events.UnknownEvent):
                if _keeps(event) and self.noted and _keeps(self.noted[-1]):
                    self.noted.pop()  # of consecutive decisions to keep the batch, show the last
                self.noted.append(event)

    def _take_step(self, event: events.StepEvent) -> None:
        before = self._recent[-1] if self._recent else None
        if before is not None and (
            event.generation != before.generation or event.progress < before.progress
        ):
            self._recent.clear()  # the job resumed from another state: no rate across that
        self._recent.append(event)
        while len(self._recent) > 2 and event.time - self._recent[1].time >= RECENT:
            self._recent.popleft()
        self.step = event
        self.batch.add(event.time, number(event.batch_size))
        self.goodput_history.add(event.time, self.goodput)
        self._record(event.time, event.metrics)
        if event.loss is not None:
            self._record(event.time, {"loss": event.loss})

    def _record(self, time: float, values: Any) -> None:
        for name, value in values.items():
            if name == "loss":
                self.loss = value
                self.losses.add(time, value)
            else:
                self.metrics[name] = value

    def _is_last(self, epoch: int) -> bool:
        start = self.start
        if start is None or not start.total_steps or not start.steps_per_epoch:
            return False
        return number(epoch + 1) * start.steps_per_epoch >= start.total_steps * (1 - 1e-9)

    def last_events(self, num: int) -> list[events.Event]:
        """The latest events except steps, oldest first.

        Decisions are frequent; up to half of the events are reserved for rescales and faults.
        """
        room = max(num - len(self.marks), num // 2)
        noted = list(self.noted)[max(0, len(self.noted) - room) :]
        marks = list(self.marks)[max(0, len(self.marks) - num + len(noted)) :]
        return sorted([*marks, *noted], key=lambda event: event.time)

    # Derived values ------------------------------------------------------------------------

    def state(self, now: float) -> State:
        """State of the run at this time."""
        if self.last is None:
            return "waiting"
        if self._finished:
            return "finished"
        if self._fault is not None:
            return self._fault
        longest = max(SILENT, 10 * (self.step.seconds or 0.0) if self.step else 0.0)
        return "silent" if now - self.last > longest else "running"

    @property
    def steps_done(self) -> float | None:
        """Completed reference steps, by the clock in which the length of the run is given."""
        if self.step is None:
            return None
        if self.start is not None and self.start.reference and self.start.clock != "progress":
            return number(self.step.samples) / number(self.start.reference)
        return self.step.progress

    @property
    def fraction(self) -> float | None:
        """The completed part of the run, from 0 to 1; None if its length is unknown."""
        done, total = self.steps_done, self.start.total_steps if self.start else None
        if done is None or not total:
            return None
        return 1.0 if self._finished else min(1.0, max(0.0, done / total))

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the recent rate; None if unknown."""
        done, total = self.steps_done, self.start.total_steps if self.start else None
        if done is None or not total or self._finished:
            return None
        by_progress = self.start is None or self.start.clock == "progress"
        rate = self._rate("progress" if by_progress else "samples")
        if rate is not None and not by_progress:
            assert self.start is not None
            rate /= number(self.start.reference) or 1.0
        return max(0.0, total - done) / rate if rate else None

    @property
    def goodput(self) -> float | None:
        """Recent reference samples per second."""
        rate = self._rate("progress")
        if rate is None or self.start is None or not self.start.reference:
            return None
        return rate * number(self.start.reference)

    @property
    def throughput(self) -> float | None:
        """Recent samples per second."""
        return self._rate("samples")

    def _rate(self, field: str) -> float | None:
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        seconds = last.time - first.time
        if not 0 < seconds < math.inf:
            return None
        return (number(getattr(last, field)) - number(getattr(first, field))) / seconds

    @property
    def efficiency(self) -> float | None:
        """Progress per sample, relative to the reference batch."""
        return self.step.gain / self.step.scale if self.step and self.step.scale else None

    @property
    def noise_scale(self) -> float | None:
        """The batch size at which noise and signal of the gradient are equal."""
        return None if self.step is None else self.step.noise_scale

    def as_dict(self, now: float) -> dict[str, Any]:
        """All values for JSON; unknown and non-finite numbers are None."""
        start, step = self.start, self.step
        told = ("script", "rule", "optimizer", "reference", "hosts", "total_steps", "replays")
        made = [field.name for field in fields(events.StepEvent) if field.name not in _ELSEWHERE]
        values: dict[str, Any] = {
            "name": self.name,
            "state": self.state(now),
            "silent_seconds": None if self.last is None else now - self.last,
            "generation": self.generation,
            **{name: getattr(start, name, None) for name in told},
            **{name: getattr(step, name, None) for name in made},
            "at_risk": self.at_risk,
            "efficiency": self.efficiency,
            "noise_scale": self.noise_scale,
            "goodput": self.goodput,
            "throughput": self.throughput,
            "steps_done": self.steps_done,
            "fraction": self.fraction,
            "seconds_left": self.seconds_left,
            "loss": self.loss,
        }
        plain = {name: _finite(value) for name, value in values.items()}
        plain["metrics"] = {name: _finite(value) for name, value in self.metrics.items()}
        plain["counts"] = dict(self.counts)
        plain["last_events"] = [
            json.loads(events.to_json(event)) for event in self.last_events(NOTED)
        ]
        return plain


def number(value: float) -> float:
    """A number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _keeps(event: events.Event) -> bool:
    return isinstance(event, events.DecisionEvent) and event.batch_size == event.batch_size_before


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
