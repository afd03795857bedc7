"""Settings of a job's state: directory, interval and number of checkpoints, and memory copies."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from resilin.core import _validate
from resilin.engine import environment
from resilin.engine.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """Location and frequency of the saved state of a job."""

    checkpoint_dir: str | None = None
    """A path or an fsspec URL that all replicas reach; None writes no checkpoints."""
    checkpoint_every: int | timedelta | None = timedelta(minutes=10)
    """Steps or time between two checkpoints; None saves only when the job stops or is done."""
    keep: int = 3
    """Number of latest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep one checkpoint for every this many steps."""
    memory_every: int | Literal["auto"] | None = "auto"
    """Steps between two memory copies; `auto`: as often as pays off; None: never."""
    memory_holders: int = 1
    """Processes that keep each part of a tensor that is split over processes."""

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        if isinstance(every, timedelta):
            _validate.real("seconds between checkpoints", every.total_seconds(), above=0)
        elif every is not None:
            _validate.whole("steps between checkpoints", every, at_least=1)
        _validate.whole("keep", self.keep, at_least=1)
        if self.keep_every is not None:
            _validate.whole("keep_every", self.keep_every, at_least=1)
        _validate.whole("memory_holders", self.memory_holders, at_least=1)
        if isinstance(self.memory_every, int):
            _validate.whole("memory_every", self.memory_every, at_least=1)
        elif self.memory_every not in (None, "auto"):
            raise ValueError(
                f"memory_every ({self.memory_every!r}) must be a number of steps, 'auto' or None"
            )


def from_environment() -> StateSettings:
    """Read the settings that the launcher passes on, for scripts that set none.

    Raises:
        ValueError: `RESILIN_CHECKPOINT_EVERY` is not a number with a unit.
    """
    settings = StateSettings(checkpoint_dir=os.environ.get(environment.CHECKPOINT_DIR) or None)
    every = os.environ.get(environment.CHECKPOINT_EVERY)
    return replace(settings, checkpoint_every=environment.parse_every(every)) if every else settings


def memory_directory(engine: Engine, settings: StateSettings) -> Path | None:
    """Directory of this host's memory copies; None if there are none.

    There are none if no supervisor restarts a dead process, unless the environment names a
    directory.
    """
    if settings.memory_every is None:
        return None
    named = os.environ.get(environment.MEMORY_DIR)
    if named == environment.OFF:
        return None
    if named:
        return Path(named)
    if engine.memory_name is None:
        return None
    name = re.sub(r"[^A-Za-z0-9._-]", "_", engine.memory_name)
    if name != engine.memory_name or not name.strip(".") or len(name) > 200:
        name = name[:200].strip(".")
        name += "-" + hashlib.sha256(engine.memory_name.encode()).hexdigest()[:8]
    return environment.memory_parent() / name
