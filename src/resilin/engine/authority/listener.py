"""The launcher's end of all connections: one thread that accepts, reads and sends what was kept.

It waits for nobody in particular: a worker that reads nothing costs the memory of what it is sent,
and one that sends what is no message loses its connection, with one line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable

from resilin.core.text import clean
from resilin.engine.live.wire import TCP, Connection, Message, check_path, host_and_port, peer, tune

LONGEST = 1 << 20
"""Longest line of a worker, in bytes: the names of 1,000 members are 20,000."""
_QUEUE = 1024

logger = logging.getLogger("resilin")


class Listener:
    """A socket and its connections. The functions are called by its thread.

    Args:
        path: Path of a Unix socket, in a directory that others cannot enter; or `tcp://HOST:0` for
            any free port of this address, and of no other one.
        on_message: Called with each message. A `ValueError` closes the connection.
        on_close: Called when a connection has ended, however that was.
        on_wake: Called after `wake`, once for several calls in a row.
    """

    def __init__(
        self,
        path: str,
        on_message: Callable[[Connection, Message], None],
        on_close: Callable[[Connection], None],
        on_wake: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._on_wake = on_wake
        self._lock = threading.Lock()
        self._touched: dict[Connection, str | None] = {}
        """Connections that have something to send; those with a reason are to be closed."""
        self._closing = False
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._socket, self.address = _bound(path)
        self._socket.listen(_QUEUE)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="resilin-listener", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def touch(self, connection: Connection, close: str | None = None) -> None:
        """Send the rest of what was kept for a connection as soon as that is read.

        Args:
            connection: The connection.
            close: A reason to close it instead, for the log; empty for none.
        """
        with self._lock:
            before = self._touched.get(connection)
            self._touched[connection] = before if close is None else close
        self.wake()

    def wake(self) -> None:
        """Have the thread call `on_wake`."""
        # If the pipe is full, it is awake; if it is closed, there is nothing to do any more.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        """Close all connections, and the socket."""
        self._closing = True
        self.wake()
        self._thread.join()

    # The thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select():
                    if key.fileobj is self._wakes:
                        self._attend()
                    elif key.fileobj is self._socket:
                        self._accept()
                    else:
                        self._serve(key.data, events)
        except Exception:
            # Workers see that their connections are closed, and do not wait for ever.
            logger.exception("the launcher no longer hears its workers")
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, Connection):
                    self._drop(key.data)
            self._selector.close()
            for each in (self._socket, self._wakes, self._wake):
                each.close()
            if not self.address.startswith(TCP):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionError):
                # No descriptor is left, as it seems; others may be closed meanwhile.
                logger.warning("a connection was not accepted: %s", error)
                threading.Event().wait(0.1)
            return
        known = peer(accepted)
        if known is not None and known[1] != os.getuid():
            logger.warning("refused process %d of user %d: it is not ours", *known)
            accepted.close()
            return
        if accepted.family != socket.AF_UNIX:
            tune(accepted)
        connection = Connection(accepted, LONGEST)
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        if connection.fileno() < 0:
            return  # Closed since, for another event of the same wait.
        try:
            if events & selectors.EVENT_WRITE and connection.flush():
                self._selector.modify(connection, selectors.EVENT_READ, connection)
            if events & selectors.EVENT_READ:
                for message in connection.receive():
                    self._on_message(connection, message)
        except ConnectionError:
            self._drop(connection)
        except ValueError as error:
            self._drop(connection, str(error))

    def _attend(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(4096):
                pass
        with self._lock:
            touched, self._touched = self._touched, {}
        for connection, reason in touched.items():
            if connection.fileno() < 0:
                continue
            if reason is not None:
                with contextlib.suppress(ConnectionError):
                    connection.flush()
                self._drop(connection, reason)
            elif connection.pending:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(connection, both, connection)
        self._on_wake()

    def _drop(self, connection: Connection, reason: str = "") -> None:
        if reason:
            known = peer(connection.socket)
            whose = "a connection" if known is None else f"the connection of process {known[0]}"
            logger.warning("%s was closed: %s", whose, clean(reason, 300))
        self._selector.unregister(connection)
        connection.close()
        self._on_close(connection)


def _bound(path: str) -> tuple[socket.socket, str]:
    """A socket that is bound, and the address at which it is reached."""
    if path.startswith(TCP):
        host, port = host_and_port(path)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.bind((host, port))
        shown = f"[{host}]" if ":" in host else host
        return bound, f"{TCP}{shown}:{bound.getsockname()[1]}"
    check_path(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(path)
    os.chmod(path, 0o600)
    return bound, path
