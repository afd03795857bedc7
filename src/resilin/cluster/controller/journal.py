"""The journal: records on disk, one line each, before anything is done about them.

A line is a checksum and a JSON object. A line that a crash has cut short can only be the last one,
and is dropped; a damaged line anywhere else is an error. From time to time the state is written as
the one first line of a new file, which takes the place of the old one.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from resilin.cluster.controller import codec, records
from resilin.cluster.controller.changes import apply, apply_all, own, release
from resilin.cluster.controller.state import State

JOURNAL = "journal.jsonl"
"""Name of the file in the directory of the controller."""
LOCK = "lock"
"""Name of the file that the controller has locked; it holds its process id."""
LONGEST = 20_000
"""Number of lines after which the journal is replaced by the state."""
SNAPSHOT = "State"
"""Name of the first line of such a file."""


class JournalError(ValueError):
    """The journal is damaged, or in use; the message says where."""


class Journal:
    """The journal of one controller, which has it to itself.

    Args:
        directory: Directory of the controller; created with access for its owner alone.
        after_append: Called with the number of lines written so far, after each; for tests.

    Raises:
        JournalError: Another controller uses the directory, or a line is damaged.
    """

    def __init__(
        self, directory: Path, *, after_append: Callable[[int], None] | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = directory / JOURNAL
        self._lock = _lock(directory / LOCK)
        self._after_append = after_append
        self._written = 0
        try:
            self.state, self._lines, end = _replay(self._path)
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        except BaseException:
            os.close(self._lock)
            raise
        os.ftruncate(self._file, end)  # a line that was cut short
        os.fsync(self._file)
        _sync(directory)

    def append(self, new: Iterable[records.Record], *, sync: bool = True) -> State:
        """Write records, and return the state after them.

        Args:
            new: The records.
            sync: Whether they have to survive a power failure from now on. Without it they do
                with the next ones.
        """
        batch = list(new)
        after, end = apply_all(self.state, batch), os.fstat(self._file).st_size
        try:
            for record in batch:
                _write(self._file, _line(records.to_json(record)))
                self._written += 1
                if self._after_append is not None:
                    self._after_append(self._written)
            if batch and sync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)  # or the next line would follow a part of these
            raise
        self.state = after
        self._lines += len(batch)
        if self._lines > LONGEST:
            self.compact()
        return self.state

    def compact(self) -> None:
        """Replace the journal by one line with the state."""
        temporary = self._path.with_suffix(".tmp")
        told = {"record": SNAPSHOT, "state": codec.to_json(self.state)}
        new = os.open(temporary, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND, 0o600)
        _write(new, _line(told))
        os.fsync(new)
        os.rename(temporary, self._path)
        _sync(self._path.parent)
        os.close(self._file)
        self._file, self._lines = new, 1

    def close(self) -> None:
        """Let another controller have it."""
        os.close(self._file)
        os.close(self._lock)


def _lock(path: Path) -> int:
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(file, 32).decode(errors="replace").strip()
        os.close(file)
        raise JournalError(
            f"{path.parent} must have one controller: process {pid or 'unknown'} uses it"
        ) from None
    os.ftruncate(file, 0)
    os.write(file, f"{os.getpid()}\n".encode())
    return file


def _line(told: dict[str, Any]) -> bytes:
    text = json.dumps(told, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it is damaged."""
    checksum, _, text = line.partition(b" ")
    if len(checksum) != 8 or b"%08x" % zlib.crc32(text) != checksum:
        return None
    told = json.loads(text)
    return told if isinstance(told, dict) else None


def _replay(path: Path) -> tuple[State, int, int]:
    """The state, the number of lines, and the bytes of them."""
    state, num, end = State(), 0, 0
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return state, num, end
    state = own(state)
    lines = content.split(b"\n")
    for index, line in enumerate(lines[:-1]):
        told = _parse(line)
        if told is None:
            if index == len(lines) - 2 and not lines[-1]:
                break  # blocks of the last line may reach the disk out of order
            raise JournalError(f"{path}, line {index + 1}: the line is damaged")
        try:
            if told.get("record") == SNAPSHOT:
                state = own(codec.from_json(State, told["state"]))
            else:
                state = apply(state, records.from_json(told))
        except (KeyError, ValueError) as error:
            raise JournalError(f"{path}, line {index + 1}: {error}") from error
        num, end = index + 1, end + len(line) + 1
    return release(state), num, end


def _write(file: int, line: bytes) -> None:
    written = 0
    while written < len(line):
        written += os.write(file, line[written:])


def _sync(directory: Path) -> None:
    """Have the entries of a directory on disk."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
