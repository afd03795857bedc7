"""Reading: who reads which piece of a stored state, and what of it each process needs.

Every piece is read once, by one process, and goes from there to those that need a part of it. Who
reads what follows from the sizes of the pieces alone, so every process knows whom to ask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from resilin.core.mesh_spread import Numbers
from resilin.core.placement import Overlap, Placement, Sizes, overlap

_FEW = 16
"""Pieces that are looked at one by one: fewer are not worth an array."""


def readers(num_bytes: Sequence[int], needs: Sequence[int]) -> list[int]:
    """The process that reads each piece: ranges of all bytes, as long as what each process needs.

    Args:
        num_bytes: Size of each piece, in the order of their writers: where a state is split alike
            before and after, most pieces are then read by a process that needs them.
        needs: Bytes that each process needs.
    """
    sizes = np.array(num_bytes, dtype=np.int64)
    ends = np.cumsum(sizes)
    total, needed = int(ends[-1]) if len(ends) else 0, sum(needs)
    if not needed:
        return [0] * len(sizes)
    # By the middle of each piece: no process reads more than its range and one piece.
    bounds = [2 * total * each // needed for each in itertools.accumulate(needs)]
    found = np.searchsorted(np.array(bounds, dtype=np.int64), 2 * ends - sizes, side="right")
    last = max(process for process, need in enumerate(needs) if need)
    reading: list[int] = np.minimum(found, last).tolist()
    return reading


def spare(loads: Sequence[int], extra: int) -> list[int]:
    """The part of an extra load that each process takes, so that nobody has more than it must.

    Args:
        loads: Bytes that each of them reads in any case.
        extra: Bytes to read besides, by any of them.
    """
    sums = enumerate(itertools.accumulate(sorted(loads)), 1)
    # As water fills a vessel: up to the level at which the lowest ones have taken it all.
    level = min((-(-(below + extra) // num) for num, below in sums), default=0)
    return [max(0, level - load) for load in loads]


class Pieces:
    """Pieces of one tensor, among which those that overlap with another one are found.

    Args:
        placements: The pieces; all of a tensor of the same shape.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._placements = placements
        self._begins: Numbers | None = None
        self._ends: Numbers | None = None
        if len(placements) > _FEW:
            self._begins = _table([each.offsets for each in placements])
            self._ends = self._begins + _table([each.sizes for each in placements])

    def overlapping(self, wanted: Placement) -> Iterator[tuple[int, Overlap]]:
        """Numbers of the pieces that have elements of a placement, each with what it has.

        Raises:
            ValueError: The placement is one of a tensor of another shape.
        """
        for number in self._candidates(wanted):
            found = overlap(self._placements[number], wanted)
            if found is not None:
                yield number, found

    def _candidates(self, wanted: Placement) -> Sequence[int]:
        if self._begins is None or self._ends is None or len(wanted.shape) == 0:
            return range(len(self._placements))
        if wanted.shape != (shape := self._placements[0].shape):
            raise ValueError(f"a piece of {shape} cannot be a piece of {wanted.shape}")
        begin = np.array(wanted.offsets)
        end = begin + np.array(wanted.sizes)
        found = ((self._begins < end) & (self._ends > begin)).all(axis=1)
        numbers: list[int] = np.flatnonzero(found).tolist()
        return numbers


def _table(rows: Sequence[Sizes]) -> Numbers:
    return np.array(rows, dtype=np.int64).reshape(len(rows), -1)
