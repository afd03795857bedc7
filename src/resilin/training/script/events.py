"""The script's interface to telemetry: directory of events, listeners, and recorded metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from resilin.training.events import Listener
from resilin.training.job import current_job
from resilin.training.records import Number


def events_to(directory: str | os.PathLike[str]) -> None:
    """Set the directory of the event log. Call it before the loop over epochs.

    `resilin top` and `resilin report` read it there. A launcher (`resilin run --run-dir`, or
    `RESILIN_RUN_DIR`) overrides this. Without either, a job with checkpoints on a local path writes
    to `events` in their directory, and any other job writes nothing.

    Args:
        directory: A local directory for this run alone; created if missing. If replica 0 may move
            to another host, it must be shared by all hosts.

    Raises:
        ValueError: The job has started.
    """
    job = current_job()
    if job.recorder is not None:
        raise ValueError(
            "events_to() was called after the job had started: call it before "
            "remaining_epochs_until() "
            "and before the first step"
        )
    job.events.directory = Path(directory)


def listen(listener: Listener) -> None:
    """Call a function, or a sink of `resilin.telemetry`, with each event from now on.

    Replica 0 reports steps, rescales, checkpoints and decisions; other replicas only their own
    faults. It is called between two steps, and its time counts as reporting: the slower it is, the
    fewer steps are reported, so that training is not slowed by more than half a percent; but one
    step in ten seconds is always reported. A listener that raises an exception receives no more
    events; the error is logged.

    Args:
        listener: Called with one event of `resilin.core.events` at a time.
    """
    if not callable(listener):
        raise ValueError(f"listener ({listener!r}) must be a function of an event")
    current_job().events.listeners.append(listener)


def record(values: Mapping[str, Number] | None = None, /, **named: Number) -> None:
    """Record your own metrics with the events of the job, such as a loss or an accuracy.

    In the body of the training loop they belong to the step, as means over the micro-batches of
    this replica, weighted like their gradients. A step that is not reported ignores them, and a
    tensor is read only if the step is reported, so recording the loss of every step costs very
    little. Anywhere else, for example after an evaluation, they are a separate event. Replica 0
    records; on others it does nothing.

    Args:
        values: Names and numbers, or tensors with one element.
        **named: The same, if the names are identifiers.

    Raises:
        ValueError: A value is not one number, or the job has not started.
    """
    job = current_job()
    if job.recorder is None:
        raise ValueError(
            "record() was called before the job had started: call resilin.resume() first, or "
            "record in the loop"
        )
    micro = job.micro_batch
    job.recorder.record(
        {name: _number(name, value) for name, value in {**(values or {}), **named}.items()},
        training=job.trained is not None and job.trained.training,
        weight=1.0 if micro is None else micro.weight,
    )


def _number(name: str, value: Number) -> Number:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} ({value!r}) must be one number") from None
