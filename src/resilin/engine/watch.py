"""Watches over a process from a thread, for what its main thread cannot see.

A process whose peer has died may wait for it in a collective for as long as the group's timeout. A
worker whose agent has died trains on with nobody to supervise it. In both cases it must end: what
it has completed is in memory, and a new generation resumes from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from resilin.engine.processes import process_gone
from resilin.engine.stop import StopRequest

INTERVAL = 0.2
"""Seconds between two looks."""
URGENT = 0.02
"""The same once the process was asked to stop."""


class Supervised(Protocol):
    """What is asked of the engine of a process that an agent supervises."""

    stop: StopRequest

    @property
    def grace(self) -> float:
        """Seconds from a request to stop until the process must have ended by itself."""
        ...

    def orphaned(self) -> bool:
        """Whether the agent is gone."""
        ...


class Peer(NamedTuple):
    """Another process of the job on this host."""

    pid: int
    """Its process."""
    started: str | None
    """When that began, so that a number which was given anew is not taken for it."""


class Watch:
    """A thread that calls `abandon` when this process can do nothing useful any more.

    Args:
        engine: Whose agent is watched.
        peers: The other processes of the job on this host.
        abandon: Called with (reason, deadline_passed); must terminate the process.
    """

    def __init__(
        self, engine: Supervised, peers: Sequence[Peer], abandon: Callable[[str, bool], None]
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._abandon = abandon
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="resilin-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _look(self) -> None:
        stop: StopRequest = self._engine.stop
        deadline: float | None = None
        while not self._closed.is_set():
            asked = stop.wait(INTERVAL)
            if self._engine.orphaned():
                self._abandon("the agent of this worker is gone", False)
            if not asked:
                continue
            if deadline is None:
                deadline = time.monotonic() + self._engine.grace
            if any(process_gone(peer.pid, peer.started) for peer in self._peers):
                self._abandon("another worker on this machine is gone", False)
            if time.monotonic() > deadline:
                self._abandon(f"no step ended within {self._engine.grace:g} s", True)
            self._closed.wait(URGENT)
