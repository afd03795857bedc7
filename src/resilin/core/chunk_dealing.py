"""Dealing: processes that hold the same chunks write equal parts of them.

Under HSDP and tensor parallelism several processes hold the same chunks. They are laid out one
after the other, and each holder takes an equal range of the bytes. A range ends within a chunk
where it must, between two of its rows: no process has more than its part, however large one tensor
is. Every holder computes the same from shapes alone, without asking the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from resilin.core.mesh_spread import Numbers
from resilin.core.placement import Sizes

_ROWS = 16
"""Rows per holder that are enough to cut between them: parts then differ by a sixteenth at most."""


class Part(NamedTuple):
    """A part of a chunk: a range of one of its dimensions."""

    chunk: int
    """Number of the chunk."""
    dim: int
    """The dimension."""
    begin: int
    """First index."""
    end: int
    """Index after the last one."""


class Dealing:
    """The parts of some chunks that each of their holders takes.

    Args:
        sizes: Shape of each chunk; in the same order on all holders.
        itemsizes: Bytes per element of each.
        num: Number of holders.
    """

    def __init__(self, sizes: Sequence[Sizes], itemsizes: Sequence[int], num: int) -> None:
        self.num = num
        """Number of holders."""
        self._dims = [_dimension(each, num) for each in sizes]
        rows = [each[d] if each else 1 for each, d in zip(sizes, self._dims, strict=True)]
        num_bytes = [math.prod(s) * i for s, i in zip(sizes, itemsizes, strict=True)]
        self._rows: Numbers = np.array(rows, dtype=np.int64)
        # Of at least one byte: a chunk without elements has rows that weigh nothing.
        self._row_bytes: Numbers = np.array(num_bytes, dtype=np.int64) // np.maximum(self._rows, 1)
        self._ends: Numbers = np.cumsum(self._rows * self._row_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of all chunks."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def cuts(self, holders: Numbers) -> Numbers:
        """The rows of each chunk at which the parts of some holders begin.

        Args:
            holders: Their numbers; the number of holders stands for the end of the last one.

        Returns:
            A row of cuts per holder. They never decrease from one holder to the next.
        """
        wanted = holders[:, None] * self.num_bytes // self.num
        begins = self._ends - self._rows * self._row_bytes
        within = np.clip(wanted - begins, 0, self._rows * self._row_bytes)
        # To the nearest row. Rows without bytes are all in the part of the first holder.
        per_row = np.maximum(self._row_bytes, 1)
        cuts = np.where(self._row_bytes > 0, (within + per_row // 2) // per_row, self._rows)
        cuts[holders == 0] = 0
        cuts[holders == self.num] = self._rows
        return cuts

    def parts(self, holder: int) -> Iterator[Part]:
        """The parts that one holder takes; those that are empty are left out."""
        begins, ends = self.cuts(np.array([holder, holder + 1]))
        for chunk in np.flatnonzero(ends > begins).tolist():
            yield Part(chunk, self._dims[chunk], int(begins[chunk]), int(ends[chunk]))

    def loads(self) -> Numbers:
        """Bytes that each holder takes."""
        cuts = self.cuts(np.arange(self.num + 1))
        return np.diff(cuts, axis=0) @ self._row_bytes


def ranges_kept(holder: int, num: int, copies: int) -> Sizes:
    """Numbers of the ranges that a holder keeps, if each range is to be kept by several holders.

    The others are far from it among the holders: neighbours are often on the same host.

    Args:
        holder: Number of the holder.
        num: Number of holders.
        copies: Holders that keep each range; at most all of them do.
    """
    copies = min(copies, num)
    return tuple(sorted({(holder + each * num // copies) % num for each in range(copies)}))


def keepers(number: int, num: int, copies: int) -> Sizes:
    """The holders that keep a range: the reverse of `ranges_kept`.

    Args:
        number: Number of the range; the holder of the same number is one of them.
        num: Number of holders.
        copies: Holders that keep each range; at most all of them do.
    """
    copies = min(copies, num)
    return tuple(sorted({(number - each * num // copies) % num for each in range(copies)}))


def _dimension(sizes: Sizes, num: int) -> int:
    """The dimension along which a chunk is cut: the first that is long enough, or the longest.

    Data are contiguous along the first one.
    """
    for dim, length in enumerate(sizes):
        if length >= _ROWS * num:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim], default=0)
