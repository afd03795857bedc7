"""One file of a memory copy: a header, tensors, and the rest as JSON after them.

The file is mapped into memory and written in place. Its header says last of all that it is
complete, and is the first thing to change when it is written again: whoever dies in between leaves
a file that nobody takes for a copy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from resilin.core.placement import Piece, Placement
from resilin.core.recovery import CopyFile
from resilin.engine.processes import process_gone, process_start
from resilin.training.state.snapshot import Version
from resilin.training.state.stage import Block, Bytes, Layout

_T = TypeVar("_T")

FORMAT = 3
"""Version of the files. Others are passed over: their job runs another resilin."""
SHARE = 0.5
"""Part of the memory's file system that copies may take: data loaders live there, too."""
_HEADER = struct.Struct("<8sQqqqQQI")
_MAGIC = b"resilin\n"
DATA = 4096
"""Place of the first tensor."""
_NAME = re.compile(r"(\d+)-\d+-\d+-\d+-[01]")


class Writer(NamedTuple):
    """The process that wrote a file."""

    pid: int
    """Its number."""
    started: str | None
    """When it began, in the kernel's words: numbers are used again."""

    @classmethod
    def here(cls) -> Writer:
        """This process."""
        return cls(os.getpid(), process_start(os.getpid()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(CopyFile):
    """One complete file."""

    path: Path
    """Its path."""
    meta: dict[str, Any]
    """Its JSON."""

    def placements(self) -> Iterator[tuple[Piece, torch.dtype]]:
        """The pieces in it, with their types."""
        for name, dtype, _, _, *where in self.meta["tensors"]:
            yield (name, _placement(*where) if where else None), getattr(torch, dtype)


def _placement(shape: list[int], offsets: list[int], sizes: list[int]) -> Placement:
    return Placement(tuple(shape), tuple(offsets), tuple(sizes))


def file_name(generation: int, host: int, process: int, share: int, turn: int) -> str:
    """Name of the file that a process of a host writes a share to, in turns."""
    return f"{generation}-{host}-{process}-{share}-{turn}"


def generation_of(name: str) -> int | None:
    """The generation whose process wrote a file of this name; None if it is none of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


class FileWriter:
    """Writes one file, again and again.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None
        self._layout: Layout | None = None
        self._end = DATA

    def write(self, version: Version, block: Block | Bytes, meta: str) -> None:
        """Copies tensors and JSON into the file; complete when it returns.

        Args:
            version: Version of the state.
            block: The tensors.
            meta: The rest, as the text of a JSON object that is not empty.

        Raises:
            OSError: There is no room for it.
            RuntimeError: A process of another job writes to the same file.
        """
        layout = block.layout
        text = f'{meta[:-1]},"format":{FORMAT},"tensors":{layout.text}}}'.encode()
        memory = self._memory
        if memory is None or layout is not self._layout or self._end + len(text) > len(memory):
            self._end = DATA + layout.num_bytes
            memory = self._open(self._end + max(2**16, 2 * len(text)))
            self._layout = layout
        head = (version.generation, version.step, version.epoch, self._end, len(text))
        # Incomplete from here on, whatever happens.
        _HEADER.pack_into(memory, 0, _MAGIC, 0, *head, 0)
        if layout.num_bytes:
            # Without the interpreter's lock, and on one core: others train meanwhile.
            target = torch.frombuffer(
                memory, dtype=torch.uint8, count=layout.num_bytes, offset=DATA
            )
            memmove(target.data_ptr(), block.data.data_ptr(), layout.num_bytes)
        memory[self._end : self._end + len(text)] = text
        _HEADER.pack_into(memory, 0, _MAGIC, 1, *head, zlib.crc32(text))

    def _open(self, size: int) -> mmap.mmap:
        self.close()
        # A new file: readers of the old one keep what they have, and disk full shows here and not
        # as a bus error when the memory is touched.
        present = read_meta(self.path)
        if present is not None:
            writer = Writer(*present.meta["writer"])
            if writer.pid != os.getpid() and not process_gone(*writer):
                raise RuntimeError(in_use(self.path.parent, writer))
        self.path.unlink(missing_ok=True)
        taken = _taken(self.path.parent)
        total = capacity(self.path.parent)
        if taken + size > SHARE * total:
            raise OSError(
                errno.ENOSPC,
                f"copies of {taken + size} bytes would take more than half of its {total} bytes, "
                "which data loaders and others need as well",
            )
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
            return self._memory
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets go of the file; it stays."""
        # The memory is unmapped when the last view of it goes.
        self._memory = None


def in_use(directory: Path, writer: Writer) -> str:
    """Error message for a directory that another job's process already uses."""
    return (
        f"process {writer.pid} of another job is alive and keeps its state in {directory}, where "
        f"this job (process {os.getpid()}) is to keep its own: two jobs cannot have one id. Start "
        "this one with another --rdzv-id or --memory-dir, or stop the other one"
    )


def _taken(directory: Path) -> int:
    """Bytes in the files of a directory, some of which may be removed meanwhile."""
    total = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def capacity(directory: Path) -> int:
    """Bytes that the file system of a directory has."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def _view(memory: Any, dtype: torch.dtype, shape: Any, offset: int) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def read_meta(path: Path) -> Found | None:
    """The header and the JSON of a file, if it is complete."""
    if _NAME.fullmatch(path.name) is None:
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return None
            magic, complete, generation, step, epoch, end, size, crc = _HEADER.unpack(head)
            if magic != _MAGIC or not complete:
                return None
            if end + size > os.fstat(file.fileno()).st_size:
                return None
            file.seek(end)
            text = file.read(size)
    except FileNotFoundError:
        return None  # Removed by its writer, who is alive then.
    if len(text) != size or zlib.crc32(text) != crc:
        return None
    meta = json.loads(text)
    if meta["format"] != FORMAT:
        return None
    return Found(
        path=path,
        version=Version(generation, step, epoch, meta["branch"]),
        host=meta["host"],
        share=meta["share"],
        num_shares=meta["num_shares"],
        meta=meta,
    )


def read_unchanged(file: Found, read: Callable[[], _T]) -> _T:
    """The result of reading a file that its writer may change meanwhile.

    Args:
        file: The file, as it was found.
        read: Reads from it.

    Raises:
        LookupError: It did.
    """
    try:
        found = read()
    except (OSError, ValueError) as error:
        raise LookupError(f"{file.path} changed while it was read: {error}") from error
    again = read_meta(file.path)
    if again is None or again.version != file.version:
        raise LookupError(f"{file.path} was overwritten while it was read")
    return found


def read_pieces(file: Found, wanted: Callable[[Piece], bool]) -> dict[Piece, Tensor]:
    """Copies of some pieces of a file, on the CPU.

    Args:
        file: The file.
        wanted: Tells whether to read a piece.

    Raises:
        OSError: The file is gone.
        ValueError: It is not what its JSON says.
    """
    with file.path.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    rows = zip(file.placements(), file.meta["tensors"], strict=True)
    return {
        piece: _view(memory, dtype, row[2], row[3]).clone()
        for (piece, dtype), row in rows
        if wanted(piece)
    }


def read_regions(file: Found, asked: Sequence[tuple[int, tuple[slice, ...]]]) -> list[Tensor]:
    """Copies of regions of some tensors of a file, on the CPU; the rest is not touched.

    Args:
        file: The file.
        asked: The row of each tensor in the JSON of the file, and the region.

    Raises:
        OSError: The file is gone.
        ValueError: It is not what its JSON says.
    """
    with file.path.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    found = []
    for row, region in asked:
        _, dtype, shape, offset, *_ = file.meta["tensors"][row]
        found.append(_view(memory, getattr(torch, dtype), shape, offset)[region].clone())
    return found
