"""What users say about being watched: where events go, who else hears them, what is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from resilin.training.events import Listener
from resilin.training.job import current_job
from resilin.training.records import Number


def events_to(directory: str | os.PathLike[str]) -> None:
    """Says where the job writes down what happens. Call it before the loop over epochs.

    `resilin top` and `resilin report` read it there. A launcher's word (`resilin run --run-dir`, or
    `RESILIN_RUN_DIR`) goes before this. Without either, a job with checkpoints on a local path
    writes to `events` in their directory, and any other job writes nothing.

    Args:
        directory: A local directory, of this run alone; it is made if need be. Where replica 0
            may move to another host, one that all hosts share.

    Raises:
        ValueError: The job has started.
    """
    job = current_job()
    if job.recorder is not None:
        raise ValueError(
            "events_to() came after the job had started: call it before remaining_epochs_until() "
            "and before the first step"
        )
    job.events.directory = Path(directory)


def listen(listener: Listener) -> None:
    """Tells a function, or a sink of `resilin.telemetry`, of each event from now on.

    Replica 0 tells of steps, rescales, checkpoints and decisions; other replicas only of their own
    faults. It is called between two steps, and what it takes counts as telling: the slower it is,
    the fewer steps are told of, so that training is not held up by more than half a percent; but
    one step in ten seconds always is. A listener that raises an exception is told of no more; the
    log says so.

    Args:
        listener: Called with one event of `resilin.core.events` at a time.
    """
    if not callable(listener):
        raise ValueError(f"listener ({listener!r}) must be a function of an event")
    current_job().events.listeners.append(listener)


def record(values: Mapping[str, Number] | None = None, /, **named: Number) -> None:
    """Records numbers of your own with the events of the job: a loss, an accuracy.

    In the body of the training loop they belong to the step, as means over the micro-batches of
    this replica, weighted like their gradients. A step that is not told of takes nothing in, and a
    tensor is read only if it is, so that recording the loss of every step costs next to nothing.
    Anywhere else, as behind an evaluation, they are an event of their own. Replica 0 records; on
    others it does nothing.

    Args:
        values: Names and numbers; tensors with one element are fine.
        **named: The same, where the names are identifiers.

    Raises:
        ValueError: Something that is not one number, or the job has not started.
    """
    job = current_job()
    if job.recorder is None:
        raise ValueError(
            "record() came before the job had started: call resilin.resume() first, or record in "
            "the loop"
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
