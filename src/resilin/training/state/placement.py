"""Placements: which part of a tensor a process holds, and which process writes what.

A tensor of a state is whole on every process, or split into rectangles that the processes hold
between them. Everything here is arithmetic on shapes: it decides who writes which piece, what the
pieces of one split have in common with those of another, and whether pieces add up to the whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Sizes: TypeAlias = tuple[int, ...]
"""A number per dimension."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rectangle of a tensor."""

    shape: Sizes
    """Shape of the whole tensor."""
    offsets: Sizes
    """Start of the rectangle, per dimension."""
    sizes: Sizes
    """Its own shape."""

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(
                f"shape {self.shape}, offsets {self.offsets} and sizes {self.sizes} must have as "
                "many dimensions"
            )
        for offset, size, length in zip(self.offsets, self.sizes, self.shape, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise ValueError(
                    f"offsets {self.offsets} with sizes {self.sizes} must be within the shape "
                    f"{self.shape}"
                )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        """The placement of a tensor that is not split."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.shape

    @property
    def num_elements(self) -> int:
        """Elements in the rectangle."""
        return math.prod(self.sizes)


Piece: TypeAlias = tuple[str, Placement | None]
"""The name of a tensor and a placement in it; None for the whole, which costs no record."""
Wanted: TypeAlias = Mapping[str, Sequence[Placement]]
"""Pieces that a process needs of split tensors, by name; other tensors are whole."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor that is split over the processes, and the pieces of it that are in one place."""

    shape: Sizes
    """Shape of the whole tensor."""
    held: tuple[Placement, ...]
    """The pieces."""

    def to_json(self) -> list[Any]:
        """The record as JSON."""
        return [self.shape, [[each.offsets, each.sizes] for each in self.held]]

    @classmethod
    def from_json(cls, state: Sequence[Any]) -> Split:
        """The reverse of `to_json`."""
        shape, held = tuple(state[0]), state[1]
        return cls(shape, tuple(Placement(shape, tuple(o), tuple(s)) for o, s in held))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The region that two placements of one tensor have in common."""

    source: tuple[slice, ...]
    """Its place in the first."""
    target: tuple[slice, ...]
    """Its place in the second."""
    num_elements: int
    """Its size."""


def overlap(source: Placement, target: Placement) -> Overlap | None:
    """The region that two placements of one tensor have in common; None if there is none.

    Raises:
        ValueError: They are placements of tensors of different shapes.
    """
    if source.shape != target.shape:
        raise ValueError(f"a piece of {source.shape} cannot be a piece of {target.shape}")
    there, here, count = [], [], 1
    for a, a_size, b, b_size in zip(
        source.offsets, source.sizes, target.offsets, target.sizes, strict=True
    ):
        begin, end = max(a, b), min(a + a_size, b + b_size)
        if end <= begin:
            return None
        there.append(slice(begin - a, end - a))
        here.append(slice(begin - b, end - b))
        count *= end - begin
    return Overlap(tuple(there), tuple(here), count)


def uncovered(held: Iterable[Placement], wanted: Placement) -> int:
    """Elements of a placement that none of the others has.

    Args:
        held: Placements that are pairwise disjoint or equal.
        wanted: The placement that they are to fill.
    """
    found = (overlap(each, wanted) for each in set(held))
    return wanted.num_elements - sum(each.num_elements for each in found if each is not None)


def is_covered(places: Iterable[Mapping[str, Split]]) -> bool:
    """Whether the pieces of several places add up to the whole of every split tensor.

    Args:
        places: The split tensors of each place, by name. All of them know all names, or none.
    """
    shapes: dict[str, Sizes] = {}
    held: dict[str, set[Placement]] = {}
    for place in places:
        for name, split in place.items():
            shapes[name] = split.shape
            held.setdefault(name, set()).update(split.held)
    return not any(uncovered(held[name], Placement.whole(shape)) for name, shape in shapes.items())


def check_split(name: str, shape: Sizes, pieces: Sequence[Placement]) -> None:
    """Checks that pieces are those of one tensor: each of its elements is in exactly one.

    Raises:
        ValueError: Two of them overlap, some elements are in none, or one has another shape.
    """
    if len(pieces) == 1 and pieces[0].is_whole and pieces[0].shape == shape:
        return
    for piece in pieces:
        if piece.shape != shape:
            raise ValueError(f"{name} has the shape {shape}, and a piece of {piece.shape}")
    # Along the first dimension only neighbours can overlap: near linear for many pieces.
    filled = [piece for piece in pieces if piece.num_elements]
    open_pieces: list[Placement] = []
    for piece in sorted(filled, key=lambda each: each.offsets):
        begin = piece.offsets[:1]
        open_pieces = [
            each for each in open_pieces if not begin or each.offsets[0] + each.sizes[0] > begin[0]
        ]
        for each in open_pieces:
            if overlap(each, piece) is not None:
                raise ValueError(
                    f"{name} has two pieces for the same elements: at {each.offsets} of sizes "
                    f"{each.sizes}, and at {piece.offsets} of sizes {piece.sizes}"
                )
        open_pieces.append(piece)
    found, total = sum(piece.num_elements for piece in filled), math.prod(shape)
    if found != total or not pieces:
        raise ValueError(f"{name} has {total} elements, and its pieces have {found} of them")


def deal(sizes: Mapping[str, int], num: int) -> list[list[str]]:
    """Deals what all processes hold out to `num` of them, by size; all compute the same.

    The largest goes first, to whoever has the least so far. What a process holds alone is not
    dealt out: only its holder can write it.
    """
    dealt: list[list[str]] = [[] for _ in range(num)]
    loads = [(0, owner) for owner in range(num)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], owner))
        dealt[owner].append(name)
    return dealt
