"""A small client of etcd, over the JSON gateway that every etcd serves on its usual port.

It does what membership needs and no more: read, transactions, leases, and a watch from a revision
on. Every call has a time limit. A watch has none, since it may be silent for hours: it is ended by
the first call to the same server that fails, so one that cannot hear of changes is not relied on.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from resilin.cli.live.access import Access
from resilin.core.text import clean

_UNAVAILABLE = frozenset({1, 4, 8, 13, 14})
"""gRPC's codes of a call that another time, or another server, may answer: cancelled, too late,
overloaded, an internal error, not there."""
_NO_TOKEN = "invalid auth token"
_CHUNK = 1 << 16
_Json = dict[str, Any]
_KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""Settings with which the system soon notices that the other machine of a watch has gone."""


class Away(ConnectionError):
    """No server of etcd answers."""


class Rejected(OSError):
    """The etcd has answered, and does not do what it was asked for: a permission, mostly."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value."""

    key: str
    value: bytes
    revision: int
    """The revision of etcd that changed it last; 0 if the key is not there."""
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A key beside the one that is written, with its value before and afterwards."""

    key: str
    before: bytes | None
    """None if anything will do."""
    after: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a transaction or to a read."""

    revision: int
    """The revision that the etcd had then."""
    entries: tuple[Entry, ...] = ()
    """The keys that were read."""
    done: bool = True
    """Whether the condition of the transaction held."""


