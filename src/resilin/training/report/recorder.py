"""`Recorder`: tells what happens in the job, as events, without holding it up.

A step is told of when its loop body is over, so that whatever the body records belongs to it. Not
every step has to be: telling may take a small part of the time, whoever listens and however slow,
and steps that would exceed it go by. Each event carries how far the job has come, so a curve with
gaps is still the curve. Replica 0 tells of steps, rescales and checkpoints; a fault is told of by
the replica that had it.
"""

from __future__ import annotations

import atexit
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from resilin import __version__
from resilin.core import events
from resilin.core.rules import rule_name
from resilin.engine import environment, overrides
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import last_event
from resilin.training.events import Stamp
from resilin.training.job import Job
from resilin.training.records import Number
from resilin.training.sizing.scaling import Scaled, StepScaling

SHARE = 0.005
"""Part of the time that telling of steps may take."""
ALLOWANCE = 0.1
"""Seconds of it that are free, so that a short run is told of in full."""
LONGEST = 10.0
"""Seconds without a step that was told of, after which the next one is, whatever that takes."""


class _Committed(NamedTuple):
    """A step that is to be told of, as soon as its loop body is over."""

    scaling: StepScaling
    scaled: Scaled
    optimizer: str
    samples: int
    lr: float | None
    time: float


