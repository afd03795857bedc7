"""Messages between a worker and its launcher: lines of JSON over a Unix socket, or over TCP.

Nothing here blocks. A process that is frozen reads nothing, and whoever sends to it must not wait:
what cannot be sent is kept, and of the announcements among it only the newest, which says all that
earlier ones did. Whatever was sent is read: nothing that the other side does, short of a line that
is no message, ends a connection before its last line was taken.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]
"""One message: its kind is its key."""
LONGEST = 1 << 24
"""Longest line, in bytes. An announcement of 1,000 members has 54,000."""
MOST_KEPT = 1 << 25
"""Most bytes that wait to be sent, besides an announcement. A side that does not read, and asks
again and again, is given up."""
_AT_ONCE = 1 << 18
_LONGEST_PATH = 107
TCP = "tcp://"
"""Beginning of an address that is not a path: `tcp://HOST:PORT`."""
_UNHEARD = 10_000
"""Milliseconds after which a machine that acknowledges nothing counts as gone."""
_CONNECT_WITHIN = 10.0


def connect(path: str) -> socket.socket:
    """A connection to the socket at this path, or at an address of the form `tcp://HOST:PORT`.

    Raises:
        ConnectionError: Nobody listens there.
    """
    if path.startswith(TCP):
        return _connect_over_network(path)
    check_path(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ConnectionError(f"cannot connect to {path}: {error.strerror or error}") from None
    return connection


def _connect_over_network(address: str) -> socket.socket:
    try:
        connection = socket.create_connection(host_and_port(address), timeout=_CONNECT_WITHIN)
    except OSError as error:
        raise ConnectionError(f"cannot connect to {address}: {error.strerror or error}") from None
    tune(connection)
    return connection


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of an address of the form `tcp://HOST:PORT`.

    Raises:
        ValueError: It has another form.
    """
    host, separator, port = address.removeprefix(TCP).rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"{address!r} must be {TCP}HOST:PORT")
    return host.strip("[]"), int(port)


def tune(connection: socket.socket) -> None:
    """Sends small messages at once over TCP, and notices a machine that is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, _UNHEARD)


def check_path(path: str) -> None:
    """Raises if a path is longer than the system takes for a socket."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(
            f"the path of a socket ({path}) has {len(os.fsencode(path))} bytes, and must have at "
            f"most {_LONGEST_PATH}: set TMPDIR to a shorter directory"
        )


class Connection:
    """One end of a connection. Threads may send; one thread receives.

    Args:
        connection: The socket. It becomes non-blocking, and belongs to this object.
        longest: Longest line that is taken, in bytes.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._longest = longest
        self._taken = bytearray()
        """The beginning of a line."""
        self._ended = False
        self._lock = threading.Lock()
        self._sending = b""
        """The rest of a line that was sent in part."""
        self._kept: deque[bytes] = deque()
        self._num_kept = 0
        """Its bytes."""
        self._announcement: bytes | None = None

    def fileno(self) -> int:
        """The descriptor, for `select`; -1 once it is closed."""
        return self.socket.fileno()

    def receive(self) -> Iterator[Message]:
        """The messages that have come, one by one; none if there are none yet.

        Raises:
            ConnectionError: The other side has closed the connection, and all was received.
            ValueError: A line is no message, or is too long.
        """
        if self._ended:
            raise ConnectionError("the other side has closed the connection")
        lines: list[bytes] = []
        while not lines:
            try:
                data = self.socket.recv(_AT_ONCE)
            except BlockingIOError:
                return
            except OSError as error:
                data, reason = b"", error.strerror or str(error)
            else:
                reason = "the other side has closed the connection"
            if not data:
                self._ended = True
                raise ConnectionError(reason)
            # Only what is new is searched: a long line comes in many pieces.
            *found, rest = data.split(b"\n")
            if found:
                lines = [bytes(self._taken) + found[0], *found[1:]]
                self._taken = bytearray(rest)
            else:
                self._taken += rest
            if max(map(len, [*lines, self._taken])) > self._longest:
                raise ValueError(f"a line must have at most {self._longest} bytes")
        # One by one: what came before a line that is no message counts.
        yield from map(_decode, lines)

    def send(self, message: Message) -> None:
        """Send a message, or keep it until `flush` can.

        Raises:
            ConnectionError: The connection is broken, or the other side does not read.
        """
        with self._lock:
            line = encode(message)
            self._kept.append(line)
            self._num_kept += len(line)
            if self._num_kept > MOST_KEPT:
                raise ConnectionError(f"the other side has left {MOST_KEPT} bytes unread")
        self.flush()

    def announce(self, line: bytes) -> None:
        """Send an announcement in place of every earlier one that was not sent yet.

        It may come after messages that were sent later.

        Args:
            line: The message, encoded: many get the same.

        Raises:
            ConnectionError: The connection is broken.
        """
        with self._lock:
            self._announcement = line
        self.flush()

    def flush(self) -> bool:
        """Send as much as the other side takes; whether that was all.

        Raises:
            ConnectionError: The connection is broken.
        """
        with self._lock:
            while self._sending or self._kept or self._announcement is not None:
                if not self._sending:
                    self._sending = self._next()
                try:
                    sent = self.socket.send(self._sending)
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise ConnectionError(error.strerror or str(error)) from None
                self._sending = self._sending[sent:] if sent < len(self._sending) else b""
            return True

    def _next(self) -> bytes:
        if self._kept:
            first = self._kept.popleft()
            self._num_kept -= len(first)
            return first
        line, self._announcement = self._announcement, None
        assert line is not None
        return line

    @property
    def pending(self) -> bool:
        """Whether something was not sent yet."""
        return bool(self._sending or self._kept or self._announcement is not None)

    def close(self) -> None:
        """Close it. What was sent is still received."""
        self.socket.close()


def encode(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ValueError(f"{line[:200]!r} must be an object of JSON")
    return message


# The process at the other end -----------------------------------------------------------------


def peer(connection: socket.socket) -> tuple[int, int] | None:
    """Process and user at the other end, when it connected; None if the system does not say.

    It says nothing of a process on another machine, nor of any connection over TCP.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or connection.family != socket.AF_UNIX:
        return None
    credentials = struct.Struct("3i")
    pid, user, _ = credentials.unpack(
        connection.getsockopt(socket.SOL_SOCKET, option, credentials.size)
    )
    return pid, user


def descends(pid: int, ancestor: int) -> bool:
    """Whether a living process is this one, or was started by it, directly or not."""
    while pid > 1 and pid != ancestor:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        pid = int(fields[1])
    return pid == ancestor
