"""Files of a checkpoint: all pieces of one, or some of them, checked before they are used."""

from __future__ import annotations

import errno
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TypeAlias

import torch
from torch import Tensor

from resilin.core.placement import Piece
from resilin.training.state.checkpoint import archive
from resilin.training.state.checkpoint.commit import Commit, Entry
from resilin.training.state.checkpoint.errors import CorruptCheckpoint
from resilin.training.state.checkpoint.storage import Storage

_BLOCK = 1 << 22
"""Bytes read at once where they are only summed up."""

Located: TypeAlias = tuple[str, Entry]
"""The name of a tensor, and the location of one of its pieces."""


def read_file(storage: Storage, commit: Commit, file: str) -> dict[Piece, Tensor]:
    """Reads the pieces in one file, and checks all of it.

    Raises:
        CorruptCheckpoint: It is missing, cut off or altered, or holds other tensors than it should.
    """
    expected = commit.files[file]
    entries = [
        (name, entry)
        for name, pieces in commit.tensors.items()
        for entry in pieces
        if entry.file == file
    ]
    tensors: dict[Piece, Tensor] = {}
    problem, crc32 = None, 0
    with _opened(storage, commit, file) as stream:
        position = 0
        for name, entry in sorted(entries, key=lambda item: item[1].offset):
            crc32 = _sum_up(stream, entry.offset - position, crc32)
            data = stream.read(entry.length)
            crc32 = zlib.crc32(data, crc32)
            position = entry.offset + entry.length
            try:
                tensors[name, entry.placement] = _tensor(data, entry)
            except Exception as error:
                # The checksum tells more, if it does not match either.
                problem = problem or f"{name}: {type(error).__name__}: {error}"
        crc32 = _sum_up(stream, expected.size - position, crc32)
    where = f"{commit.path}/{file}"
    if crc32 != expected.crc32:
        raise CorruptCheckpoint(f"{where}: crc32 {expected.crc32:08x} expected, found {crc32:08x}")
    if problem is not None:
        raise CorruptCheckpoint(f"{where}: cannot be read: {problem}")
    return tensors


def read_entries(
    storage: Storage, commit: Commit, file: str, entries: Sequence[Located]
) -> dict[Piece, Tensor]:
    """Reads some pieces of one file, and checks these.

    Raises:
        CorruptCheckpoint: The file is missing or cut off, or one of the pieces is altered.
    """
    tensors: dict[Piece, Tensor] = {}
    where = f"{commit.path}/{file}"
    with _opened(storage, commit, file) as stream:
        for name, entry in entries:
            stream.seek(entry.offset)
            data = stream.read(entry.length)
            crc32 = zlib.crc32(data)
            if crc32 != entry.crc32:
                raise CorruptCheckpoint(
                    f"{where}: {name} at byte {entry.offset}: crc32 {entry.crc32:08x} expected, "
                    f"found {crc32:08x}"
                )
            try:
                tensors[name, entry.placement] = _tensor(data, entry)
            except Exception as error:
                raise CorruptCheckpoint(
                    f"{where}: cannot be read: {name}: {type(error).__name__}: {error}"
                ) from error
    return tensors


@contextmanager
def _opened(storage: Storage, commit: Commit, file: str) -> Iterator[IO[bytes]]:
    """A file of a checkpoint, of the right size."""
    where, expected = f"{commit.path}/{file}", commit.files[file].size
    try:
        if (size := storage.size(commit.name, file)) != expected:
            raise CorruptCheckpoint(f"{where}: {expected} bytes expected, found {size}")
        with storage.open(commit.name, file) as stream:
            yield stream
    except OSError as error:
        # A file that is gone, or a sector that cannot be read: no other try will bring it back.
        if error.errno in (errno.EIO, errno.ENOENT) or isinstance(error, FileNotFoundError):
            raise CorruptCheckpoint(
                f"{where}: {expected} bytes expected, found {type(error).__name__}: {error}"
            ) from error
        raise


def _sum_up(stream: IO[bytes], num_bytes: int, crc32: int) -> int:
    while num_bytes > 0 and (data := stream.read(min(num_bytes, _BLOCK))):
        crc32 = zlib.crc32(data, crc32)
        num_bytes -= len(data)
    return crc32


def _tensor(data: bytes, entry: Entry) -> Tensor:
    archive.check(data, entry.num_bytes)
    tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if type(tensor) is not Tensor:
        raise ValueError(f"a tensor expected, found a {type(tensor).__qualname__}")
    if (tensor.layout, tensor.device.type) != (torch.strided, "cpu"):
        raise ValueError(
            f"{torch.strided} on cpu expected, found {tensor.layout} on {tensor.device.type}"
        )
    if (tensor.dtype, tuple(tensor.shape)) != (entry.torch_dtype, entry.sizes):
        raise ValueError(
            f"{entry.torch_dtype} of {entry.sizes} expected, found {tensor.dtype} of "
            f"{tuple(tensor.shape)}"
        )
    # torch takes the size of the storage from the pickle: more than the record would be the memory
    # next to it.
    if (found := tensor.untyped_storage().nbytes()) != entry.num_bytes:
        raise ValueError(f"a storage of {entry.num_bytes} bytes expected, found {found}")
    return tensor.detach().contiguous()
