"""The launcher's side of a live job: it takes events of its workers, and announces every change.

Only a process that the launcher has started speaks for a name, and only for that one: the kernel
says which process is at the other end, and over a network the process proves that it knows the
secret of the job. Reading never waits for the authority, which may be far
away: the signs of life of all workers come through while an event is taken.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from resilin.core.live import (
    Authority,
    Event,
    Form,
    Join,
    Leave,
    NotLive,
    Remove,
    event_from_json,
)
from resilin.core.membership import Member
from resilin.engine.authority.door import Door
from resilin.engine.authority.keeper import Keeper
from resilin.engine.authority.listener import Listener
from resilin.engine.live.wire import TCP, Connection, Message, descends, encode, peer

logger = logging.getLogger("resilin")


@dataclass(eq=False)
class _Worker:
    """The worker under one name."""

    pid: int
    """The process that the launcher started."""
    member: str
    """Name of the member that it is, or is a part of."""
    connection: Connection | None = None
    """Its connection, once it was found to be that process."""
    founder: Member | None = None
    """The worker as a member, if it has joined before there was a generation."""
    asks: list[int] = field(default_factory=list)
    """Questions that are answered when there is one."""


class _Calls(NamedTuple):
    alive: Callable[[str], None]
    finished: Callable[[str], None]
    restart: Callable[[str, str], None]


_END_WITHIN = 1.0
_Task = Callable[[], None]


class Server:
    """The launcher's socket: takes events of its workers, and announces every change to them.

    Args:
        path: Path of the socket, in a directory that others cannot enter; or `tcp://HOST:0`.
        keeper: The authority.
        num_founders: Number of members with which the job begins, unless it has already.
        secret: The secret of the job, for its members.
        address: The address at which the workers of this machine can be reached.
        on_alive: Called with the name of each worker that gives a sign of life.
        on_finished: Called with the name of each worker whose training is over.
        on_restart: Called with a name and a reason if the job cannot continue live. The name is
            that of the worker that said so, or empty.

    These three are called by threads of the server.
    """

    def __init__(
        self,
        path: str,
        keeper: Keeper,
        *,
        num_founders: int,
        secret: bytes,
        address: str,
        on_alive: Callable[[str], None],
        on_finished: Callable[[str], None],
        on_restart: Callable[[str, str], None],
    ) -> None:
        self._keeper = keeper
        self._num_founders = num_founders
        self._door = Door(secret) if path.startswith(TCP) else None
        """Proofs that workers know the secret, over a network: there it is sent to nobody."""
        self._hello = {"secret": secret.hex(), "address": address} if self._door is None else {}
        self._calls = _Calls(on_alive, on_finished, on_restart)
        self._lock = threading.RLock()
        """Never held while the keeper is called."""
        self._workers: dict[str, _Worker] = {}
        self._claims: dict[Connection, str] = {}
        """Connections that said a name before the launcher did, or that have none of ours."""
        self._names: dict[Connection, str] = {}
        self._newest: Authority | None = None
        self._announced: Authority | None = None
        self._stopping = False
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        """Work that waits for the keeper, in the order in which it came."""
        self._listener = Listener(path, self._on_message, self._on_close, self._announce)
        keeper.on_change = self._on_change
        if (newest := keeper.newest) is not None:
            self._on_change(newest)
        self._thread = threading.Thread(target=self._run, name="resilin-server", daemon=True)
        self._thread.start()
        self._listener.start()

    # The launcher --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Address of the socket, for the workers."""
        return self._listener.address

    def expect(self, name: str, pid: int, member: str | None = None) -> None:
        """Let a process, and those that it starts, speak for a name.

        The first members have the order in which they are expected here.

        Args:
            name: The name.
            pid: The process.
            member: The member that it is a part of, which goes with it; None if it is all of it.
        """
        with self._lock:
            worker = self._workers[name] = _Worker(pid, member or name)
            for connection in [each for each, said in self._claims.items() if said == name]:
                del self._claims[connection]
                self._welcome(connection, name, worker)

    def drop(self, name: str) -> None:
        """Report that a worker is gone, and its member with it: nothing of it counts any more.

        Raises:
            NotLive: The job cannot continue live.
        """
        with self._lock:
            worker = self._workers.pop(name, None)
            if worker is not None and worker.connection is not None:
                self._listener.touch(worker.connection, close="")
        self._keeper.drop(name if worker is None else worker.member)

    def stop_all(self) -> None:
        """Tell all workers that the job stops. From now on, nobody leaves it alone."""
        with self._lock:
            self._stopping = True
            for worker in self._workers.values():
                self._send(worker, {"stop": True})

    def close(self) -> None:
        """Close the socket and all connections. Not for threads of the server, nor the keeper's."""
        self._listener.close()
        self._tasks.put(None)
        # An event that waits for an authority far away ends with the keeper.
        self._thread.join(_END_WITHIN)

    # Announcements -------------------------------------------------------------------------

    def _on_change(self, authority: Authority) -> None:
        with self._lock:
            known = self._newest
            if known is not None and known.identity == authority.identity:
                # Threads of the keeper may overtake each other.
                authority = max(known, authority, key=lambda each: each.revision)
            if authority is known:
                return
            self._newest = authority
        if known is None:
            # Another launcher was first, or ours has begun: the others join, all get answers.
            self._tasks.put(self._found)
        self._listener.wake()

    def _announce(self) -> None:
        """Announces the newest value: several changes in a row are one announcement."""
        with self._lock:
            if self._newest is None or self._newest is self._announced:
                return
            self._announced = self._newest
            line = encode({"authority": self._newest.to_json()})
            for worker in self._workers.values():
                if worker.connection is not None:
                    self._try(worker.connection, lambda each: each.announce(line))

    def _send(self, worker: _Worker, message: Message) -> None:
        if worker.connection is not None:
            self._try(worker.connection, lambda each: each.send(message))

    def _try(self, connection: Connection, send: Callable[[Connection], None]) -> None:
        try:
            send(connection)
        except ConnectionError as error:
            self._listener.touch(connection, str(error))
        else:
            if connection.pending:
                self._listener.touch(connection)

    # Messages ------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, message: Message) -> None:
        name = self._names.get(connection)
        match message:
            case {"name": str(said)} if name is None and connection not in self._claims:
                if self._door is None:
                    self._claim(connection, said)
                else:
                    challenge = self._door.challenge(connection, message)
                    self._try(connection, lambda each: each.send(challenge))
            case {"proof": str(proof)} if self._door is not None and connection in self._door:
                self._claim(connection, self._door.check(connection, proof))
            case {"alive": True} if name is not None:
                self._calls.alive(name)
            case {"finished": True} if name is not None:
                self._calls.finished(name)
            case {"restart": str(reason)} if name is not None:
                self._calls.restart(name, reason)
            case {"event": state, "ask": int() | None as ask} if name is not None:
                event = event_from_json(state)
                with self._lock:
                    worker = self._workers.get(name)
                _check(name if worker is None else worker.member, event)
                self._tasks.put(lambda: self._take(name, event, ask))
            case _:
                raise ValueError(f"{message!r:.200} must be a message of a worker")

    def _claim(self, connection: Connection, name: str) -> None:
        with self._lock:
            worker = self._workers.get(name)
            if worker is None:
                # It was quicker than the launcher, or is none of ours: then it waits in vain.
                self._claims[connection] = name
            else:
                self._welcome(connection, name, worker)

    def _welcome(self, connection: Connection, name: str, worker: _Worker) -> None:
        known = peer(connection.socket)
        if known is not None and not descends(known[0], worker.pid):
            refused = f"process {known[0]} is not {name}, which is process {worker.pid}"
        elif worker.connection is not None:
            refused = f"{name} has a connection already"
        else:
            worker.connection, self._names[connection] = connection, name
            newest = self._newest and self._newest.to_json()
            self._send(worker, {"hello": {**self._hello, "authority": newest}})
            if self._stopping:
                self._send(worker, {"stop": True})
            return
        logger.warning("refused a connection: %s", refused)
        self._try(connection, lambda each: each.send({"refused": refused}))
        self._listener.touch(connection, close="")

    def _on_close(self, connection: Connection) -> None:
        with self._lock:
            self._claims.pop(connection, None)
            if self._door is not None:
                self._door.forget(connection)
            name = self._names.pop(connection, None)
            worker = self._workers.get(name or "")
            if worker is not None and worker.connection is connection:
                # The launcher sees the exit of the process. What it waits for is over.
                worker.connection = worker.founder = None
                worker.asks.clear()

    # Events --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)

    def _do(self, task: _Task) -> None:
        try:
            task()
        except Exception as error:
            # The launcher must not wait for what never comes.
            logger.exception("the authority of the job failed")
            self._calls.restart("", f"the authority of the job failed: {error}")

    def _take(self, name: str, event: Event, ask: int | None) -> None:
        """Takes an event of a worker, and answers."""
        with self._lock:
            worker = self._workers.get(name)
            if worker is None or worker.connection is None:
                return  # It is gone, and what it said before is too late.
            begun = self._newest is not None
            if not begun:
                if ask is not None:
                    worker.asks.append(ask)
                if isinstance(event, Join):
                    worker.founder = event.member
                elif isinstance(event, Leave):
                    worker.founder = None
        if not begun:
            self._found()
        elif isinstance(event, Leave) and self._stopping:
            self._answer(name, ask, {})
        else:
            self._answer(name, ask, self._apply(name, event))

    def _apply(self, name: str, event: Event) -> dict[str, Any]:
        """Takes an event; returns what its answer says if it was not taken."""
        try:
            if isinstance(event, Join):
                self._keeper.hold(name)
            # The keeper may be slower to say what has changed than to do it.
            self._on_change(self._keeper.apply(event))
        except NotLive as error:
            self._calls.restart(name, str(error))
            return {"not_live": str(error)}
        except (OSError, ValueError) as error:
            logger.warning("%s of %s was not taken: %s", event, name, error)
            return {"failed": str(error)}
        return {}

    def _answer(self, name: str, ask: int | None, rest: dict[str, Any]) -> None:
        if ask is None:
            return
        with self._lock:
            if (worker := self._workers.get(name)) is not None:
                newest = self._newest and self._newest.to_json()
                self._send(worker, {"answer": ask, "authority": newest, **rest})

    def _found(self) -> None:
        """Begins the job when all have joined, or joins one that has begun meanwhile."""
        with self._lock:
            founders = {
                name: worker.founder
                for name, worker in self._workers.items()
                if worker.founder is not None
            }
            begun = self._newest is not None
        if not begun:
            if len(founders) == self._num_founders:
                for name in founders:
                    self._keeper.hold(name)
                self._on_change(self._keeper.start(list(founders.values())))
            return  # `_on_change` has asked for the rest.
        with self._lock:
            asks = {name: worker.asks for name, worker in self._workers.items() if worker.asks}
            for worker in self._workers.values():
                worker.founder, worker.asks = None, []
        rest = {name: self._apply(name, Join(member)) for name, member in founders.items()}
        for name, numbers in asks.items():
            for ask in numbers:
                self._answer(name, ask, rest.get(name, {}))


def _check(name: str, event: Event) -> None:
    """Refuses an event that the workers of this member have no say in."""
    match event:
        case Join(member):
            allowed = member.name == name
        case Leave(other):
            allowed = other == name
        case Form(_, names, _):
            allowed = name in names
        case Remove():
            allowed = False
        case _:
            allowed = True
    if not allowed:
        raise ValueError(f"{name} has no say in {event!r:.200}")
