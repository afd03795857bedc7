"""Segments: the files of an event log, and the merging of old ones.

A writer appends to `events-WRITER.jsonl`. When that file is full it is sealed under a number, as
`events-WRITER@000007-000007.jsonl`. When there are more than a few sealed segments of one level,
the two oldest are merged into one with half of their lines, `events-WRITER@000006-000007.jsonl`.
Each halving of the detail covers twice the time, so a log grows with the logarithm of the run.

The name of a segment gives the numbers that it covers, and a segment that is covered by another one
is ignored. That makes merging safe: the merged file appears atomically, by a rename, and from then
on its sources are ignored, whether or not they get deleted.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

SEGMENT_BYTES = 2 * 2**20
"""Size at which a file is sealed."""
PER_LEVEL = 4
"""Largest number of sealed segments of one level."""
_IN_MEMORY = 2**16
_PATIENCE = 1000
ALWAYS_KEPT = frozenset({b"start", b"rescale", b"fault"})
"""Kinds of events that are never dropped from the log."""

WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Allowed names of writers; no `@`, which separates the numbers."""
_NAME = re.compile(rf"events-({WRITER.pattern})(?:@([0-9]{{6,}})-([0-9]{{6,}}))?\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One sealed file, which is no longer written."""

    first: int
    """Lowest number that it covers."""
    last: int
    """Highest number that it covers."""
    path: Path
    """Path of the file."""

    @property
    def level(self) -> int:
        """Number of times its lines were halved."""
        return (self.last - self.first + 1).bit_length() - 1


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one writer, oldest first."""

    current: Path
    """The file that is being written; it may be missing for a moment."""
    sealed: tuple[Segment, ...]
    """The valid segments."""
    covered: tuple[Segment, ...] = ()
    """Segments that were merged into another one, and are ignored."""

    @property
    def number(self) -> int:
        """Number under which the current file will be sealed."""
        return self.sealed[-1].last + 1 if self.sealed else 0


def current_path(directory: Path, writer: str) -> Path:
    """The file that this writer appends to."""
    return directory / f"events-{writer}.jsonl"


def sealed_path(directory: Path, writer: str, first: int, last: int) -> Path:
    """The file of this writer that covers these numbers."""
    return directory / f"events-{writer}@{first:06d}-{last:06d}.jsonl"


def list_files(directory: Path) -> dict[str, Files]:
    """The files of each writer in the directory, by name of the writer.

    Empty if the directory does not exist.
    """
    sealed: dict[str, list[Segment]] = {}
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        writer, first, last = match.groups()
        segments = sealed.setdefault(writer, [])
        if first is not None and int(first) <= int(last):
            segments.append(Segment(int(first), int(last), directory / name))
    return {
        writer: Files(current_path(directory, writer), *_resolve(segments))
        for writer, segments in sealed.items()
    }


def _resolve(segments: Iterable[Segment]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The valid segments in order, and those covered by another one."""
    sealed: list[Segment] = []
    covered: list[Segment] = []
    for segment in sorted(segments, key=lambda s: (s.first, -s.last)):
        is_covered = bool(sealed) and segment.last <= sealed[-1].last
        (covered if is_covered else sealed).append(segment)
    return tuple(sealed), tuple(covered)


def thin(lines: Iterable[bytes], rare: int) -> list[bytes]:
    """Every second line of each kind of event, starting with the first.

    Kinds in `ALWAYS_KEPT` stay complete, and so do kinds with less than `rare` bytes: results of
    evaluations are few, and outlast the steps around them. Lines of unknown kind are kept too.
    """
    kinds = [(_kind(line), line) for line in lines]
    sizes: dict[bytes, int] = {}
    for kind, line in kinds:
        sizes[kind] = sizes.get(kind, 0) + len(line)
    whole = {kind for kind, size in sizes.items() if size < rare} | ALWAYS_KEPT | {b""}
    kept = []
    is_odd = dict.fromkeys(sizes, True)
    for kind, line in kinds:
        is_odd[kind] = not is_odd[kind]
        if kind in whole or not is_odd[kind]:
            kept.append(line)
    return kept


def _kind(line: bytes) -> bytes:
    # `EventLog` begins each line with {"version":1,"event":"step". Parsing it would take fifty
    # times as long.
    parts = line.split(b'"', 6)
    if len(parts) == 7 and parts[1] == b"version" and parts[3] == b"event":
        return parts[5]
    return b""


def merge(older: Segment, newer: Segment, path: Path, *, rare: int) -> None:
    """Merge two segments into one with half of the lines, at `path`, and delete the two.

    Whenever it is interrupted, the valid segments contain each line once.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    text = older.path.read_bytes() + newer.path.read_bytes()
    lines = text.split(b"\n")
    last = lines.pop()
    lines = thin(lines, rare)
    with open(temporary, "wb") as file:
        file.write(b"\n".join([*lines, last]))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The new name must be on disk before the sources are deleted.
    sync_directory(path.parent)
    older.path.unlink(missing_ok=True)
    newer.path.unlink(missing_ok=True)


def sync_directory(directory: str | Path) -> None:
    """Sync the directory, so that its file names survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mergeable(sealed: Iterable[Segment], most: int = PER_LEVEL) -> tuple[Segment, Segment] | None:
    """The two oldest neighbours of a level with more than `most` segments, if there is one."""
    levels: dict[int, list[Segment]] = {}
    segments = list(sealed)
    for segment in segments:
        levels.setdefault(segment.level, []).append(segment)
    for level in sorted(levels):
        if len(levels[level]) <= most:
            continue
        for older, newer in pairwise(segments):
            # Neighbours only: a range must not span a segment of another level, which could happen
            # if files were deleted.
            if older.level == newer.level == level:
                return older, newer
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """One open file of a snapshot."""

    file: BinaryIO
    """The open file."""
    name: str
    """Name of the file."""
    first: int
    """Lowest number that it covers; for the file being written, its future number."""
    last: int
    """Highest number that it covers."""
    is_sealed: bool
    """Whether it is no longer written."""
    identity: tuple[int, int]
    """Device and inode."""


class Snapshot:
    """The files of one writer, all open, complete and without overlap.

    Open files stay readable when the writer merges them. Segments whose numbers are all below
    `since` are left out.
    """

    def __init__(self, directory: Path, writer: str, *, since: int = 0) -> None:
        self.parts: list[Part] = []
        self.number = 0
        """Number under which the current file will be sealed."""
        for _ in range(_PATIENCE):
            if self._take(directory, writer, since):
                return
            self.close()
        raise OSError(f"the files of {writer} in {directory} change faster than they can be opened")

    def _take(self, directory: Path, writer: str, since: int) -> bool:
        # The current file first. If it still has that name after the others were opened, nothing
        # was sealed in between, so the list of the others was complete.
        path = current_path(directory, writer)
        current = _open(path)
        try:
            files = list_files(directory).get(writer, Files(path, ()))
            for segment in files.sealed:
                if segment.last >= since and not self._add(_open(segment.path), segment):
                    return False
            self.number = files.number
            if _identity(path) != (None if current is None else _identity(current.fileno())):
                return False
            if current is not None:
                self._add(current, Segment(self.number, self.number, path), is_sealed=False)
                current = None
            return True
        finally:
            if current is not None:
                current.close()

    def _add(self, file: BinaryIO | None, segment: Segment, *, is_sealed: bool = True) -> bool:
        if file is None:
            return False
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if status.st_size <= _IN_MEMORY:
            # A job on many hosts has a short file from each, more than a process may keep open.
            with file:
                file = io.BytesIO(file.read())
        self.parts.append(
            Part(file, segment.path.name, segment.first, segment.last, is_sealed, identity)
        )
        return True

    def close(self) -> None:
        """Closes the files."""
        for part in self.parts:
            part.file.close()
        self.parts.clear()


def _open(path: Path) -> BinaryIO | None:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return None


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
