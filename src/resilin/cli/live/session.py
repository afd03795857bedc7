"""One life of a live job on this machine: its authority, and the socket of its workers.

A job that cannot continue with living processes is started again with another one: what the former
authority knew is of no use to new processes. A launcher reports each generation whose first replica
runs on another machine; otherwise that replica does.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from resilin.cli.errors import say
from resilin.cli.faults import count
from resilin.cli.live.signs import Inbox, Message
from resilin.cli.live.workers import Worker
from resilin.core.live import Authority
from resilin.core.membership import Roster
from resilin.engine.authority.keeper import Keeper
from resilin.engine.authority.server import Server

logger = logging.getLogger("resilin")

LONGEST_PATH = 100
"""Longest path of a socket, in bytes; the system allows 104 to 108."""


class Session:
    """The authority and the socket, from their start until `close`.

    Args:
        keeper: Holds the authority.
        num_founders: Members on this machine that begin the job together.
        address: Address on which workers listen for each other.
        secret: What only processes of this job know.
        alone: Whether this launcher has all workers of the job.
        inbox: Where requests of workers are posted for the main thread.
        on_finished: Called by the main thread with the name of a worker whose training is over.
        on_over: Called by the main thread with the reason why the job cannot continue live.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        num_founders: int,
        address: str,
        secret: bytes,
        alone: bool,
        inbox: Inbox,
        on_finished: Callable[[str], None],
        on_over: Callable[[str], None],
    ) -> None:
        self.keeper = keeper
        self.alone = alone
        """Whether the job stops with this launcher."""
        self.began = time.monotonic()
        """When it was started, on the monotonic clock."""
        self.beats: dict[str, int] = {}
        """Signs of life so far, by the name of the worker."""
        self._inbox = inbox
        self._on_over = on_over
        self._closed = False
        self._directory = private_directory()
        self.path = str(self._directory / "socket")
        """Path of the socket."""
        self._server = Server(
            self.path,
            keeper,
            num_founders=num_founders,
            secret=secret,
            address=address,
            on_alive=self._note,
            on_finished=lambda name: self._post(partial(on_finished, name)),
            on_restart=lambda name, reason: self.over(reason),
        )

    @property
    def newest(self) -> Authority | None:
        """The latest word of the authority; None before the first generation."""
        return self.keeper.newest

    def replica(self, worker: Worker) -> int | None:
        """Number of a worker in the newest generation that was formed, if it is in it."""
        newest = self.newest
        if newest is None or newest.formed is None or worker.member not in newest.formed.names:
            return None
        part = 0 if worker.place is None else worker.place.part
        return newest.formed.membership(worker.member, part).process

    def add(self, worker: Worker) -> None:
        """Let a worker that was just started speak for its name."""
        self._server.expect(worker.name, worker.pid, worker.member)

    def drop(self, name: str) -> None:
        """Tell the others that a worker is gone, and the copy of the model that it had a part of.

        Raises:
            NotLive: The job cannot continue live.
        """
        self._server.drop(name)

    def over(self, reason: str) -> None:
        """Have the main thread told that the job cannot continue live; from any thread."""
        self._post(partial(self._on_over, reason))

    def stop_all(self) -> None:
        """Tell all workers of this machine that the job stops."""
        self._server.stop_all()

    def close(self) -> None:
        """Close the socket and let the authority go. What was said before is void."""
        self._closed = True
        self._server.close()
        self.keeper.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _post(self, message: Message) -> None:
        self._inbox.post(lambda: None if self._closed else message())

    def _note(self, name: str) -> None:
        # By the thread of the server, for every sign of life: cheaper than a message.
        self.beats[name] = self.beats.get(name, 0) + 1


def private_directory() -> Path:
    """A new directory for this user alone, with a path that is short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="resilin-live-")
    if len(directory) > LONGEST_PATH - len("/socket"):
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="resilin-live-", dir="/tmp")
    return Path(directory)


class Roll:
    """The newest generation that was formed, and reports of it."""

    def __init__(self) -> None:
        self.formed: Roster | None = None
        """The newest generation that was formed; None before the first since the job's start."""
        self.ever_formed = False
        """Whether any was formed, also before the job was started again."""
        self.highest = -1
        """Highest number of a generation so far."""

    def forget(self) -> None:
        """The job is started again: the generations of the former authority are over."""
        self.formed = None

    def is_without(self, workers: Sequence[Worker]) -> bool:
        """Whether a generation was formed, and none of these workers is a member of it."""
        formed = self.formed
        return formed is not None and not {each.member for each in workers} & {*formed.names}

    def look(self, authority: Authority | None, workers: Sequence[Worker]) -> None:
        """Report the newest generation, if it is a new one.

        Args:
            authority: What the authority says.
            workers: All workers that this launcher has started.
        """
        if authority is None:
            return
        self.highest = max(self.highest, authority.roster.generation)
        if authority.formed is None or authority.formed == self.formed:
            return
        before = () if self.formed is None else self.formed.names
        self.formed, self.ever_formed = authority.formed, True
        numbers = _numbers(workers)
        names, size = authority.formed.names, len(authority.formed.members[0].hosts)
        text = f"generation {authority.formed.generation}: {count(len(names) * size, 'worker')}"
        joined = [numbers.get(name, name) for name in names if name not in before]
        gone = [numbers.get(name, name) for name in before if name not in names]
        if before and joined:
            text += f"; {', '.join(joined)} joined"
        if gone:
            text += f"; without {', '.join(gone)}"
        own = {worker.member for worker in workers}
        # The first replica reports it, with its step, to those that see its output.
        if names[0] in own:
            logger.debug("%s", text)
        else:
            say(text)


def _numbers(workers: Sequence[Worker]) -> dict[str, str]:
    """The workers of each member, by its name."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        found.setdefault(worker.member, []).append(str(worker.number))
    return {name: f"worker{'s' * (len(its) > 1)} {'+'.join(its)}" for name, its in found.items()}
