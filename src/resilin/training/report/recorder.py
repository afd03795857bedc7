"""`Recorder`: report the events of a job, without slowing it down.

A step is reported when its loop body is over, so that everything the body records belongs to it.
Not every step is reported: reporting may take a small part of the time, whatever the listeners, and
steps that would exceed it are skipped. Each event contains the totals, so a curve with gaps is
still correct. Replica 0 reports steps, rescales and checkpoints; a fault is reported by the replica
that had it.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from resilin import __version__
from resilin.core import time_share
from resilin.core.events import (
    EpochEvent,
    Event,
    MetricsEvent,
    RescaleEvent,
    StartEvent,
    StepEvent,
)
from resilin.core.plan import BatchPlan
from resilin.engine import environment, overrides
from resilin.engine.base import Engine
from resilin.engine.devices import Fetched
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import last_event
from resilin.training.events import Events, Stamp
from resilin.training.gates.optimizer import name_of
from resilin.training.records import Number
from resilin.training.scaling.factors import Scaled, StepScaling
from resilin.training.state.settings import StateSettings
from resilin.training.step_timer import StepTimer
from resilin.training.timeline import Timeline

SHARE = 0.005
"""Fraction of the time that reporting steps may take."""
ALLOWANCE = 0.1
"""Seconds of reporting that are free, so that a short run is reported completely."""
LONGEST = 10.0
"""Longest gap between two reported steps; the next one is then reported whatever it costs."""


class _Committed(NamedTuple):
    """A committed step that is reported as soon as its loop body is over."""

    scaling: StepScaling
    scaled: Scaled
    optimizer: str
    samples: int
    plan: BatchPlan | None
    lr: float | None
    time: float


class _Awaited:
    """A step that is reported when what was recorded in it is on the host.

    A device may be some steps behind: nobody waits for it, the report comes later.

    Args:
        step: The event, without what was recorded.
        recorded: Numbers and tensors by name, each with its weight.
    """

    def __init__(self, step: StepEvent, recorded: Mapping[str, list[tuple[Number, float]]]) -> None:
        self._step = step
        self._recorded = {
            name: [(_under_way(value), weight) for value, weight in pairs]
            for name, pairs in recorded.items()
        }

    def arrived(self) -> bool:
        """Whether it can be reported without waiting."""
        pairs = itertools.chain.from_iterable(self._recorded.values())
        return all(isinstance(value, float) or value.arrived() for value, _ in pairs)

    def event(self) -> StepEvent:
        """The whole event; waits if it has not arrived."""
        metrics = {name: _mean(pairs) for name, pairs in self._recorded.items()}
        return replace(self._step, loss=metrics.pop("loss", None), metrics=metrics)


class _LogFile:
    """The event log of this replica, opened with its first event."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._log: EventLog | None = None

    def write(self, event: Event) -> None:
        if self._log is None:
            self._log = EventLog(self._directory, self._name)
        self._log.write(event)

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class _Budget:
    """Time that reports have taken: at most `SHARE` of all time, but a step every `LONGEST` s."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._latest = 0.0

    def allows_another(self) -> bool:
        now = time.perf_counter()
        within = time_share.is_within(self._seconds, now - self._began, SHARE, free=ALLOWANCE)
        return within or now - self._latest >= LONGEST

    def spend(self, seconds: float, now: float) -> None:
        self._seconds += seconds
        self._latest = now


class Recorder:
    """Reports to the listeners of one job what happens in it.

    Args:
        timeline: The clock of the job, which has been restored.
        events: The listeners of the job.
        engine: Who is in the job.
        timer: The durations of steps.
        directory: Directory of the event log; None writes none.
        resumed: Source of the state that the job resumed from; empty if it begins.
    """

    def __init__(
        self,
        timeline: Timeline,
        events: Events,
        engine: Engine,
        timer: StepTimer,
        *,
        directory: Path | None,
        resumed: str,
    ) -> None:
        self._timeline = timeline
        self._events = events
        self._engine = engine
        self._timer = timer
        if not resumed and engine.num_restarts:
            resumed = "step 0 (no state was kept)"
        self._resumed = resumed
        self._log: _LogFile | None = None
        self._before: float | None = None
        self._introduced = False
        self._budget = _Budget()
        self._wanted = False
        self._open = False
        self._committed: _Committed | None = None
        self._recorded: dict[str, list[tuple[Number, float]]] = {}
        self._awaited: deque[_Awaited] = deque()
        if directory is not None:
            if self._first and resumed and (last := last_event(directory)) is not None:
                self._before = last.time
            self._log = _LogFile(directory, engine.log_name)
            self._events.log = self._log.write
            atexit.register(self.close)

    @property
    def _first(self) -> bool:
        """Whether this replica reports for all; with other members it may be another one."""
        return self._engine.membership.is_first

    # A step --------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Decides whether the step that begins now is to be reported."""
        self._open = True
        self._wanted = self._first and self._events.is_heard and self._budget.allows_another()

    def committed(
        self,
        scaling: StepScaling,
        optimizers: Sequence[Optimizer],
        samples: int,
        plan: BatchPlan | None,
    ) -> None:
        """Takes in a step that was committed; it is reported when its loop body is over.

        Args:
            scaling: Gain and factors of the step.
            optimizers: The optimizers of the step.
            samples: Samples in the step, over all replicas.
            plan: How it was split; None without a loader of resilin.
        """
        if self._wanted:
            # The learning rate of this step: the loop may step a scheduler after it.
            lr = optimizers[0].param_groups[0].get("lr")
            self._committed = _Committed(
                scaling,
                scaling.last,
                name_of(optimizers),
                samples,
                plan,
                None if lr is None else float(lr),
                time.time(),
            )

    def record(self, values: Mapping[str, Number], *, training: bool, weight: float) -> None:
        """Takes in what the user records: with the step that is under way, or at once.

        Args:
            values: Names and numbers.
            training: Whether the model is in training mode.
            weight: Weight of the micro-batch at hand.
        """
        if not (self._open and training):
            if self._first:
                numbers = {name: float(value) for name, value in values.items()}
                self._emit(MetricsEvent(**self._events.stamp(), values=numbers))
            return
        if self._wanted:
            for name, value in values.items():
                kept = value.detach() if isinstance(value, torch.Tensor) else value
                self._recorded.setdefault(name, []).append((kept, weight))

    def step_over(self) -> None:
        """Reports the step whose loop body is over, if it was committed and is to be reported."""
        self._open = False
        committed, self._committed = self._committed, None
        recorded, self._recorded = self._recorded, {}
        if committed is None:
            return
        # On a busy machine everything is slow, so the log alone is charged its CPU time. Sinks may
        # wait for a network: these are charged wall time.
        clock = time.perf_counter if self._events.listeners else time.thread_time
        began, now = clock(), time.perf_counter()
        if not self._introduced:
            self._introduced = True
            self._introduce(committed)
        step = self._step(committed, self._timer.body or 0.0)
        self._awaited.append(_Awaited(step, recorded))
        self._emit_arrived()
        self._budget.spend(clock() - began, now)

    def _emit_arrived(self, *, wait: bool = False) -> None:
        """Reports the steps whose recorded tensors are on the host, in their order."""
        while self._awaited and (wait or self._awaited[0].arrived()):
            self._events.emit(self._awaited.popleft().event())

    def _emit(self, event: Event) -> None:
        self._emit_arrived(wait=True)
        self._events.emit(event)

    def _step(self, committed: _Committed, seconds: float) -> StepEvent:
        scaled, samples, plan = committed.scaled, committed.samples, committed.plan
        timeline, replicas = self._timeline, self._engine.membership.num_replicas
        noise = committed.scaling.sample_noise
        return StepEvent(
            time=committed.time,
            step=timeline.clock.steps,
            generation=self._engine.membership.generation,
            epoch=timeline.epoch,
            replicas=replicas,
            batch_size=samples,
            local_bsz=-(-samples // replicas) if plan is None else plan.batch_size,
            accumulation_steps=1 if plan is None else plan.steps,
            samples=timeline.clock.samples,
            progress=timeline.clock.progress,
            scale=scaled.scale,
            gain=scaled.gain,
            lr_factor=scaled.factors[0].lr,
            lr=committed.lr,
            sqr_norm=None if noise is None else noise.sqr_norm,
            trace=None if noise is None else noise.trace,
            seconds=seconds,
        )

    # Other events --------------------------------------------------------------------------

    def _introduce(self, committed: _Committed) -> None:
        """Reports what is trained, before the first step is reported."""
        timeline, engine, scaling = self._timeline, self._engine, committed.scaling
        reference = timeline.reference
        # Reported late: the first step has been made since.
        common: Stamp = {
            "time": committed.time,
            "step": timeline.clock.steps - 1,
            "generation": engine.membership.generation,
        }
        resumed = self._resumed or timeline.carried_from
        if resumed:
            gap = None if self._before is None else max(0.0, committed.time - self._before)
            self._emit(
                RescaleEvent(
                    **common,
                    replicas_before=timeline.replicas_before or engine.membership.num_replicas,
                    replicas=engine.membership.num_replicas,
                    reason=f"resumed at {resumed}",
                    seconds=gap,
                )
            )
        self._emit(
            StartEvent(
                **common,
                reference=round(committed.samples / committed.scaled.scale)
                if reference is None
                else reference.batch_size,
                replicas=engine.membership.num_replicas,
                hosts=engine.membership.num_hosts,
                rule=scaling.rule_names,
                clock=scaling.clock,
                optimizer=committed.optimizer,
                total_steps=timeline.total_steps,
                steps_per_epoch=None if reference is None else reference.steps_per_epoch,
                resumed=bool(resumed),
                # Without its arguments: logs are read and sent around, and these may be secrets.
                script=sys.argv[0],
                replays=self._events.replays,
                software=f"resilin {__version__}, torch {torch.__version__}, "
                f"Python {platform.python_version()}",
            )
        )

    def reformed(self, replicas_before: int, reason: str, seconds: float) -> None:
        """Reports that members have changed, and nobody was restarted.

        Args:
            replicas_before: Number of replicas before that.
            reason: What has changed.
            seconds: Time without training.
        """
        # Whoever reports from here on need not say again what is trained.
        self._introduced = self._introduced or self._timeline.clock.steps > 0
        if self._first and self._events.is_heard:
            self._emit(
                RescaleEvent(
                    **self._events.stamp(),
                    replicas_before=replicas_before,
                    replicas=self._engine.membership.num_replicas,
                    reason=reason,
                    seconds=seconds,
                )
            )

    def epoch_over(self) -> None:
        """Reports that an epoch of the training loader is over."""
        if self._first and self._events.is_heard:
            clock = self._timeline.clock
            self._emit(
                EpochEvent(
                    **self._events.stamp(),
                    epoch=self._timeline.epoch,
                    samples=clock.samples,
                    progress=clock.progress,
                )
            )

    def flush(self) -> None:
        """Write the buffered events of the log. Waits for no device: it may never come this far."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Reports the last step, and writes out what is in the buffer of the log."""
        atexit.unregister(self.close)
        if self._committed is not None:
            self._timer.end()
        self.step_over()
        self._emit_arrived(wait=True)
        self._events.log = None
        if self._log is not None:
            self._log.close()


def _under_way(value: Number) -> float | Fetched:
    return Fetched(value.reshape(1)) if isinstance(value, torch.Tensor) else float(value)


def _mean(pairs: list[tuple[float | Fetched, float]]) -> float:
    total = math.fsum(weight for _, weight in pairs)
    if total == 0:
        return math.nan  # this replica had only filler samples in the step
    known = ((value if isinstance(value, float) else value.read()[0], w) for value, w in pairs)
    return math.fsum(number * weight for number, weight in known if weight) / total


def log_directory(events: Events, settings: StateSettings | None) -> Path | None:
    """Directory of the event log of a job; None if there is none.

    The launcher's word goes before the script's. Without either, events are kept beside the
    checkpoints, if these are on a local path.

    Args:
        events: The listeners of the job, with the directory that the script named.
        settings: How the state is kept, if the script says it.
    """
    if environment.RUN_DIR in os.environ:
        return overrides.run_dir()
    if events.directory is not None:
        return events.directory
    kept = settings.checkpoint_dir if settings is not None else None
    kept = kept or os.environ.get(environment.CHECKPOINT_DIR)
    if not kept or "://" in kept.removeprefix("file://"):
        return None
    return Path(kept.removeprefix("file://")) / "events"
