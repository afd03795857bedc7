"""What users say about state: where to keep it, what else has some, and when to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

from resilin.core import _validate
from resilin.engine import overrides
from resilin.training.job import current_job
from resilin.training.lifecycle import start
from resilin.training.state.registry import Stateful
from resilin.training.state.settings import StateSettings
from resilin.training.state.snapshot import Version


def checkpoint_to(
    directory: str | os.PathLike[str] | None,
    *,
    every: int | timedelta | None = timedelta(minutes=10),
    keep: int = 3,
    keep_every: int | None = None,
    memory_every: int | Literal["auto"] | None = "auto",
) -> None:
    """Says where the job keeps its state. Call it before the loop over epochs.

    When the job starts, it goes on from the newest state there is. Besides these checkpoints, a
    job under torchrun copies its state into the memory of its hosts, and goes on from there when
    a worker was lost but not its host. A script that does not call this takes the directory from
    `RESILIN_CHECKPOINT_DIR`, as `resilin run --checkpoint-dir` sets it.

    Args:
        directory: A path or an fsspec URL (`s3://...`) that all replicas reach; None writes no
            checkpoints.
        every: Steps, or time, between two checkpoints, which are written while training goes on;
            None saves only when the job is asked to stop, or done.
        keep: How many of the newest ones stay.
        keep_every: Also keep those of every so many steps.
        memory_every: Steps between two copies in memory; a lost worker costs at most that many.
            `auto` chooses so that copies take at most 5% of the time: every step for steps that
            take 20 times as long as a copy, else fewer, so that what a lost worker costs is at
            most the time of 20 copies. None makes none.

    Raises:
        ValueError: A setting is out of range, or the job has started.
    """
    job = current_job()
    if job.recovery is not None:
        raise ValueError(
            "checkpoint_to() came after the job had started: call it before "
            "remaining_epochs_until() and before the first step"
        )
    job.state_settings = StateSettings(
        checkpoint_dir=overrides.checkpoint_dir(
            None if directory is None else os.fspath(directory)
        ),
        checkpoint_every=every,
        keep=keep,
        keep_every=keep_every,
        memory_every=memory_every,
    )


def register(name: str, thing: Stateful) -> None:
    """Makes an object of your own survive with the job.

    Model, optimizer, scheduler, scaler, loader, Accumulators and clocks are registered already.
    The state is taken between two steps, and must be the same on all replicas.

    Args:
        name: What it is called in checkpoints.
        thing: An object with `state_dict()` and `load_state_dict()`. Its state is made of
            numbers, strings, tensors, numpy arrays, and containers of them. If the job goes on
            from a state with this name, it is loaded: when the job starts, or now if it has.

    Raises:
        ValueError: The name is taken, or the object lacks one of the two methods.
    """
    current_job().registry.add(name, thing)


def resume() -> Version | None:
    """Starts the job now: restores the newest state there is.

    The loop over epochs does that by itself. Call it earlier to see what was restored, or without
    such a loop.

    Returns:
        Which state the job goes on from, as generation and step; None if it begins anew.
    """
    return start(current_job()).resumed


def stop_when(condition: Callable[[], bool], every: timedelta = timedelta(seconds=5)) -> None:
    """Asks a function, in a thread, whether this machine is about to be taken.

    When it says so, all replicas finish the step, save, and end; those on other machines are
    started again without this one. SIGTERM and SIGUSR1 do the same without any function.

    Args:
        condition: Returns True when the job has to leave this machine, as a cloud's metadata
            service tells of spot machines. An exception is logged, and it is asked again.
        every: Time between two questions.
    """
    if not isinstance(every, timedelta):
        raise ValueError(f"every ({every!r}) must be a timedelta")
    seconds = _validate.real("every", every.total_seconds(), above=0)
    if not callable(condition):
        raise ValueError(f"condition ({condition!r}) must be a function")
    logging.getLogger("resilin").debug("asking %r every %g s", condition, seconds)
    current_job().engine.stop.poll(condition, seconds)
