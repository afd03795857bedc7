"""The authority of a job as one value in etcd.

It is changed by compare-and-swap alone: whoever has not seen the newest value changes nothing,
reads it and tries again. So the generations of a job have one order, whoever announces them.

Revisions alone would not do for that: an etcd that has lost data, all or only the newest, gives
them again. So each value has a random mark, which a second key has, too, and both must be as they
were seen. A value that is older than the one that was seen, or another one of the same revision,
ends the life of the job: nobody continues with it.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resilin.cli.live.gateway import Entry, Gateway, Mark
from resilin.core.live import Authority, NotLive

Change = Callable[[Authority], Authority]

FORMAT = 1
"""Format of the value."""
ATTEMPTS = 100
"""Most attempts of one change: each that fails is one that another launcher has made meanwhile."""
_BACK_OFF = 0.25
"""Longest pause between two attempts, in seconds; launchers that collide wait unequally long."""


@dataclass(frozen=True, slots=True)
class Known:
    """A value that was seen."""

    authority: Authority
    revision: int
    """The revision of etcd that wrote it."""
    mark: str
    """A random text that no other value has."""


class Record:
    """The value, as last seen.

    Args:
        gateway: The etcd.
        prefix: Prefix of the keys of the job.
        on_change: Called with new authorities, in order, by a thread that saw one. If they come
            faster than they are told, only the newest is.
        on_over: Called once with the reason, if the authority is over because of others; whoever
            asks for the change that ends it gets `NotLive`.
    """

    def __init__(
        self,
        gateway: Gateway,
        prefix: str,
        *,
        on_change: Callable[[Authority], None],
        on_over: Callable[[str], None],
    ) -> None:
        self.key = f"{prefix}authority"
        self.known: Known | None = None
        """The newest value that was seen; None if none was."""
        self.over: str | None = None
        """Reason why nobody continues with it any more; None while somebody does."""
        self._gateway = gateway
        self._mark = f"{prefix}mark"
        self._on_change = on_change
        self._on_over = on_over
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._told: Known | None = None

    @property
    def newest(self) -> Authority | None:
        """The authority as last seen; None if none was."""
        known = self.known
        return None if known is None else known.authority

    def start(self, seen: Entry | None, authority: Authority) -> bool:
        """Begin with a new authority, unless somebody else has changed the value meanwhile.

        Args:
            seen: What is there now.
            authority: The new one.
        """
        revision, mark = 0 if seen is None else seen.revision, _new_mark()
        beside = Mark(self._mark, None, mark.encode())
        answer = self._gateway.swap(self.key, revision, _encode(authority, mark), mark=beside)
        if answer.done:
            self._take(Known(authority, answer.revision, mark))
        return answer.done

    def update(self, change: Change, *, delete: Sequence[str] = ()) -> Authority:
        """Change the authority.

        Args:
            change: Returns the next authority; called again whenever another launcher was faster.
            delete: Keys to delete with it.

        Raises:
            NotLive: The authority is over, or it is after this change: then all are told.
            ValueError: There is none yet, or this cannot be a change of it.
            Away: No etcd answers. The change may have been made, or not.
            TimeoutError: Other launchers were faster each time.
        """
        for attempt in range(ATTEMPTS):
            if (after := self.attempt(change, delete=delete)) is not None:
                return after
            time.sleep(random.uniform(0, min(_BACK_OFF, 0.002 * 2**attempt)))
        raise TimeoutError(f"other launchers have changed {self.key} {ATTEMPTS} times meanwhile")

    def attempt(self, change: Change, *, delete: Sequence[str] = ()) -> Authority | None:
        """Try to change the authority; None if somebody else has meanwhile, which is known then."""
        known = self.known
        if known is None:
            raise ValueError("a change must come after the first generation")
        if self.over is not None:
            raise NotLive(self.over)
        before, mark, end = known.authority, _new_mark(), None
        try:
            after = change(before)
        except NotLive as error:
            after, end = before, str(error)
        value = _encode(after, mark)
        if end is not None:
            value = _encode_over(before.roster.generation, end, mark)
        same = end is None and after == before
        # Then it is a check alone: what was seen last may not be the newest.
        beside = Mark(self._mark, known.mark.encode(), (known.mark if same else mark).encode())
        answer = self._gateway.swap(
            self.key, known.revision, None if same else value, mark=beside, delete=delete
        )
        if not answer.done:
            self.read(answer.entries[0] if answer.entries else None, known)
            return None
        if end is not None:
            self.over = end
            raise NotLive(end)
        if not same:
            self._take(Known(after, answer.revision, mark))
        return after

    def read(self, entry: Entry | None, known: Known | None) -> None:
        """Take notice of the value that is in etcd now.

        Args:
            entry: The value; None if there is none.
            known: What was known before it was read.
        """
        if entry is None:
            if known is not None:
                self.end(f"the etcd has no {self.key} any more: it has lost its data")
            return
        if known is not None:
            same = f'"mark":"{known.mark}"'.encode() in entry.value
            if entry.revision < known.revision or (entry.revision == known.revision and not same):
                self.end(
                    f"{self.key} is of revision {entry.revision} of the etcd, and another one was "
                    f"seen of revision {known.revision}: the etcd has lost data"
                )
        self.see(entry)

    def see(self, entry: Entry) -> None:
        """Take notice of a change, unless a later one is known."""
        known, reason = None, "it was deleted"
        if not entry.deleted:
            try:
                state = decode(entry)
                known, reason = state.known, state.over
            except ValueError as error:
                reason = str(error)
        if known is not None:
            self._take(known)
        elif self.known is not None and entry.revision > self.known.revision:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Give this authority up."""
        with self._lock:
            if self.over is not None or self.known is None:
                return
            self.over = reason
        self._on_over(reason)

    def _take(self, new: Known) -> None:
        with self._lock:
            known = self.known
            if self.over is not None or (known is not None and new.revision <= known.revision):
                return
            same = known is None or known.authority.identity == new.authority.identity
            if same:
                self.known = new
        if not same:
            self.end(f"the job was started again, with authority {new.authority.identity}")
        self._tell()

    def _tell(self) -> None:
        """Hand on the newest authority, without a lock that whoever gets it may wait for."""
        while self._told is not self.known and self._telling.acquire(blocking=False):
            try:
                newest = self.known
                if newest is not None and self._told is not newest:
                    self._told = newest
                    self._on_change(newest.authority)
            finally:
                self._telling.release()


@dataclass(frozen=True, slots=True)
class State:
    """The meaning of a value: an authority, or that it is over."""

    known: Known | None
    over: str
    """Reason why it is over; empty if it is not."""
    generation: int
    """Its last generation."""


def decode(entry: Entry) -> State:
    """The meaning of a value.

    Raises:
        ValueError: It is something else.
    """
    try:
        state = json.loads(entry.value)
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, and this version reads {FORMAT}")
        if "over" in state:
            return State(None, str(state["over"]), int(state["generation"]))
        authority = Authority.from_json(state["authority"])
        known = Known(authority, entry.revision, str(state["mark"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{entry.key} in etcd is no authority of resilin: {error}") from None
    return State(known, "", authority.roster.generation)


def _encode(authority: Authority, mark: str) -> bytes:
    return _bytes({"format": FORMAT, "mark": mark, "authority": authority.to_json()})


def _encode_over(generation: int, reason: str, mark: str) -> bytes:
    return _bytes({"format": FORMAT, "mark": mark, "over": reason, "generation": generation})


def _bytes(state: dict[str, Any]) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode()


def _new_mark() -> str:
    return secrets.token_hex(8)
