"""Chunk tables: which pieces of tensors a process can read, told to others in few bytes.

A thousand processes with a thousand tensors have a million pieces. But the tensors of a model have
few shapes, and those of one shape are split alike: a run is a placement and the names of all
tensors that have a piece there. The same lists of names come up on all processes, so a run has a
digest of its list, and each list is told once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from resilin.core.placement import Placement, Sizes


class Chunk(NamedTuple):
    """A piece of a tensor."""

    name: str
    """Name of the tensor."""
    placement: Placement
    """Its place in the tensor."""
    kind: str
    """Name of its type."""


class Run(NamedTuple):
    """Pieces of several tensors with the same placement."""

    placement: Placement
    """Place of each of them."""
    kind: str
    """Name of their type."""
    names: tuple[str, ...]
    """Names of the tensors."""
    first: int
    """Number of the first piece; the others follow."""


def order(chunk: Chunk) -> tuple[Sizes, str, Sizes, Sizes, str]:
    """The key by which pieces are sorted: those of a run come one after the other."""
    where = chunk.placement
    return where.shape, chunk.kind, where.offsets, where.sizes, chunk.name


def runs(chunks: Sequence[Chunk]) -> list[Run]:
    """The runs of some pieces.

    Args:
        chunks: The pieces, sorted by `order`.
    """
    found: list[Run] = []
    first = 0
    for _, group in groupby(chunks, key=lambda each: order(each)[:-1]):
        its = list(group)
        names = tuple(each.name for each in its)
        found.append(Run(its[0].placement, its[0].kind, names, first))
        first += len(its)
    return found


class Summary:
    """The runs and the shapes of one process, as it tells them to others.

    Args:
        found: The runs.
        shapes: Shapes of all tensors, also of those without a piece here.
    """

    def __init__(self, found: Sequence[Run], shapes: Mapping[str, Sizes]) -> None:
        self._lists: dict[str, Any] = {}
        whole = self._digest({name: shapes[name] for name in sorted(shapes)})
        rows = [
            [self._digest(run.names), run.kind, *_place(run.placement), run.first] for run in found
        ]
        self.rows = [whole, rows]
        """JSON that each process tells."""

    def lists(self, process: int, everyone: Sequence[Any]) -> dict[str, Any]:
        """Lists that a process tells after that: those of which it is the first to have the digest.

        Args:
            process: Number of this process.
            everyone: The rows of all processes.
        """
        earlier = {each for rows in everyone[:process] for each in _digests(rows)}
        return {each: its for each, its in self._lists.items() if each not in earlier}

    def _digest(self, value: Any) -> str:
        digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
        self._lists[digest] = value
        return digest


def _digests(rows: Any) -> Iterator[str]:
    whole, found = rows
    yield whole
    for row in found:
        yield row[0]


def _place(placement: Placement) -> tuple[Sizes, Sizes, Sizes]:
    return placement.shape, placement.offsets, placement.sizes


def shapes_told(everyone: Sequence[Any], lists: Mapping[str, Any]) -> dict[str, Sizes]:
    """The shapes of all tensors.

    Args:
        everyone: The rows of all processes.
        lists: The lists of all processes.
    """
    wholes = dict.fromkeys(rows[0] for rows in everyone)
    return {name: tuple(shape) for whole in wholes for name, shape in lists[whole].items()}


def runs_told(rows: Any, lists: Mapping[str, Any]) -> list[Run]:
    """The runs of one process.

    Args:
        rows: Its rows.
        lists: The lists of all processes.
    """
    return [
        Run(
            Placement(tuple(shape), tuple(offsets), tuple(sizes)), kind, tuple(lists[digest]), first
        )
        for digest, kind, shape, offsets, sizes, first in rows[1]
    ]