class Recorder:
    """Tells the listeners of one job what happens in it.

    Args:
        job: The job, which has been restored.
        directory: Where the event log goes; None writes none.
        resumed: Where the state came from that the job goes on from; empty if it begins.
    """

    def __init__(self, job: Job, directory: Path | None, resumed: str) -> None:
        self._job = job
        self._directory = directory
        if not resumed and job.engine.num_restarts:
            resumed = "step 0 (no state was kept)"
        self._resumed = resumed
        self._log: EventLog | None = None
        self._before: float | None = None
        self._introduced = False
        self._told_seconds = 0.0
        self._told_at = 0.0
        self._first = job.engine.replica == 0
        self._began = time.perf_counter()
        self._wanted = False
        self._open = False
        self._committed: _Committed | None = None
        self._recorded: dict[str, list[tuple[Number, float]]] = {}
        if directory is not None:
            if self._first and resumed and (last := last_event(directory)) is not None:
                self._before = last.time
            job.events.log = self._write
            atexit.register(self.close)

    def _write(self, event: events.Event) -> None:
        if self._log is None:
            assert self._directory is not None
            self._log = EventLog(self._directory, f"replica-{self._job.engine.replica}")
        self._log.write(event)

    # A step --------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The next step of training begins: is it to be told of?"""
        now = time.perf_counter()
        self._open = True
        within = self._told_seconds <= ALLOWANCE + SHARE * (now - self._began)
        overdue = now - self._told_at >= LONGEST
        self._wanted = self._first and self._job.is_heard and (within or overdue)

    def committed(self, scaling: StepScaling, optimizer: Optimizer, samples: int) -> None:
        """Takes in a step that was committed; it is reported when its loop body is over."""
        if self._wanted:
            # The learning rate of this very step: the loop may step a scheduler after it.
            lr = optimizer.param_groups[0].get("lr")
            self._committed = _Committed(
                scaling,
                scaling.last,
                type(optimizer).__name__,
                samples,
                None if lr is None else float(lr),
                time.time(),
            )

    @property
    def in_step(self) -> bool:
        """Whether what the user records now belongs to a step."""
        trained = self._job.trained
        return self._open and trained is not None and trained.training

    def record(self, values: Mapping[str, Number]) -> None:
        """Takes in what the user records: with the step that is under way, or at once."""
        job = self._job
        if not self.in_step:
            if self._first:
                numbers = {name: float(value) for name, value in values.items()}
                job.emit(events.MetricsEvent(**job.stamp(), values=numbers))
            return
        if self._wanted:
            weight = 1.0 if job.micro_batch is None else job.micro_batch.weight
            for name, value in values.items():
                kept = value.detach() if isinstance(value, torch.Tensor) else value
                self._recorded.setdefault(name, []).append((kept, weight))

    def step_over(self) -> None:
        """The loop body of a step is over."""
        self._open = False
        committed, self._committed = self._committed, None
        recorded, self._recorded = self._recorded, {}
        if committed is None:
            return
        # A busy machine makes everything slow, which is not the log's fault: where it is alone,
        # what it computes counts. Sinks may wait for a network, and tensors for their device.
        elsewhere = any(
            isinstance(value, torch.Tensor) and value.device.type != "cpu"
            for pairs in recorded.values()
            for value, _ in pairs
        )
        clock = time.perf_counter if self._job.listeners or elsewhere else time.thread_time
        began, now = clock(), time.perf_counter()
        if not self._introduced:
            self._introduced = True
            self._introduce(committed)
        seconds = self._job.timer.body or 0.0
        self._job.emit(self._step(committed, recorded, seconds))
        self._told_seconds += clock() - began
        self._told_at = now

    def _step(
        self,
        committed: _Committed,
        recorded: Mapping[str, list[tuple[Number, float]]],
        seconds: float,
    ) -> events.StepEvent:
        job, scaled, samples = self._job, committed.scaled, committed.samples
        replicas = job.engine.num_replicas
        noise = committed.scaling.sample_noise
        metrics = {name: _mean(pairs) for name, pairs in recorded.items()}
        current = job.iterations.current
        plan = None if current is None else current.plan
        return events.StepEvent(
            time=committed.time,
            step=job.clock.steps,
            generation=job.engine.generation,
            epoch=job.epoch,
            replicas=replicas,
            batch_size=samples,
            local_bsz=-(-samples // replicas) if plan is None else plan.batch_size,
            accumulation_steps=1 if plan is None else plan.steps,
            samples=job.clock.samples,
            progress=job.clock.progress,
            scale=scaled.scale,
            gain=scaled.gain,
            lr_factor=scaled.factors[0].lr,
            lr=committed.lr,
            sqr_norm=None if noise is None else noise.sqr_norm,
            trace=None if noise is None else noise.trace,
            seconds=seconds,
            loss=metrics.pop("loss", None),
            metrics=metrics,
        )

    # Other events --------------------------------------------------------------------------

    def _introduce(self, committed: _Committed) -> None:
        """Tells what is trained, before the first step is told of."""
        job, when, rule = self._job, committed.time, committed.scaling.rule
        engine, reference = job.engine, job.reference
        # Told late: the first step has been made since.
        common: Stamp = {**job.stamp(), "time": when, "step": job.clock.steps - 1}
        resumed = self._resumed or job.timeline.carried_from
        if resumed:
            before = job.timeline.replicas_before or engine.num_replicas
            job.emit(
                events.RescaleEvent(
                    **common,
                    replicas_before=before,
                    replicas=engine.num_replicas,
                    reason=f"resumed at {resumed}",
                    seconds=None if self._before is None else max(0.0, when - self._before),
                )
            )
        job.emit(
            events.StartEvent(
                **common,
                reference=round(committed.samples / committed.scaled.scale)
                if reference is None
                else reference.batch_size,
                replicas=engine.num_replicas,
                hosts=engine.num_hosts,
                rule=rule_name(rule),
                clock=rule.clock,
                optimizer=committed.optimizer,
                total_steps=job.total_steps,
                steps_per_epoch=None if reference is None else reference.steps_per_epoch,
                resumed=bool(resumed),
                # Without its arguments: logs are read and sent around, and these may be secrets.
                script=sys.argv[0],
                replays=job.events.replays,
                software=f"resilin {__version__}, torch {torch.__version__}, "
                f"Python {platform.python_version()}",
            )
        )

    def epoch_over(self) -> None:
        """An epoch of the training loader is over."""
        if self._first and self._job.is_heard:
            job = self._job
            job.emit(
                events.EpochEvent(
                    **job.stamp(),
                    epoch=job.epoch,
                    samples=job.clock.samples,
                    progress=job.clock.progress,
                )
            )

    def flush(self) -> None:
        """Writes out what is in the buffer of the log."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Tells of the last step, and writes out what is in the buffer of the log."""
        atexit.unregister(self.close)
        if self._committed is not None:
            self._job.timer.end()
        self.step_over()
        self._job.events.log = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _mean(pairs: list[tuple[Number, float]]) -> float:
    total = math.fsum(weight for _, weight in pairs)
    if total == 0:
        return math.nan  # this replica had no sample of its own in the step
    return math.fsum(float(value) * weight for value, weight in pairs if weight) / total


def log_directory(job: Job) -> Path | None:
    """Where the event log of this job goes; None if nowhere.

    The launcher's word goes before the script's. Without either, events are kept beside the
    checkpoints, if these are on a local path.
    """
    if environment.RUN_DIR in os.environ:
        return overrides.run_dir()
    if job.events.directory is not None:
        return job.events.directory
    kept = job.state_settings.checkpoint_dir if job.state_settings is not None else None
    kept = kept or os.environ.get(environment.CHECKPOINT_DIR)
    if not kept or "://" in kept.removeprefix("file://"):
        return None
    return Path(kept.removeprefix("file://")) / "events"
