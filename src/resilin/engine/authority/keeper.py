"""Keepers of the authority of a live job: the launcher's memory, or a store of several machines.

On one machine there is one launcher, which starts all workers and sees their exits: what it knows
is all there is to know, and ends with it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from resilin.core.live import Authority, Event, Join, Remove, apply
from resilin.core.membership import Member


class Keeper(Protocol):
    """Keeps the authority, and takes events one after the other. Any thread may call it."""

    on_change: Callable[[Authority], None]
    """Called with each later value, in order, by any thread, also for changes made by others. It
    returns at once, and calls nothing of the keeper."""

    @property
    def newest(self) -> Authority | None:
        """The authority; None before the first generation."""

    def start(self, members: Sequence[Member]) -> Authority:
        """Announces the first generation, unless there is one already; returns what there is."""

    def apply(self, event: Event) -> Authority:
        """Takes an event, and returns the authority after it.

        Raises:
            NotLive: The job cannot continue live.
            ValueError: The event cannot be one of this job.
            OSError: The authority cannot be reached.
        """

    def hold(self, name: str) -> None:
        """Answers for a member from now on: should this launcher be lost, so is the member."""

    def drop(self, name: str) -> None:
        """Reports that a member is gone. Whatever comes from it later is too late.

        Raises:
            NotLive: The job cannot continue live.
        """

    @property
    def finished(self) -> bool:
        """Whether a launcher has said that the training is over, and no member is left."""

    def finish(self) -> None:
        """Says with `close` that the training is over."""

    def close(self) -> None:
        """Ends it, with everything that it answers for."""


class LocalKeeper:
    """The authority of one machine, in the launcher's memory.

    Args:
        above: Newest generation of any state that the job may resume from; -1 for none.
    """

    def __init__(self, above: int = -1) -> None:
        self.on_change: Callable[[Authority], None] = lambda authority: None
        """See `Keeper`."""
        self._above = above
        self.finished = False
        """See `Keeper`."""
        self._newest: Authority | None = None
        self._gone: set[str] = set()
        self._lock = threading.Lock()

    @property
    def newest(self) -> Authority | None:
        """See `Keeper`."""
        return self._newest

    def start(self, members: Sequence[Member]) -> Authority:
        """See `Keeper`."""
        with self._lock:
            if self._newest is None:
                self._newest = Authority.start(secrets.token_hex(8), members, above=self._above)
                self.on_change(self._newest)
            return self._newest

    def apply(self, event: Event) -> Authority:
        """See `Keeper`."""
        with self._lock:
            if self._newest is None:
                raise ValueError(f"{event} must come after the first generation")
            if isinstance(event, Join) and event.member.name in self._gone:
                # It was sent before the process ended, and read afterwards.
                return self._newest
            return self._apply(self._newest, event)

    def _apply(self, newest: Authority, event: Event) -> Authority:
        after = apply(newest, event)
        if after is not newest:
            self._newest = after
            # Within the lock: announcements have the order of the changes.
            self.on_change(after)
        return after

    def hold(self, name: str) -> None:
        """Nothing: should this launcher be lost, so is the authority."""

    def drop(self, name: str) -> None:
        """See `Keeper`."""
        with self._lock:
            self._gone.add(name)
            if self._newest is not None:
                self._apply(self._newest, Remove(name))

    def finish(self) -> None:
        """See `Keeper`."""
        self.finished = True

    def close(self) -> None:
        """Nothing."""
