"""`EventLog`: the events of a run, as lines in files that stay small and survive a crash.

A line is an event as JSON. Steps are buffered for a second, because there are many of them; any
other event is written immediately. There is no thread and no server: the caller writes. `segments`
describes how files are named and how old ones are thinned out.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from pathlib import Path

from resilin.core.events import Event, StepEvent, to_json
from resilin.telemetry.segments import (
    SEGMENT_BYTES,
    WRITER,
    Files,
    current_path,
    list_files,
    merge,
    mergeable,
    sealed_path,
)

logger = logging.getLogger("resilin")

HOLD = 1.0
"""Seconds for which a step may be buffered before it is written."""
_BUFFER = 2**16
_RARE = 16


class EventLog:
    """Appends events to the files of one writer in a directory.

    Whole lines are appended by one system call, so a killed process loses at most one second of
    buffered steps, and can leave one unfinished line, which the next log of this writer truncates.
    Events are not synced to disk one by one: a power failure may lose more.

    Two processes with the same name, such as a job and its replacement that starts before the first
    has ended, do not interfere: the second writes as `WRITER+2`.

    A full disk or a deleted directory does not end the training. It is logged once as a warning,
    and nothing more is written.

    Args:
        directory: A local directory; created if it is missing.
        writer: Name of the writer, such as `replica-0`: letters, digits, dots, dashes and
            underscores.
        segment_bytes: Size at which a file is sealed. With the default, ten million steps take
            less than 100 MB; starts, rescales and faults are never dropped.

    Raises:
        ValueError: The name of the writer cannot be part of a file name.
        OSError: The directory cannot be created or written to.
    """

    def __init__(
        self, directory: str | os.PathLike[str], writer: str, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        if WRITER.fullmatch(writer) is None or "+" in writer:
            raise ValueError(
                f"writer ({writer!r}) may contain only letters, digits, dots, dashes and "
                "underscores"
            )
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes ({segment_bytes}) must be at least 1")
        self._directory = Path(directory)
        self._segment_bytes = segment_bytes
        self._room = min(_BUFFER, segment_bytes)
        self._lines: list[str] = []
        self._held = 0
        self._file: int | None = None
        self._size = 0
        self._flushed = time.monotonic()
        self._asked = self._writer = writer
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._open()
            self._tidy()
        except OSError as error:
            self._release()
            # A restarted job must not fail here, where a running one would not.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._give_up(error)

    def write(self, event: Event) -> None:
        """Append the event: a step within about a second, any other event immediately."""
        if self._file is None:
            return
        line = to_json(event)
        self._lines.append(line)
        self._held += len(line) + 1
        if (
            type(event) is not StepEvent
            or time.monotonic() - self._flushed >= HOLD
            or self._held >= self._room
        ):
            self.flush()

    def flush(self) -> None:
        """Write the buffered events, and seal the file if it is full."""
        if self._file is None:
            return
        try:
            if self._lines:
                # The JSON form is ASCII.
                text = "\n".join(self._lines).encode("ascii") + b"\n"
                self._lines.clear()
                self._held = 0
                written = os.write(self._file, text)
                if written < len(text):
                    raise OSError(errno.ENOSPC, f"{written} of {len(text)} bytes were written")
                if not os.fstat(self._file).st_nlink:
                    raise OSError(errno.ENOENT, "the file has been deleted")
                self._size += written
            if self._size >= self._segment_bytes:
                self._seal()
        except OSError as error:
            self._give_up(error)
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write the buffered events and close the log; later writes are ignored."""
        self.flush()
        self._release()

    def _open(self) -> None:
        """Open a file that no live process writes to, and lock it.

        The holder of the lock may seal the file and merge the segments sealed under its name. The
        system releases the lock when the process ends, however it ends.
        """
        attempt = 1
        while self._file is None:
            self._writer = self._asked if attempt == 1 else f"{self._asked}+{attempt}"
            path = current_path(self._directory, self._writer)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if not _lock(file):
                attempt += 1
            elif _is_at(file, path):
                self._file = file
                self._size = _cut_unfinished_line(file)
                return
            # Otherwise it was sealed between opening and locking, and there is a new one by now.
            os.close(file)

    def _files(self) -> Files:
        current = current_path(self._directory, self._writer)
        return list_files(self._directory).get(self._writer, Files(current, ()))

    def _tidy(self) -> None:
        """Remove leftovers of an interrupted merge, and finish it."""
        files = self._files()
        for segment in files.covered:
            segment.path.unlink(missing_ok=True)
        for path in self._directory.glob(f".events-{self._writer}@*.tmp"):
            path.unlink(missing_ok=True)
        self._merge()

    def _seal(self) -> None:
        files = self._files()
        sealed = sealed_path(self._directory, self._writer, files.number, files.number)
        os.rename(files.current, sealed)
        # Not earlier: releasing the lock would free the name as well.
        self._release()
        self._open()
        self._merge()

    def _merge(self) -> None:
        while (pair := mergeable((files := self._files()).sealed)) is not None:
            older, newer = pair
            path = sealed_path(self._directory, self._writer, older.first, newer.last)
            assert path not in {segment.path for segment in files.sealed}
            merge(older, newer, path, rare=self._segment_bytes // _RARE)

    def _give_up(self, error: OSError) -> None:
        self._release()
        self._lines.clear()
        logger.warning(
            "events cannot be written to %s: %s; training continues without an event log",
            self._directory,
            error,
        )

    def _release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def _lock(file: int) -> bool:
    """Whether the lock was acquired; assumed to be on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Appended whole lines stay readable even then.
        return True
    return True


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _cut_unfinished_line(file: int) -> int:
    """Truncate the file after the last line break; returns the remaining size."""
    end = os.fstat(file).st_size
    position = end
    while position > 0:
        start = max(0, position - _BUFFER)
        found = os.pread(file, position - start, start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        os.ftruncate(file, position)
    return position
