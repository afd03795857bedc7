"""Tensors of which a process holds pieces, beside those that every process holds whole.

A state may have a `Sharded` wherever it may have a tensor. Whole tensors are dealt out to all
processes to write; pieces are written by the process that holds them. An `Assembly` puts tensors
together from pieces, in the split that a process asks for, whatever the split was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from resilin.training.state.placement import Piece, Placement, Sizes, Wanted, deal, overlap


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


def own_pieces(tensors: Mapping[str, Held]) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces that this process holds, and therefore writes. Empty ones only of empty tensors.

    An empty tensor has nothing but empty pieces, and one of them says that it is there.
    """
    for name, held in tensors.items():
        if isinstance(held, Sharded):
            for shard in held.shards:
                if shard.data.numel() or 0 in held.shape:
                    yield (name, shard.placement), shard.data


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
