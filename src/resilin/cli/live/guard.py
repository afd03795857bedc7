"""Workers that do not answer: frozen ones, and those whose main thread blocks the others.

A process that the system has stopped closes no connection, so the others would wait for it. Not
even the thread that sends its signs of life runs: silence shows it. A main thread that hangs is
found by what it has published (`cli/hang.py`). Both are killed, and lost like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from resilin.cli.errors import say
from resilin.cli.faults import record
from resilin.cli.hang import Local, Watchdog, is_traced
from resilin.cli.live.session import Session
from resilin.cli.live.workers import Worker
from resilin.core.membership import Roster

TICK = 0.1
"""Seconds between two looks at heartbeats."""
MOST_SEEN = 4 * TICK
"""Longest silence that one look adds, in seconds: the launcher itself may have been stopped."""


EXITING = 60.0
"""Longest silence of a process whose script has ended, in seconds: while Python unloads what it has
imported, no thread of it runs."""


class Heartbeats:
    """Counts the silence of workers, from their first sign of life on.

    Args:
        limit: Seconds of silence after which a worker counts as frozen.
        clock: Source of time, in seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._looked = clock()

    def frozen(self, workers: Sequence[Worker], beats: Mapping[str, int]) -> Iterator[Worker]:
        """The workers that have just become frozen. One that is in a debugger never does.

        Args:
            workers: The workers that run.
            beats: Signs of life so far, by name.
        """
        now = self._clock()
        elapsed, self._looked = min(now - self._looked, MOST_SEEN), now
        for worker in workers:
            heard = beats.get(worker.name, 0)
            if heard == worker.beats:
                worker.silent += elapsed if heard else 0.0
            else:
                worker.beats, worker.silent = heard, 0.0
            if worker.finished:
                continue  # Python may take its time to exit, and no thread of it runs then
            if worker.silent >= self.limit and not worker.froze and not is_traced(worker.pid):
                yield worker


class Guard:
    """Kills workers that do not answer.

    Args:
        watchdog: Finds main threads that hang.
        heartbeats: Finds frozen processes.
    """

    def __init__(self, watchdog: Watchdog, heartbeats: Heartbeats) -> None:
        self._watchdog = watchdog
        self._heartbeats = heartbeats
        self._watched: list[Worker] = []

    def look(self, workers: Sequence[Worker], session: Session, formed: Roster | None) -> None:
        """Look at all workers, and kill those that do not answer.

        Args:
            workers: Workers of this launcher.
            session: The present life of the job.
            formed: The newest generation that was formed.
        """
        self.end_frozen([each for each in workers if each.gone is None], session)
        names = () if formed is None else formed.names
        # A worker that has not joined yet blocks nobody.
        watched = [worker for worker in workers if worker.member in names]
        if watched != self._watched:
            self._watched = watched
            num = 0 if formed is None else sum(len(each.hosts) for each in formed.members)
            self._watchdog.begin([local(worker) for worker in watched], num)
        held_up = self._watchdog.look() if watched else None
        if held_up is None:
            return
        found, guilty = held_up
        for worker in watched:
            if worker.number in {each.rank for each in guilty}:
                detail = f"worker {worker.number} made no progress for {found.quiet:.0f} s"
                say(f"killing worker {worker.number}")
                _end(worker, detail, session)

    def end_frozen(self, running: Sequence[Worker], session: Session) -> None:
        """Kill the workers that give no sign of life."""
        for worker in self._heartbeats.frozen(running, session.beats):
            if worker.silent < EXITING and self._watchdog.is_exiting(local(worker)):
                continue
            silence = f"no sign of life for {self._heartbeats.limit:g} s"
            detail = f"worker {worker.number} (process {worker.pid}) froze: {silence}"
            say(f"{detail} (see --heartbeat); killing it")
            _end(worker, detail, session)


def local(worker: Worker) -> Local:
    """The worker as the watchdog knows it."""
    return Local(worker.slot, worker.number, worker.pid)


def _end(worker: Worker, detail: str, session: Session) -> None:
    worker.froze = True
    worker.kill()
    # After the kill: the others wait for that, and nobody waits for the log.
    record("worker_hung", detail, session.replica(worker))
