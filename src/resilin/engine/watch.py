"""A thread that ends a process which its main thread cannot end.

A process whose peer has died may wait in a collective until the timeout of the group. A worker
whose agent has died would train on without supervision. In both cases the process must end: its
completed steps are in memory, and a new generation resumes from there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from resilin.engine.processes import process_gone
from resilin.engine.stop import RESTART, StopRequest

INTERVAL = 0.2
"""Seconds between two checks."""
URGENT = 0.02
"""Seconds between two checks after the process was asked to stop."""
PEER_GONE = "another worker on this machine is gone"
"""Reason of a worker that exits after another one, which its agent reports."""

LastWords = Callable[[str, bool], None]
"""Called with (reason, deadline_passed) before another thread ends the process."""

logger = logging.getLogger("resilin")


class Supervised(Protocol):
    """The interface of the engine of a supervised process."""

    stop: StopRequest

    @property
    def grace(self) -> float:
        """Seconds from a request to stop until the process must have exited."""
        ...

    def orphaned(self) -> bool:
        """Whether the agent is gone."""
        ...


class Peer(NamedTuple):
    """Another process of the job on this host."""

    pid: int
    """Its process id."""
    started: str | None
    """Its start time, because a process id may be reused."""


class Watch:
    """A thread that calls `abandon` when this process can no longer make progress.

    Args:
        engine: The engine whose agent is watched.
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
        """Stop watching."""
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
                self._abandon(PEER_GONE, False)
            if time.monotonic() > deadline:
                self._abandon(f"no step ended within {self._engine.grace:g} s", True)
            self._closed.wait(URGENT)


def abandon(stop: StopRequest, last_words: LastWords, reason: str, deadline_passed: bool) -> None:
    """End this process from another thread: its main thread is stuck, or unsupervised."""
    try:
        last_words(reason, deadline_passed)
    except Exception:
        logger.exception("the last words of process %d failed", os.getpid())
    finally:
        # Whatever failed: nothing else ends a process whose main thread is stuck.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(stop.exit_code if stop.asked else RESTART)
