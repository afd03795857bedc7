"""`Events`: the listeners of a job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from resilin.core.events import Event

logger = logging.getLogger("resilin")

Listener = Callable[[Event], None]
"""A function that is called with each event."""


class Stamp(TypedDict):
    """The fields that every event has."""

    time: float
    step: int
    generation: int


class Events:
    """The listeners of one job, and its event log.

    Args:
        where: Returns the steps committed so far and the current generation.
    """

    def __init__(self, where: Callable[[], tuple[int, int]]) -> None:
        self._where = where
        self.listeners: list[Listener] = []
        """Functions that are called with each event of this replica, as it happens."""
        self.log: Listener | None = None
        """Writes this replica's events to its log, if there is one."""
        self.directory: Path | None = None
        """Directory of the event log, if the script named one."""
        self.replays = ""
        """Source of the batch-size trace that is being replayed, if any."""

    @property
    def is_heard(self) -> bool:
        """Whether the events of this replica have a listener."""
        return self.log is not None or bool(self.listeners)

    def stamp(self) -> Stamp:
        """The common fields of an event that happens now."""
        step, generation = self._where()
        return {"time": time.time(), "step": step, "generation": generation}

    def emit(self, event: Event) -> None:
        """Reports an event. A listener that raises an exception is removed; training continues."""
        if self.log is not None:
            self.log(event)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:  # noqa: PERF203
                logger.exception("%r failed, and receives no more events", listener)
                self.listeners.remove(listener)
