"""Tensors of which a process holds pieces, beside those that every process holds whole.

A state may have a `Sharded` wherever it may have a tensor. Whole tensors are dealt out to all
processes to write; pieces are written by the processes that hold them, an equal part by each. An
`Assembly` puts tensors together from pieces, in the split that a process asks for, whatever the
split was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from resilin.core.chunk_dealing import Dealing, keepers, ranges_kept
from resilin.core.placement import Piece, Placement, Sizes, Wanted, deal, overlap


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One piece of a tensor."""

    placement: Placement
    """Its position in the tensor."""
    data: Tensor = field(repr=False)
    """Its elements."""

    def __post_init__(self) -> None:
        if tuple(self.data.shape) != self.placement.sizes:
            raise ValueError(
                f"a piece of sizes {self.placement.sizes} cannot have data of shape "
                f"{tuple(self.data.shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A tensor of which this process holds some pieces, or none."""

    shape: Sizes
    """Shape of the whole tensor, the same on all processes."""
    dtype: torch.dtype
    """Its type."""
    shards: tuple[Shard, ...]
    """The pieces that are here."""
    holders: Sizes = (0,)
    """Numbers of all processes that hold exactly these pieces, in the same order on all of them."""
    holder: int = 0
    """Place of this process among them."""
    origin: Tensor | None = field(default=None, repr=False)
    """The tensor of which these are the local part, if a framework has split it."""

    def __post_init__(self) -> None:
        for shard in self.shards:
            if (shard.placement.shape, shard.data.dtype) != (self.shape, self.dtype):
                raise ValueError(
                    f"a tensor of shape {self.shape} and type {self.dtype} cannot have a piece of "
                    f"shape {shard.placement.shape} and type {shard.data.dtype}"
                )

    @property
    def nbytes(self) -> int:
        """Size of the pieces that are here."""
        return sum(shard.data.nbytes for shard in self.shards)


Held: TypeAlias = Tensor | Sharded
"""The part of a tensor that a process holds."""


def shares(tensors: Mapping[str, Held], num: int) -> list[list[str]]:
    """Deals the whole tensors out to `num` processes, by size; every process computes the same."""
    return deal(
        {name: held.nbytes for name, held in tensors.items() if not isinstance(held, Sharded)}, num
    )


def whole_pieces(tensors: Mapping[str, Held], names: Iterable[str]) -> dict[Piece, Tensor]:
    """Whole tensors of these names, as pieces to write."""
    found: dict[Piece, Tensor] = {}
    for name in names:
        held = tensors[name]
        assert not isinstance(held, Sharded), f"{name} is split, and cannot be dealt out"
        found[name, None] = held
    return found


def all_whole(tensors: Mapping[str, Held]) -> dict[str, Tensor]:
    """These tensors, none of which may be split.

    Raises:
        ValueError: One is; the message says which.
    """
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is split over processes, and must be whole on each of them")
        found[name] = tensor
    return found


def split_shapes(tensors: Mapping[str, Held]) -> dict[str, Sizes]:
    """Shapes of the tensors that are split over the processes, by name; the same on all of them."""
    return {name: held.shape for name, held in tensors.items() if isinstance(held, Sharded)}


class Kept(NamedTuple):
    """A part of a tensor that a process writes."""

    piece: Piece
    """Its name and placement."""
    data: Tensor
    """Its elements."""
    keepers: Sizes
    """Processes that write the same part; empty if only this process has it."""
    is_first: bool
    """Whether this process is the one of them that speaks for the part."""


def own_pieces(tensors: Mapping[str, Held]) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces that this process writes, if each part is written by one of its holders."""
    return ((kept.piece, kept.data) for kept in kept_pieces(tensors))


def kept_pieces(tensors: Mapping[str, Held], copies: int = 1) -> Iterator[Kept]:
    """The pieces that this process writes: its part of those that it holds.

    Processes that hold the same pieces write equal parts of them. An empty tensor has nothing but
    empty pieces, and one of them says that it is there; other empty pieces are left out.

    Args:
        tensors: The tensors, by name; the same names on all processes.
        copies: Holders that are to write each part, if there are as many.
    """
    shared: dict[tuple[Sizes, int], list[tuple[str, Shard]]] = {}
    for name, held in tensors.items():
        if not isinstance(held, Sharded):
            continue
        for shard in held.shards:
            if shard.data.numel() and len(held.holders) > 1:
                shared.setdefault((held.holders, held.holder), []).append((name, shard))
            elif shard.data.numel() or (0 in held.shape and held.holder == 0):
                yield Kept((name, shard.placement), shard.data, (), True)
    for (holders, holder), chunks in shared.items():
        yield from _dealt(chunks, holders, holder, copies)


def _dealt(
    chunks: list[tuple[str, Shard]], holders: Sizes, holder: int, copies: int
) -> Iterator[Kept]:
    """The parts of chunks that one of their holders writes."""
    num = len(holders)
    chunks = sorted(chunks, key=lambda each: (each[0], each[1].placement.offsets))
    dealing = Dealing(
        [shard.placement.sizes for _, shard in chunks],
        [shard.data.element_size() for _, shard in chunks],
        num,
    )
    for number in ranges_kept(holder, num, copies):
        writers = tuple(holders[each] for each in keepers(number, num, copies))
        for chunk, dim, begin, end in dealing.parts(number):
            name, shard = chunks[chunk]
            data = shard.data.narrow(dim, begin, end - begin) if shard.data.dim() else shard.data
            piece = (name, shard.placement.part(dim, begin, end))
            yield Kept(piece, data, writers, number == holder)


class Assembly:
    """Puts tensors together from pieces, one after the other.

    Args:
        wanted: The pieces to make of some tensors, by name; the others are made whole.
    """

    def __init__(self, wanted: Wanted | None = None) -> None:
        self._wanted = wanted or {}
        self._whole: dict[str, Tensor] = {}
        self._split: dict[str, Sharded] = {}
        self._missing: dict[str, int] = {}

    def add(self, name: str, placement: Placement, data: Tensor) -> None:
        """Takes a piece of a tensor: copies what is wanted of it, or keeps it if it is the whole.

        Each element must be in one piece only.
        """
        if placement.is_whole and name not in self._wanted:
            self._whole[name] = data
            return
        for shard in self._targets(name, placement.shape, data.dtype).shards:
            common = overlap(placement, shard.placement)
            if common is not None:
                shard.data[common.target] = data[common.source]
                self._missing[name] -= common.num_elements

    def _targets(self, name: str, shape: Sizes, dtype: torch.dtype) -> Sharded:
        present = self._split.get(name)
        if present is None:
            placements = self._wanted.get(name, (Placement.whole(shape),))
            shards = tuple(Shard(each, torch.empty(each.sizes, dtype=dtype)) for each in placements)
            present = self._split[name] = Sharded(shape, dtype, shards)
            self._missing[name] = sum(each.num_elements for each in placements)
        return present

    def result(self) -> dict[str, Held]:
        """The tensors by name: whole ones, and those of which pieces were wanted.

        Raises:
            ValueError: Elements of a tensor were in none of the pieces.
        """
        for name, missing in self._missing.items():
            if missing:
                raise ValueError(f"{name} lacks {missing} of the elements that are needed here")
        found: dict[str, Held] = dict(self._whole)
        for name, held in self._split.items():
            found[name] = held if name in self._wanted else held.shards[0].data
        return found
