"""The script's interface to state: where to save it, what else has state, and when to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

from resilin.core import _validate
from resilin.engine import overrides
from resilin.engine.collectives import Collectives
from resilin.training.job import current_job
from resilin.training.start import start
from resilin.training.state.registry import Stateful
from resilin.training.state.settings import StateSettings
from resilin.training.state.snapshot import Json, Version, join, split

T = TypeVar("T")


def checkpoint_to(
    directory: str | os.PathLike[str] | None,
    *,
    every: int | timedelta | None = timedelta(minutes=10),
    keep: int = 3,
    keep_every: int | None = None,
    memory_every: int | Literal["auto"] | None = "auto",
    memory_holders: int = 1,
) -> None:
    """Set where and how often the job saves its state. Call it before the loop over epochs.

    When the job starts, it resumes from the latest state that exists. Besides these checkpoints, a
    job under torchrun copies its state into the memory of its hosts, and resumes from there when a
    worker was lost but not its host. Without this call the directory is `RESILIN_CHECKPOINT_DIR`,
    which `resilin run --checkpoint-dir` sets.

    Args:
        directory: A path or an fsspec URL (`s3://...`) that all replicas can reach; None writes no
            checkpoints.
        every: Steps, or time, between two checkpoints, which are written while training continues;
            None saves only when the job is asked to stop, or has finished.
        keep: Number of latest checkpoints to keep.
        keep_every: Also keep one checkpoint for every this many steps.
        memory_every: Steps between two copies in memory; a lost worker costs at most that many.
            `auto` makes them as often as pays off, by their cost and the time that the job has
            run for: nearly every step after a start, later every few seconds (see
            `resilin.core.recovery.seconds_between_copies`). None makes none.
        memory_holders: Processes that keep each part of a tensor that is split over processes. With
            2, memory has all of the state after the loss of a host: two of those that have a part
            keep it, or one of them and a buddy on another host, to which it is sent.

    Raises:
        ValueError: A setting is out of range, or the job has started.
    """
    job = current_job()
    if job.recovery is not None:
        raise ValueError(
            "checkpoint_to() was called after the job had started: call it before "
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
        memory_holders=memory_holders,
    )


class _DictState:
    """A dict of the script, as something with a state. It is restored in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.clear()
        self.values.update(state)


def register(name: str, thing: Stateful | dict[str, Any]) -> None:
    """Save and restore an object of your own with the job.

    Model, optimizer, scheduler, scaler, loader, Accumulators and clocks are registered already.
    The state is captured between two steps, and must be the same on all replicas.

    Args:
        name: Its name in checkpoints.
        thing: An object with `state_dict()` and `load_state_dict()`, or a dict. The state consists
            of numbers, strings, tensors, numpy arrays, and containers of them. If the job resumes
            from a state with this name, it is loaded: when the job starts, or now if it has
            started. A dict is changed in place, so a number of your script belongs into one:
            `best = {"loss": math.inf}`.

    Raises:
        ValueError: The name is taken, or the object is no dict and lacks one of the two methods.
    """
    kept: Stateful = _DictState(thing) if isinstance(thing, dict) else thing
    current_job().registry.add(name, kept)


def resume() -> Version | None:
    """Start the job now: restore the latest state that exists.

    The loop over epochs does this automatically. Call it earlier to see what was restored, or
    without such a loop.

    Returns:
        The state that the job resumed from, as generation and step; None for a new job.
    """
    return start(current_job()).resumed


def on_one_replica(function: Callable[[], T]) -> T:
    """Call a function on one process of the job, and return its result on all of them.

    For what must be done once: writing a file, making up an id, downloading data. All replicas
    must call it, at the same place of the script. They wait until it is done.

    Args:
        function: Called on the first process. In a live job it is called again on another one if
            that process is lost meanwhile, so running it twice must be as good as once: write a
            file under another name and rename it. It must not communicate with other replicas.

    Returns:
        Its result, which consists of numbers, strings and containers of them, or is None.

    Raises:
        RuntimeError: The function raised an exception on the first process, which raises that one.
        ValueError: The result cannot be sent.
    """
    engine = current_job().engine
    raised: list[Exception] = []

    def ask(members: Collectives) -> Json:
        said: dict[str, Json] = {}
        if members.process == 0:
            raised.clear()
            try:
                said["result"], tensors = split("the result of the function", function())
                if tensors:
                    raise ValueError("the result of the function has tensors: write them to a file")
            except Exception as error:
                raised.append(error)
                said["error"] = f"{type(error).__name__}: {error}"
        return members.broadcast(said, 0)

    answer = engine.ask(ask)
    if raised:
        raise raised[0]
    if "error" in answer:
        raise RuntimeError(f"another process could not do it: {answer['error']}")
    result: T = join(answer["result"], {})
    return result


def stop_when(condition: Callable[[], bool], every: timedelta = timedelta(seconds=5)) -> None:
    """Poll a function, in a thread, to learn whether this machine is about to be taken away.

    When it returns True, all replicas finish the step, save, and exit; those on other machines are
    restarted without this one. SIGTERM and SIGUSR1 do the same without any function.

    Args:
        condition: Returns True when the job has to leave this machine, for example from a cloud's
            metadata service. An exception is logged, and it is called again later.
        every: Time between two calls.
    """
    if not isinstance(every, timedelta):
        raise ValueError(f"every ({every!r}) must be a timedelta")
    seconds = _validate.real("every", every.total_seconds(), above=0)
    if not callable(condition):
        raise ValueError(f"condition ({condition!r}) must be a function")
    logging.getLogger("resilin").debug("asking %r every %g s", condition, seconds)
    current_job().engine.stop.poll(condition, seconds)
