"""Reading: each file by one replica, once, from its beginning to its end.

On that one way the checksum is made and the tensors are taken out. Then the replicas agree whether
all files were whole, and send each other what they have read.
"""

from __future__ import annotations

import errno
import io
import zlib
from collections.abc import Collection, Iterator
from typing import IO

import torch
from torch import Tensor

from resilin.training.state.checkpoint import archive
from resilin.training.state.checkpoint.commit import Commit, Entry
from resilin.training.state.checkpoint.errors import CheckpointError, CorruptCheckpoint
from resilin.training.state.checkpoint.peers import Peers
from resilin.training.state.checkpoint.storage import Storage
from resilin.training.state.placement import Piece, Wanted, deal
from resilin.training.state.shards import Assembly, Held

_BLOCK = 1 << 22
"""Bytes read at once where they are only summed up."""


def read(
    storage: Storage, commit: Commit, peers: Peers, wanted: Wanted | None = None
) -> dict[str, Held]:
    """Reads the tensors of a commit, on every process.

    All pieces pass through all processes, one file after the other; each keeps what it needs.

    Args:
        storage: Where the checkpoint is.
        commit: Which one it is.
        peers: Who reads it together.
        wanted: The pieces that this process needs of some tensors; it gets the others whole.

    Raises:
        CorruptCheckpoint: A file is not what it was; on all replicas or on none.
        CheckpointError: Storage or a replica failed.
    """
    readers = deal({name: its.size for name, its in commit.files.items()}, peers.num)
    mine: dict[Piece, Tensor] = {}

    def read_mine() -> str:
        for file in readers[peers.process]:
            mine.update(read_file(storage, commit, file))
        return commit.name

    names = peers.all(read_mine)
    if len(set(names)) > 1:
        raise CheckpointError(f"the replicas load different checkpoints: {', '.join(names)}")
    assembly = Assembly(wanted)
    for source, files in enumerate(readers):
        pieces = []
        for name, entry in _entries(commit, files):
            if source == peers.process:
                data = mine.pop((name, entry.placement))
            else:
                data = torch.empty(entry.sizes, dtype=entry.torch_dtype)
            pieces.append((name, entry.placement, data))
        peers.send([data for _, _, data in pieces], source)
        for piece in pieces:
            assembly.add(*piece)
    found = assembly.result()
    return {name: found[name] for name in commit.tensors}


def _entries(commit: Commit, files: Collection[str]) -> Iterator[tuple[str, Entry]]:
    """The pieces in some files, with the names of their tensors; in the order of the commit."""
    for name, pieces in commit.tensors.items():
        for entry in pieces:
            if entry.file in files:
                yield name, entry


def read_file(storage: Storage, commit: Commit, file: str) -> dict[Piece, Tensor]:
    """Reads the pieces in one file, and checks all of it.

    Raises:
        CorruptCheckpoint: It is missing, cut off or altered, or holds other tensors than it should.
    """
    where = f"{commit.path}/{file}"
    expected = commit.files[file]
    entries = sorted(_entries(commit, (file,)), key=lambda item: item[1].offset)
    tensors: dict[Piece, Tensor] = {}
    problem, crc32 = None, 0
    try:
        if (size := storage.size(commit.name, file)) != expected.size:
            raise CorruptCheckpoint(f"{where}: {expected.size} bytes expected, found {size}")
        with storage.open(commit.name, file) as stream:
            position = 0
            for name, entry in entries:
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
    except OSError as error:
        # A file that is gone, or a sector that cannot be read: no other try will bring it back.
        if error.errno in (errno.EIO, errno.ENOENT) or isinstance(error, FileNotFoundError):
            raise CorruptCheckpoint(
                f"{where}: {expected.size} bytes expected, found {type(error).__name__}: {error}"
            ) from error
        raise
    if crc32 != expected.crc32:
        raise CorruptCheckpoint(f"{where}: crc32 {expected.crc32:08x} expected, found {crc32:08x}")
    if problem is not None:
        raise CorruptCheckpoint(f"{where}: cannot be read: {problem}")
    return tensors


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
