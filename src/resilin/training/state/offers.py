"""Offers: the pieces of a state that each process can read, and what others get of them.

The processes of a host can all read the copies in its memory. Each lists a part of them, so that
every piece is listed once per host. A state is complete if the pieces of all hosts together are
the whole of every tensor. A process then reads what it needs on its own host where it can, and
asks processes of other hosts for the rest: those that have the least to read for themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from resilin.core.chunk_reading import Pieces, readers, spare
from resilin.core.chunk_table import Chunk, Summary, order, runs, runs_told, shapes_told
from resilin.core.placement import Placement, Sizes, Stored, Wanted, check_split
from resilin.engine.base import Engine
from resilin.engine.collectives import Json
from resilin.training.state.exchange import Provider, Region, Swaps, Want, cut
from resilin.training.state.shards import Held, Shard, Sharded
from resilin.training.state.snapshot import Snapshot

_PARTS = 16
"""Parts per process that remote pieces are dealt out in, at least."""


class Offered(NamedTuple):
    """One piece."""

    name: str
    """Name of the tensor."""
    placement: Placement
    """Its place in the tensor."""
    dtype: torch.dtype
    """Its type."""

    @property
    def chunk(self) -> Chunk:
        """The same in words of the core."""
        return Chunk(self.name, self.placement, str(self.dtype).removeprefix("torch."))


def in_order(pieces: Iterable[Offered]) -> list[Offered]:
    """Pieces in the order of an offer."""
    return sorted(pieces, key=lambda piece: order(piece.chunk))


@dataclass(frozen=True, slots=True)
class Offer:
    """The pieces that a process can read."""

    shapes: Mapping[str, Sizes]
    """Shapes of all tensors that are split, also of those without a piece here."""
    pieces: Sequence[Offered]
    """The pieces, sorted by `in_order`: the same numbers for all processes that can read them."""
    provider: Provider = field(repr=False)
    """Reads regions of them, by their numbers."""
    place: tuple[int, ...] = ()
    """Place of the pieces on its host: processes of one place can read the same. Empty for none."""

    @classmethod
    def of(cls, snapshot: Snapshot | None) -> Offer:
        """The pieces that a snapshot holds."""
        tensors = {} if snapshot is None else snapshot.tensors
        split = {name: held for name, held in tensors.items() if isinstance(held, Sharded)}
        found = {
            Offered(name, shard.placement, shard.data.dtype): shard.data
            for name, held in split.items()
            for shard in held.shards
        }
        pieces = in_order(found)

        def provide(asked: Sequence[tuple[int, Region]]) -> list[Tensor]:
            return [found[pieces[number]][region] for number, region in asked]

        return cls({name: held.shape for name, held in split.items()}, pieces, provide)


class Table(NamedTuple):
    """The pieces that all processes offer."""

    shapes: dict[str, Sizes]
    """Shapes of all tensors that are split."""
    pieces: dict[str, dict[Placement, list[tuple[int, int]]]]
    """Per tensor, who can read each piece: processes, each with the number it knows it by."""
    dtypes: dict[str, torch.dtype]
    """Type of each tensor of which there is a piece."""
    sharing: Mapping[int, Sizes]
    """For each process, all that can read the same pieces as it does."""

    @classmethod
    def gather(cls, engine: Engine, offer: Offer) -> Table:
        """The table, on all processes. Collective."""
        me = engine.membership
        place = [me.host, *offer.place] if offer.place else [-1, me.process]
        everyone: list[Json] = engine.gather(place)
        alike: dict[str, list[int]] = {}
        for process, its in enumerate(everyone):
            alike.setdefault(str(its), []).append(process)
        sharing = {process: tuple(each) for each in alike.values() for process in each}
        same = sharing[me.process]
        mine = Summary(
            runs([each.chunk for each in offer.pieces])[same.index(me.process) :: len(same)],
            offer.shapes,
        )
        said: list[Json] = engine.gather(mine.rows)
        lists: dict[str, Json] = {}
        for each in engine.gather(mine.lists(me.process, said)):
            lists.update(each)
        table = cls(shapes_told(said, lists), {}, {}, sharing)
        for process, rows in enumerate(said):
            for placement, kind, names, first in runs_told(rows, lists):
                for number, name in enumerate(names, first):
                    known = table.pieces.setdefault(name, {})
                    known.setdefault(placement, []).append((process, number))
                    table.shapes.setdefault(name, placement.shape)
                    table.dtypes[name] = getattr(torch, kind)
        return table

    @property
    def stored(self) -> dict[str, Stored]:
        """The tensors, as those of a stored state."""
        return {name: Stored(shape, split=True) for name, shape in self.shapes.items()}

    def missing(self) -> str:
        """The reason why the pieces are not the whole of every tensor; empty if they are."""
        for name, shape in self.shapes.items():
            if math.prod(shape):
                try:
                    check_split(name, shape, list(self.pieces.get(name, ())))
                except ValueError as error:
                    return str(error)
        return ""

    def take(self, engine: Engine, offer: Offer, wanted: Wanted) -> dict[str, Held]:
        """The part of the tensors that this process needs. Collective.

        Args:
            engine: Who is in the job.
            offer: The pieces that this process can read.
            wanted: The pieces it needs of some tensors; it gets the others whole.

        Raises:
            ValueError: The pieces are not the whole of every tensor; on all processes.
            LookupError: Some piece is gone; on all processes.
        """
        if reason := self.missing():
            raise ValueError(reason)
        me = engine.membership.process
        here = {(name, where): i for i, (name, where, _) in enumerate(offer.pieces)}
        made: dict[str, Sharded] = {}
        wants: list[Want] = []
        for name, dtype in self.dtypes.items():
            shape = self.shapes[name]
            needed = wanted.get(name, (Placement.whole(shape),))
            shards = tuple(Shard(each, torch.empty(each.sizes, dtype=dtype)) for each in needed)
            made[name] = Sharded(shape, dtype, shards)
            present = list(self.pieces[name])
            pieces = Pieces(present)
            for shard in shards:
                for index, common in pieces.overlapping(shard.placement):
                    piece = present[index]
                    holders = self.pieces[name][piece]
                    source, number = holders[me % len(holders)]
                    if (name, piece) in here:
                        source, number = me, here[name, piece]
                    wants.append(Want(source, number, common.source, shard.data[common.target]))
        wants = self._balanced(engine, wants)
        Swaps(engine.group("control")).fetch(wants, offer.provider)
        return {
            name: held if name in wanted else held.shards[0].data for name, held in made.items()
        }

    def _balanced(self, engine: Engine, wants: Sequence[Want]) -> list[Want]:
        """The same wants, those of other hosts dealt out to all processes there. Collective.

        A process that reads little for itself reads more for others: none reads much more than the
        others of its host, whoever needs what.
        """
        me = engine.membership.process
        found = [want for want in wants if want.source == me]
        remote: dict[Sizes, list[Want]] = {}
        for want in wants:
            if want.source != me:
                remote.setdefault(self.sharing[want.source], []).append(want)
        own = sum(want.target.nbytes for want in found)
        asked = [[hosts[0], _num_bytes(its)] for hosts, its in remote.items()]
        everyone: list[Json] = engine.gather([own, asked])
        extra = Counter[int]()
        for _, their in everyone:
            extra.update(dict(their))
        for processes, its in remote.items():
            room = spare([everyone[process][0] for process in processes], extra[processes[0]])
            parts = list(cut(its, _num_bytes(its) // (_PARTS * len(processes))))
            dealt = readers([part.target.nbytes for part in parts], room)
            found += [
                part._replace(source=processes[each])
                for part, each in zip(parts, dealt, strict=True)
            ]
        return found


def _num_bytes(wants: Sequence[Want]) -> int:
    return sum(want.target.nbytes for want in wants)
