"""Read an event log: all events, new events, or the latest event.

A log may be read while it is written and while its segments are merged; a reader sees each event
once, up to the moment at which it started. A line that cannot be read is identified by file and
line number, and is either an error or, if the caller prefers to see the rest, an entry in a list.

Run directories are local and plain: nothing is downloaded or decompressed.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from resilin.core.events import Event, EventError, from_json
from resilin.telemetry.segments import Part, Snapshot, list_files

MAX_LINE = 2**20
"""Largest size of a line that may be an event, in bytes."""
_WINDOW = 2**16


@dataclass(frozen=True, slots=True)
class Damage:
    """A line that could not be read."""

    file: str
    """Name of the file."""
    line: int
    """Number of the line in it, from 1."""
    reason: str
    """The error."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


def read_events(
    run_dir: str | os.PathLike[str], damage: list[Damage] | None = None
) -> Iterator[Event]:
    """All events of a run, from all writers, in order of time.

    Events of one writer stay in the order in which they were written, even if its clock was set
    back. An unfinished line at the end of a file that is being written is not an event yet.

    Args:
        run_dir: The directory of an event log.
        damage: Receives the lines that cannot be read; None makes them an error.

    Raises:
        ValueError: There is no such directory, or no event file in it.
        EventError: A line is not an event, and `damage` is None.
    """
    directory = Path(run_dir)
    writers = list_files(directory)
    if not writers:
        raise ValueError(
            f"{directory} has no event log; a job writes one with `resilin run --run-dir "
            f"{directory} ...`, or with `resilin.events_to({str(directory)!r})` in its script"
        )
    return _merged(directory, sorted(writers), damage)


def _merged(directory: Path, writers: list[str], damage: list[Damage] | None) -> Iterator[Event]:
    with ExitStack() as stack:
        sources = []
        for writer in writers:
            snapshot = Snapshot(directory, writer)
            stack.callback(snapshot.close)
            sources.append(_of_writer(snapshot, damage))
        yield from heapq.merge(*sources, key=attrgetter("time"))


def _of_writer(snapshot: Snapshot, damage: list[Damage] | None) -> Iterator[Event]:
    for part in snapshot.parts:
        yield from Lines(part).events(damage)


class Lines:
    """The lines of one file, starting at an offset."""

    def __init__(self, part: Part, *, offset: int = 0, line: int = 0) -> None:
        self._part = part
        self.offset = offset
        """Bytes of the whole lines read so far."""
        self.line = line
        """Number of whole lines read so far."""

    def events(self, damage: list[Damage] | None) -> Iterator[Event]:
        """Read to the end of the last whole line."""
        file = self._part.file
        file.seek(self.offset)
        while text := file.readline(MAX_LINE):
            size, is_long = len(text), False
            while len(text) == MAX_LINE and not text.endswith(b"\n"):
                text, is_long = file.readline(MAX_LINE), True
                size += len(text)
            if not text.endswith(b"\n") and not self._part.is_sealed:
                return
            self.offset += size
            self.line += 1
            try:
                if is_long:
                    raise EventError(f"{size} bytes, longer than any event (at most {MAX_LINE})")
                event = parse(text)
            except EventError as error:
                found = Damage(self._part.name, self.line, str(error))
                if damage is None:
                    raise EventError(str(found)) from None
                damage.append(found)
            else:
                yield event


def parse(text: bytes) -> Event:
    """The event in one line of a file.

    Raises:
        EventError: The line is not an event; the message gives the reason.
    """
    try:
        # JSON allows other encodings, but the log is written in UTF-8.
        line = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EventError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    return from_json(line)


@dataclass(slots=True)
class _Place:
    """Position of a reader in the files of one writer: a file number and an offset in it."""

    number: int = 0
    identity: tuple[int, int] | None = None
    offset: int = 0
    line: int = 0
    time: float = -math.inf

    def is_at_end(self, current: Path) -> bool:
        try:
            status = os.stat(current)
        except FileNotFoundError:
            return False
        is_same = (status.st_dev, status.st_ino) == self.identity
        return is_same and status.st_size == self.offset

    def read(self, snapshot: Snapshot, damage: list[Damage]) -> list[Event]:
        found: list[Event] = []
        seen, self.number = self.number, snapshot.number
        last: tuple[Part, Lines] | None = None
        for part in snapshot.parts:
            lines = Lines(part)
            is_same = part.first == part.last == seen and part.identity == self.identity
            if is_same and self.offset <= part.file.seek(0, os.SEEK_END):
                lines = Lines(part, offset=self.offset, line=self.line)
            events = list(lines.events(damage))
            if part.first < part.last and (
                part.first < seen or (part.first == seen and self.offset)
            ):
                # Merged from events that were already seen and new ones.
                events = [event for event in events if event.time > self.time]
            found += events
            last = part, lines
        self.identity, self.offset, self.line = None, 0, 0
        if last is not None and not last[0].is_sealed:
            self.identity, self.offset, self.line = last[0].identity, last[1].offset, last[1].line
        if found:
            self.time = found[-1].time
        return found


class Follower:
    """Reads a log as it grows.

    It can start before the log exists, and keeps no file open between polls. If the events since
    the last poll have already been thinned out, the remaining ones are returned.

    Args:
        run_dir: The directory of an event log, now or later.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._directory = Path(run_dir)
        self._places: dict[str, _Place] = {}
        self.damage: list[Damage] = []
        """Lines that could not be read so far."""

    def poll(self) -> list[Event]:
        """The events since the last poll, in order of time."""
        sources = [
            self._new(writer, files.current)
            for writer, files in sorted(list_files(self._directory).items())
        ]
        return list(heapq.merge(*sources, key=attrgetter("time")))

    def _new(self, writer: str, current: Path) -> list[Event]:
        place = self._places.setdefault(writer, _Place())
        if place.is_at_end(current):
            return []
        snapshot = Snapshot(self._directory, writer, since=place.number)
        if snapshot.number < place.number:
            # Another job started in the same directory.
            snapshot.close()
            place = self._places[writer] = _Place()
            snapshot = Snapshot(self._directory, writer)
        try:
            return place.read(snapshot, self.damage)
        finally:
            snapshot.close()


def last_event(run_dir: str | os.PathLike[str]) -> Event | None:
    """The latest event, read from the ends of the files only; None if there is none yet."""
    directory = Path(run_dir)
    newest: Event | None = None
    for writer in list_files(directory):
        event = _last_of(directory, writer)
        if event is not None and (newest is None or not event.time <= newest.time):
            newest = event
    return newest


def _last_of(directory: Path, writer: str) -> Event | None:
    snapshot = Snapshot(directory, writer)
    try:
        for part in reversed(snapshot.parts):
            end = part.file.seek(0, os.SEEK_END)
            part.file.seek(max(0, end - _WINDOW))
            # Text after the last line break is an unfinished line, or empty.
            for text in reversed(part.file.read().split(b"\n")[:-1]):
                # Damaged lines are reported when the whole log is read.
                with suppress(EventError):
                    return parse(text)
    finally:
        snapshot.close()
    return None
