"""The sums of a replica in the memory of its host, for those that outlive it.

An Accumulator has a part on each replica, and the part of one that dies would die with it. So each
member of a live job writes its sums to files in memory, and the survivors on its host take them
over: as they were before each step, and as they are whenever they change. Which one counts depends
on whether the step that it died in was committed. Those before a step take turns: a member may be a
step ahead of the survivors when it dies, and they make that step again.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from resilin.training.state.snapshot import Json

logger = logging.getLogger("resilin")

_HEAD = struct.Struct("<8sqqI")
_MAGIC = b"sums 1\n\0"
_BODY = 2


class SumsFile:
    """Writes the sums of this replica.

    Args:
        directory: A directory in the memory of the host; None writes nothing.
        member: Name of the replica.
    """

    def __init__(self, directory: Path | None, member: str) -> None:
        self._files: list[int] = []
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._files = [os.open(path, flags, 0o600) for path in _paths(directory, member)]
        except OSError as error:
            logger.warning("sums of this replica are not kept for others: %s", error)

    def step_begins(self, steps: int, sums: Callable[[], dict[str, Json]]) -> None:
        """Writes the sums as they are after so many committed steps, when the next one begins."""
        self._write(steps % 2, steps, sums)

    def changed(self, steps: int, sums: Callable[[], dict[str, Json]]) -> None:
        """Writes the sums as they are now, for the case that this step is committed.

        Args:
            steps: Committed steps, with the one whose body is being run.
            sums: Returns them.
        """
        self._write(_BODY, steps, sums)

    def _write(self, turn: int, steps: int, sums: Callable[[], dict[str, Json]]) -> None:
        if not self._files:
            return
        text = json.dumps(sums()).encode()
        data = _HEAD.pack(_MAGIC, steps, len(text), zlib.crc32(text)) + text
        # The length is in it: what an earlier, longer one leaves behind is not read.
        os.pwrite(self._files[turn], data, 0)

    def close(self) -> None:
        """Closes the files; they stay for others."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)


def read(directory: Path, member: str, steps: int) -> dict[str, Json] | None:
    """The sums of a replica after so many committed steps; None if they are not on this host."""
    paths = _paths(directory, member)
    found = _read(paths[steps % 2], steps)
    return _read(paths[_BODY], steps) if found is None else found


def _read(path: Path, steps: int) -> dict[str, Json] | None:
    try:
        data = path.read_bytes()
        magic, at, length, checksum = _HEAD.unpack_from(data)
    except (OSError, struct.error):
        return None
    text = data[_HEAD.size : _HEAD.size + length]
    if (magic, at) != (_MAGIC, steps) or zlib.crc32(text) != checksum:
        return None
    found: dict[str, Json] = json.loads(text)
    return found


def forget(directory: Path, member: str) -> None:
    """Removes the files of a replica that is gone."""
    for path in _paths(directory, member):
        path.unlink(missing_ok=True)


def _paths(directory: Path, member: str) -> list[Path]:
    return [directory / f"sums-{member}-{turn}" for turn in (0, 1, _BODY)]
