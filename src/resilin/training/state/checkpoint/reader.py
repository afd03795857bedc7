"""Reading: each piece by one replica, once, and from there to those that need a part of it.

Where pieces have checksums of their own, each replica reads about as much as it needs. Files of
which only the whole has one are read from the beginning to the end. Then the replicas agree whether
all was whole, and send each other what they have read: tensors that all need whole go to all, of
others each replica asks for its pieces.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resilin.core.chunk_reading import Pieces, readers
from resilin.core.placement import Piece, Wanted, deal
from resilin.training.state.checkpoint.commit import Commit
from resilin.training.state.checkpoint.errors import CheckpointError
from resilin.training.state.checkpoint.files import Located, read_entries, read_file
from resilin.training.state.checkpoint.peers import Peers
from resilin.training.state.checkpoint.storage import Storage
from resilin.training.state.exchange import Region, Want
from resilin.training.state.shards import Assembly, Held, Shard, Sharded


def read(
    storage: Storage, commit: Commit, peers: Peers, wanted: Wanted | None = None
) -> dict[str, Held]:
    """Reads the tensors of a commit, on every process.

    Args:
        storage: Where the checkpoint is.
        commit: Which one it is.
        peers: Who reads it together.
        wanted: The pieces that this process needs of some tensors; it gets the others whole. They
            are the same tensors on all processes.

    Raises:
        CorruptCheckpoint: A piece is not what it was; on all replicas or on none.
        CheckpointError: Storage or a replica failed.
        ValueError: What is wanted is no piece of a tensor of that shape.
    """
    targets: dict[str, Sharded] = {}

    def prepare() -> list[Any]:
        targets.update(_targets(commit, wanted or {}))
        needed = sum(held.nbytes for held in targets.values())
        return [commit.name, f"{zlib.crc32(repr(sorted(targets)).encode()):08x}", needed]

    told = peers.all(prepare)
    names, kinds, needs = ([each[i] for each in told] for i in range(3))
    if len(set(names)) > 1:
        raise CheckpointError(f"the replicas load different checkpoints: {', '.join(names)}")
    if len(set(kinds)) > 1:
        raise CheckpointError(
            f"the replicas need pieces of different tensors ({', '.join(kinds)}): these must be "
            "the same"
        )
    entries = [(name, entry) for name, pieces in commit.tensors.items() for entry in pieces]
    # By writer: where the split is the same as before, each process reads what it has written.
    entries.sort(key=lambda item: (_number(item[1].file), item[1].offset))
    sources = _sources(commit, entries, needs, targets)
    mine: dict[Piece, Tensor] = {}
    peers.all(lambda: mine.update(_read_mine(storage, commit, entries, sources, peers)))
    found = _broadcast(entries, sources, mine, peers, targets)
    _fetch(entries, sources, mine, peers, targets)
    return {name: targets[name] if name in targets else found[name] for name in commit.tensors}


def _targets(commit: Commit, wanted: Wanted) -> dict[str, Sharded]:
    """Memory for the pieces that are wanted."""
    made = {}
    for name in wanted.keys() & commit.tensors.keys():
        first = commit.tensors[name][0]
        shape, dtype = first.placement.shape, first.torch_dtype
        shards = tuple(Shard(each, torch.empty(each.sizes, dtype=dtype)) for each in wanted[name])
        made[name] = Sharded(shape, dtype, shards)
    return made


def _number(file: str) -> int:
    """The number of the process that wrote a file."""
    found = re.search(r"\d+", file)
    return int(found[0]) if found else -1


def _files(commit: Commit, num: int) -> list[list[str]] | None:
    """The files that each process reads from beginning to end; None if it reads single pieces."""
    pieces = (entry for pieces in commit.tensors.values() for entry in pieces)
    if all(entry.crc32 is not None for entry in pieces):
        return None
    return deal({name: its.size for name, its in commit.files.items()}, num)


def _sources(
    commit: Commit, entries: Sequence[Located], needs: Sequence[int], targets: Mapping[str, Sharded]
) -> list[int]:
    """The process that reads each piece; the same on all of them."""
    dealt = _files(commit, len(needs))
    if dealt is not None:
        by_file = {file: process for process, files in enumerate(dealt) for file in files}
        return [by_file[entry.file] for _, entry in entries]
    # What all need whole is read in equal parts.
    common = sum(entry.length for name, entry in entries if name not in targets)
    share = -(-common // len(needs))
    return readers([entry.length for _, entry in entries], [need + share for need in needs])


def _read_mine(
    storage: Storage, commit: Commit, entries: Sequence[Located], sources: Sequence[int], me: Peers
) -> dict[Piece, Tensor]:
    """The pieces that this process reads."""
    found: dict[Piece, Tensor] = {}
    dealt = _files(commit, me.num)
    if dealt is not None:
        for file in dealt[me.process]:
            found.update(read_file(storage, commit, file))
        return found
    by_file: dict[str, list[Located]] = {}
    for source, (name, entry) in zip(sources, entries, strict=True):
        if source == me.process:
            by_file.setdefault(entry.file, []).append((name, entry))
    for file, its in by_file.items():
        found.update(read_entries(storage, commit, file, its))
    return found


def _broadcast(
    entries: Sequence[Located],
    sources: Sequence[int],
    mine: dict[Piece, Tensor],
    peers: Peers,
    targets: Mapping[str, Sharded],
) -> dict[str, Held]:
    """The tensors that all processes need whole, sent to all of them by those that read them."""
    assembly = Assembly()
    by_source: dict[int, list[Located]] = {}
    for source, (name, entry) in zip(sources, entries, strict=True):
        if name not in targets:
            by_source.setdefault(source, []).append((name, entry))
    for source, its in sorted(by_source.items()):
        pieces = []
        for name, entry in its:
            if source == peers.process:
                data = mine.pop((name, entry.placement))
            else:
                data = torch.empty(entry.sizes, dtype=entry.torch_dtype)
            pieces.append((name, entry.placement, data))
        peers.send([data for _, _, data in pieces], source)
        for piece in pieces:
            assembly.add(*piece)
    return assembly.result()


def _fetch(
    entries: Sequence[Located],
    sources: Sequence[int],
    mine: Mapping[Piece, Tensor],
    peers: Peers,
    targets: Mapping[str, Sharded],
) -> None:
    """Fills in the pieces that this process needs, from those that have read parts of them."""
    numbers: dict[str, list[int]] = {name: [] for name in targets}
    for number, (name, _) in enumerate(entries):
        if name in numbers:
            numbers[name].append(number)
    wants = []
    for name, held in targets.items():
        pieces = Pieces([entries[number][1].placement for number in numbers[name]])
        for shard in held.shards:
            for index, common in pieces.overlapping(shard.placement):
                number = numbers[name][index]
                target = shard.data[common.target]
                wants.append(Want(sources[number], number, common.source, target))

    def provide(asked: Sequence[tuple[int, Region]]) -> list[Tensor]:
        found = []
        for number, region in asked:
            name, entry = entries[number]
            found.append(mine[name, entry.placement][region])
        return found

    if targets:
        peers.fetch(wants, provide)
