"""Placements: which part of a tensor a process holds, and which process writes what.

A tensor of a state is whole on every process, or split into rectangles that the processes hold
between them. Everything here is arithmetic on shapes: it decides who writes which piece, what the
pieces of one split have in common with those of another, and whether pieces add up to the whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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

    def part(self, dim: int, begin: int, end: int) -> Placement:
        """A range of one dimension of the rectangle. A number without dimensions is always whole.

        Args:
            dim: The dimension.
            begin: First index, within the rectangle.
            end: Index after the last one.
        """
        if not self.sizes:
            return self
        offset, after = self.offsets[dim] + begin, dim + 1
        return Placement(
            self.shape,
            (*self.offsets[:dim], offset, *self.offsets[after:]),
            (*self.sizes[:dim], end - begin, *self.sizes[after:]),
        )


Piece: TypeAlias = tuple[str, Placement | None]
"""The name of a tensor and a placement in it; None for the whole, which costs no record."""
Wanted: TypeAlias = Mapping[str, Sequence[Placement]]
"""Pieces that a process needs of split tensors, by name; other tensors are whole."""


class Stored(NamedTuple):
    """A tensor of a stored state."""

    shape: Sizes
    """Its shape."""
    split: bool
    """Whether it is stored in several pieces."""


Asked: TypeAlias = Wanted | Callable[[Mapping[str, Stored]], Wanted]
"""The same, or a function that returns it for the tensors of a stored state."""


def wanted_of(asked: Asked | None, stored: Mapping[str, Stored]) -> Wanted:
    """The pieces that a process needs of a stored state."""
    if asked is None:
        return {}
    return asked(stored) if callable(asked) else asked


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
