"""A worker's connection to its launcher, which says who is in the job.

A thread of its own receives announcements, sends signs of life, and ends only with the connection:
then `lost` is set, and whoever waits is woken. Nobody waits for the launcher to read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

from resilin.core.live import Authority, Event, NotLive, event_to_json
from resilin.engine.live.proof import Greeting
from resilin.engine.live.wire import Connection, Message, connect

ALIVE_EVERY = 0.25
"""Seconds between two signs of life."""
HELLO_WITHIN = 30.0
"""Seconds within which the launcher must say hello."""
_FLUSH_WITHIN = 2.0

logger = logging.getLogger("resilin")


class Client:
    """A member's connection to its launcher.

    The thread of the connection and the training share its attributes.

    Args:
        path: Path of the launcher's socket.
        name: The name that the launcher has given to this process.
        secret: The secret of the job, if the launcher is reached over a network: each proves to the
            other that it knows it. None on one machine, where the launcher tells it.
        member: Name of the member that this process is a part of; None if it is the member itself.

    Raises:
        ConnectionError: Nobody listens there, or the launcher refuses this process.
    """

    def __init__(
        self, path: str, name: str, secret: bytes | None = None, *, member: str | None = None
    ) -> None:
        self.name = name
        """Name of this process."""
        self.member = name if member is None else member
        """Name of the member that it is, or is a part of."""
        self.on_change: Callable[[Authority], None] = _nothing
        """Called by the thread with each announcement; `newest` is that one, or a newer one."""
        self._on_stop: Callable[[], None] = _nothing
        self._stopping = False
        self._newest: Authority | None = None
        self.joined = False
        """Whether this member was in an announcement: if it is not in a later one, it is out."""
        self._answers: dict[int, Message | None] = {}
        """Answers by number; None for those that are waited for."""
        self._asked = 0
        self._lost: str | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._connection = Connection(connect(path))
        try:
            if secret is None:
                self._connection.send({"name": name})
            else:
                self._prove(Greeting(name), secret)
            hello = self._hello()
            self.secret = bytes.fromhex(hello["secret"]) if secret is None else secret
            """The secret of the job."""
            self.address = self._own_address(hello)
            """The address at which this member can be reached by others."""
        except (ConnectionError, KeyError, TypeError, ValueError) as error:
            self._connection.close()
            raise ConnectionError(f"{path} is no launcher for {name}: {error}") from None
        _clients.add(self)
        self._thread = threading.Thread(target=self._run, name="resilin-live", daemon=True)
        self._thread.start()

    # Knowledge -----------------------------------------------------------------------------

    @property
    def newest(self) -> Authority | None:
        """The latest announcement; None before the first generation."""
        return self._newest

    @property
    def lost(self) -> bool:
        """Whether the connection has ended: the launcher is gone, or has given this one up."""
        return self._lost is not None

    @property
    def on_stop(self) -> Callable[[], None]:
        """Called by the thread when the whole job is to stop; at once if it was already."""
        return self._on_stop

    @on_stop.setter
    def on_stop(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._on_stop = call
            missed = self._stopping
        if missed:
            call()

    def wait(self, until: Callable[[Authority], bool], timeout: float) -> Authority | None:
        """Wait for an announcement.

        Args:
            until: Whether it is the one that is waited for.
            timeout: Longest wait, in seconds.

        Returns:
            The announcement; None if it did not come in time, or the connection was lost.
        """

        def found() -> bool:
            return self._newest is not None and until(self._newest)

        self._refuse_thread()
        with self._changed:
            self._changed.wait_for(lambda: found() or self.lost, timeout)
            return self._newest if found() else None

    # Reports -------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Report an event. If the connection is lost, so is the event."""
        self._send({"event": event_to_json(event), "ask": None})

    def ask(self, event: Event, timeout: float) -> Authority:
        """Report an event, and wait until the authority has taken it.

        Returns:
            The authority after the event. Before the first generation there is none: then this
            waits for it.

        Raises:
            ConnectionError: The connection was lost, or the launcher cannot reach the authority.
                Nobody knows whether the event was taken.
            TimeoutError: There was no answer in time. The same holds.
            NotLive: The job cannot continue live.
        """
        self._refuse_thread()
        with self._changed:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
        self._send({"event": event_to_json(event), "ask": number})
        with self._changed:
            self._changed.wait_for(lambda: self._answers[number] or self.lost, timeout)
            answer = self._answers.pop(number)
            if answer is None and self._lost is not None:
                raise ConnectionError(f"no answer to {event}: {self._lost}")
            if answer is None:
                raise TimeoutError(f"no answer to {event} within {timeout:g} s")
            if "not_live" in answer:
                raise NotLive(answer["not_live"])
            if "failed" in answer:
                raise ConnectionError(f"{event} was not taken: {answer['failed']}")
            assert self._newest is not None
            return self._newest

    def finished(self) -> None:
        """Report that the training is over: the exit of this process is no loss."""
        self._send({"finished": True})

    def restart(self, reason: str) -> None:
        """Report that the job cannot continue live."""
        self._send({"restart": reason})

    def close(self) -> None:
        """End the connection, after what was reported has been sent."""
        deadline = time.monotonic() + _FLUSH_WITHIN
        try:
            while not self.lost and not self._connection.flush():
                left = deadline - time.monotonic()
                if left <= 0:
                    logger.warning("the launcher does not read: some reports were not sent")
                    break
                _ready(self._connection, left, select.POLLOUT)
        except ConnectionError as error:
            self._end(str(error))
        self._closed = True
        self._end("it was closed here")
        with contextlib.suppress(OSError):  # the other side may have closed it first
            self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _refuse_thread(self) -> None:
        """Raises in the thread: what it would wait for only comes through it."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("on_change and on_stop must not wait for the launcher")

    def _send(self, message: Message) -> None:
        try:
            if not self.lost:
                self._connection.send(message)
        except ConnectionError as error:
            self._end(str(error))

    # The thread ----------------------------------------------------------------------------

    def _prove(self, greeting: Greeting, secret: bytes) -> None:
        """Has the launcher prove that it knows the secret, and proves it to the launcher."""
        self._connection.send(greeting.claim())
        deadline = time.monotonic() + HELLO_WITHIN
        while (left := deadline - time.monotonic()) > 0:
            _ready(self._connection, left, select.POLLIN)
            for message in self._connection.receive():
                self._connection.send(greeting.answer(secret, message))
                return
        raise ConnectionError(f"it proved nothing within {HELLO_WITHIN:g} s")

    def _own_address(self, hello: Message) -> str:
        """That which the launcher tells; over a network, the one from which it was reached."""
        if self._connection.socket.family == socket.AF_UNIX:
            return str(hello["address"])
        return str(self._connection.socket.getsockname()[0])

    def _hello(self) -> Message:
        deadline = time.monotonic() + HELLO_WITHIN
        while (left := deadline - time.monotonic()) > 0:
            _ready(self._connection, left, select.POLLIN)
            messages = self._connection.receive()
            for message in messages:
                if "refused" in message:
                    raise ConnectionError(message["refused"])
                hello: Message = message["hello"]
                self._take(hello)
                for later in messages:
                    self._take(later)
                return hello
        raise ConnectionError(f"it did not say hello within {HELLO_WITHIN:g} s")

    def _run(self) -> None:
        reason = "the thread of the connection failed"
        try:
            beat = 0.0
            while not self.lost:
                now = time.monotonic()
                if now >= beat:
                    beat = now + ALIVE_EVERY
                    self._connection.send({"alive": True})
                wanted = select.POLLIN | (select.POLLOUT if self._connection.pending else 0)
                _ready(self._connection, beat - now, wanted)
                self._connection.flush()
                for message in self._connection.receive():
                    self._take(message)
        except (ConnectionError, ValueError) as error:
            reason = str(error)
        except Exception:
            # The main thread learns that it is alone; nobody else would.
            logger.exception("the connection to the launcher is given up")
        finally:
            self._end(reason)
            self._connection.close()

    def _take(self, message: Message) -> None:
        """Takes a message of the launcher."""
        changed = stops = False
        with self._changed:
            if message.get("authority") is not None:
                authority = Authority.from_json(message["authority"])
                # An answer may overtake an announcement, and the reverse.
                known = self._newest
                changed = (
                    known is None
                    or known.identity != authority.identity
                    or known.revision < authority.revision
                )
                self._newest = authority if changed else known
                self.joined = self.joined or self.member in authority
            if message.get("answer") in self._answers:
                self._answers[message["answer"]] = message
            if message.get("stop"):
                stops = not self._stopping
                self._stopping = True
            self._changed.notify_all()
            on_stop = self._on_stop
        if changed:
            self.on_change(authority)
        if stops:
            on_stop()

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = reason
                if not self._closed:
                    logger.warning("%s lost its launcher: %s", self.name, reason)
            self._changed.notify_all()

    def _forget(self) -> None:
        """Lets go of the connection in a forked child: it belongs to the parent."""
        self._lost = "it belongs to the process that this one was forked from"
        self._changed = threading.Condition()  # a thread of the parent may have held it
        self._connection.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget_in_child() -> None:
    for client in list(_clients):
        client._forget()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _nothing(*_: object) -> None:
    pass


def _ready(connection: Connection, seconds: float, wanted: int) -> None:
    """Wait until something has come, or can be sent; not with `select`, which ends at 1024."""
    poll = select.poll()
    poll.register(connection, wanted)
    poll.poll(max(0.0, seconds) * 1000)