class Gateway:
    """A connection to etcd: calls of any thread, and one watch at a time.

    Args:
        access: Where it is.
        timeout: Seconds in which one server must answer.
    """

    def __init__(self, access: Access, *, timeout: float = 1.5) -> None:
        self.access = access
        self._timeout = timeout
        self._context = access.context()
        self._lock = threading.Lock()
        self._server = 0
        self._token: str | None = None
        self._watching: socket.socket | None = None
        self._closed = False

    # Keys --------------------------------------------------------------------------------------

    def read(self, key: str, *, prefix: bool = False) -> Answer:
        """The newest value of a key, or of all keys with a prefix: never an older one."""
        body = {"key": _encoded(key), **(_until(key) if prefix else {})}
        return _read(self._call("kv/range", body))

    def swap(
        self,
        key: str,
        revision: int,
        value: bytes | None,
        *,
        mark: Mark | None = None,
        delete: Sequence[str] = (),
    ) -> Answer:
        """Write a key if nobody has changed it.

        Args:
            key: The key.
            revision: Its revision, as last seen; 0 if it must not exist yet.
            value: The new value; None only checks that nobody has changed it.
            mark: A second key: what it must be, and what it then is.
            delete: Other keys, deleted in any case.

        Returns:
            The answer; if it is not done, with the entry as it is instead.
        """
        compare: list[_Json] = [
            {"key": _encoded(key), "target": "MOD", "mod_revision": str(revision)}
        ]
        puts = [] if value is None else [_put(key, value)]
        if mark is not None:
            compare += _is(mark.key, mark.before)
            puts += [] if mark.after == mark.before else [_put(mark.key, mark.after)]
        removal: list[_Json] = [
            {"request_delete_range": {"key": _encoded(each)}} for each in delete
        ]
        return self._transact(compare, [*puts, *removal], key, removal)

    def claim(self, key: str, value: bytes, lease: int) -> bool:
        """Write a key that lasts as long as a lease, unless it has another value already.

        Returns:
            Whether it has this value.

        Raises:
            Rejected: There is no such lease.
        """
        put = [_put(key, value, lease)]
        compare = [{"key": _encoded(key), "target": "MOD", "mod_revision": "0"}]
        if self._transact(compare, put, key).done:
            return True
        return self._transact(_is(key, value), put, key).done

    def _transact(
        self, compare: list[_Json], then: list[_Json], key: str, otherwise: Sequence[_Json] = ()
    ) -> Answer:
        body = {
            "compare": compare,
            "success": then,
            "failure": [{"request_range": {"key": _encoded(key)}}, *otherwise],
        }
        answer = self._call("kv/txn", body)
        done = bool(answer.get("succeeded", False))
        found = [] if done else answer["responses"][0]["response_range"].get("kvs", [])
        return Answer(_revision(answer), tuple(map(_entry, found)), done)

    def put(self, key: str, value: bytes) -> None:
        """Write a key, whatever it was before."""
        self._call("kv/put", {"key": _encoded(key), "value": _base(value)})

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._call("kv/deleterange", {"key": _encoded(key)})

    # Leases ------------------------------------------------------------------------------------

    def grant(self, seconds: int) -> tuple[int, float]:
        """A new lease: its number, and the seconds that it lasts, which may be more."""
        answer = self._call("lease/grant", {"TTL": str(seconds)})
        return int(answer["ID"]), float(answer["TTL"])

    def keep(self, lease: int) -> bool:
        """Renew a lease; False if it has expired."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End a lease, and delete its keys; nothing if it has expired."""
        self._call("lease/revoke", {"ID": str(lease)}, absent={})

    # Changes -----------------------------------------------------------------------------------

    def watch(self, prefix: str, revision: int) -> Iterator[Entry]:
        """All changes of keys with a prefix, from a revision on, until the connection ends.

        Raises:
            Away: The connection has ended, or was ended.
            Rejected: The etcd has no such changes any more, or does not show them.
        """
        create = {"key": _encoded(prefix), **_until(prefix), "start_revision": str(revision)}
        with self._lock:
            server = self._server
        with self._failing(server), contextlib.closing(self._connection(server)) as connection:
            connection.connect()
            sock = connection.sock
            self._begin_watch(sock)
            try:
                response = self._post(connection, "watch", {"create_request": create})
                if response.status != http.client.OK:
                    self._check(response.status, response.read())
                # From now on silence is no fault; a network that has forgotten the connection is.
                sock.settimeout(None)
                for line in _lines(response):
                    yield from _changes(line)
            finally:
                with self._lock:
                    self._watching = None
            raise Away("the watch has ended")

    def end_watch(self) -> None:
        """End the watch, if there is one: its thread gets `Away` at once."""
        with self._lock:
            if self._watching is not None:
                # Not the method of an encrypted socket, under which a reader must not lose it.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._watching, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the watch, and begin none any more."""
        with self._lock:
            self._closed = True
        self.end_watch()

    def _begin_watch(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise Away("this client is closed")
            self._watching = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE.items():
            if (number := getattr(socket, option, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, number, seconds)

    # Calls -------------------------------------------------------------------------------------

    def _call(
        self, path: str, body: Mapping[str, Any], absent: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One call, to the first server that answers.

        Args:
            path: The method.
            body: Its arguments.
            absent: The answer if etcd does not find what the call is about; else that is an error.
        """
        problem = Away("no endpoints")
        for _ in self.access.endpoints:
            with self._lock:
                server = self._server
            try:
                with self._failing(server):
                    return self._ask(server, path, body, absent)
            except Away as error:
                problem = error
        raise problem

    def _ask(
        self, server: int, path: str, body: Mapping[str, Any], absent: dict[str, Any] | None
    ) -> dict[str, Any]:
        for again in (True, False):
            if self.access.user is not None and self._token is None:
                self._token = self._authenticate(server)
            with contextlib.closing(self._connection(server)) as connection:
                response = self._post(connection, path, body)
                text = response.read()
            if response.status == http.client.NOT_FOUND and absent is not None:
                return absent
            # A token ends with its time, and with the etcd that made it.
            if again and self.access.user is not None and _NO_TOKEN.encode() in text:
                self._token = None
                continue
            self._check(response.status, text)
            return cast("dict[str, Any]", json.loads(text))
        raise AssertionError("the second answer was neither taken nor rejected")

    def _authenticate(self, server: int) -> str:
        body = {"name": self.access.user, "password": self.access.password}
        with contextlib.closing(self._connection(server)) as connection:
            response = self._post(connection, "auth/authenticate", body)
            text = response.read()
        self._check(response.status, text)
        return str(json.loads(text)["token"])

    def _connection(self, server: int) -> http.client.HTTPConnection:
        host, port = self.access.endpoints[server]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._context)

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._token is not None and path != "auth/authenticate":
            headers["Authorization"] = self._token
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        return connection.getresponse()

    def _check(self, status: int, text: bytes) -> None:
        """Raise what an answer says that is not a success."""
        if status == http.client.OK:
            return
        try:
            said = json.loads(text)
            code, message = int(said.get("code", 0)), str(said.get("error", said))
        except (ValueError, AttributeError):
            code, message = 0, text.decode(errors="replace")
        message = clean(f"{self.access} says {message} ({status})", 300)
        if code in _UNAVAILABLE or (code == 0 and status >= 500):
            raise Away(message)
        raise Rejected(message)

    @contextlib.contextmanager
    def _failing(self, server: int) -> Iterator[None]:
        """Turn what a server that is not there raises into `Away`, and turn to the next one."""
        try:
            yield
        except Rejected:
            raise
        except (OSError, http.client.HTTPException) as error:
            with self._lock:
                if self._server == server:
                    self._server = (server + 1) % len(self.access.endpoints)
            self.end_watch()
            if isinstance(error, Away):
                raise
            host, port = self.access.endpoints[server]
            raise Away(clean(f"{host}:{port}: {error or type(error).__name__}", 300)) from error


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The lines of a stream; a chunk of it may hold several, or a part of one."""
    rest = b""
    while chunk := response.read1(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _changes(line: bytes) -> Iterator[Entry]:
    """The changes in one message of a watch."""
    if not line.strip():
        return
    said = json.loads(line)
    result = said.get("result", {})
    if "error" in said:
        raise Away(clean(f"the watch has ended: {said['error']}", 300))
    if result.get("canceled"):
        raise Rejected(clean(f"the watch was ended: {result.get('cancel_reason', result)}", 300))
    for event in result.get("events", []):
        yield _entry(event["kv"], deleted=event.get("type") == "DELETE")


def _put(key: str, value: bytes, lease: int = 0) -> _Json:
    return {"request_put": {"key": _encoded(key), "value": _base(value), "lease": str(lease)}}


def _is(key: str, value: bytes | None) -> list[_Json]:
    """The condition that a key has a value; none if anything will do."""
    if value is None:
        return []
    return [{"key": _encoded(key), "target": "VALUE", "value": _base(value)}]


def _read(answer: Mapping[str, Any]) -> Answer:
    return Answer(_revision(answer), tuple(map(_entry, answer.get("kvs", []))))


def _entry(found: Mapping[str, Any], deleted: bool = False) -> Entry:
    return Entry(
        key=base64.b64decode(found["key"]).decode(),
        value=base64.b64decode(found.get("value", "")),
        revision=int(found["mod_revision"]),
        deleted=deleted,
    )


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer["header"]["revision"])


def _until(prefix: str) -> dict[str, str]:
    """The end of the range of all keys with a prefix, which ends with an ASCII character."""
    return {"range_end": _encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def _encoded(text: str) -> str:
    return _base(text.encode())


def _base(value: bytes) -> str:
    return base64.b64encode(value).decode()
