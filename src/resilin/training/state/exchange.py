"""Exchange of pieces: each process asks those that have a part of what it needs, and gets that.

Unlike a broadcast, nothing passes through a process that has no use for it. Who has which piece is
known to all; what each process needs is known to it alone, so it sends a list of it first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.engine.collectives import Collectives

_PART = 64 * 2**20
"""Most bytes that are sent at a time."""

Region: TypeAlias = tuple[slice, ...]
"""A rectangle of a piece."""
Provider: TypeAlias = Callable[[Sequence[tuple[int, Region]]], list[Tensor]]
"""Returns regions of pieces that are here, by the numbers of the pieces."""


class Want(NamedTuple):
    """A part of a piece that this process needs."""

    source: int
    """The process that has the piece."""
    piece: int
    """Number of the piece, as that process knows it."""
    region: Region
    """The part of it."""
    target: Tensor
    """Memory to fill."""


def cut(wants: Sequence[Want], most: int) -> Iterator[Want]:
    """The same wants in smaller parts, as far as they have rows to cut between.

    Args:
        wants: The wants.
        most: Bytes that a part is to have at most.
    """
    for want in wants:
        sizes, num = want.target.shape, -(-want.target.nbytes // max(most, 1))
        longest = max(range(len(sizes)), key=lambda dim: sizes[dim], default=0)
        dim = next((dim for dim, length in enumerate(sizes) if length >= num), longest)
        num = min(num, sizes[dim]) if sizes else 1
        if num <= 1:
            yield want
            continue
        for each in range(num):
            begin, end = (sizes[dim] * number // num for number in (each, each + 1))
            start = want.region[dim].start
            rows = slice(start + begin, start + end)
            region = (*want.region[:dim], rows, *want.region[dim + 1 :])
            yield Want(want.source, want.piece, region, want.target.narrow(dim, begin, end - begin))


class Swaps(Collectives):
    """Collectives in which a process sends something to some of the others."""

    kinds: ClassVar[Mapping[str, type[Exception]]] = {
        "LookupError": LookupError,
        **Collectives.kinds,
    }

    def fetch(self, wants: Sequence[Want], provider: Provider) -> None:
        """Fills in what each process wants of the pieces that others have. Collective.

        Args:
            wants: Needs of this process.
            provider: Returns what others want of the pieces that are here.

        Raises:
            LookupError: A process could not provide what it has offered; on all of them.
        """
        by_source: dict[int, list[Want]] = {}
        for want in wants:
            by_source.setdefault(want.source, []).append(want)
        asked = self.swap({source: _asked(each) for source, each in by_source.items()})

        def provide() -> dict[int, Tensor]:
            return {
                asker: _flat(
                    provider([_wanted(each) for each in json.loads(data.numpy().tobytes())])
                )
                for asker, data in asked.items()
            }

        answers = self.attempt(provide)
        # All of them fail if one does: nobody waits for what does not come.
        self.all(lambda: None if answers.kind is None else self.value(answers))
        given = self.value(answers)
        found = self.swap(given)
        for source, each in by_source.items():
            _fill(each, found.get(source))

    def swap(self, outgoing: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sends bytes to some processes; returns those that were sent here, by sender. Collective.

        Args:
            outgoing: Bytes by receiver; none of no length.
        """
        found = {self.process: outgoing[self.process]} if self.process in outgoing else {}
        if self._group is None:
            return found
        sizes = torch.zeros(self.num, dtype=torch.int64)
        for target, data in outgoing.items():
            sizes[target] = data.numel()
        everyone = [torch.empty_like(sizes) for _ in range(self.num)]
        with self._together():
            self._wait(dist.all_gather(everyone, sizes, group=self._group, async_op=True))
            works: list[dist.Work] = []
            for source, each in enumerate(everyone):
                size = int(each[self.process])
                if size and source != self.process:
                    found[source] = torch.empty(size, dtype=torch.uint8)
                    parts = _parts(found[source])
                    works += [self._receive(part, source, tag) for tag, part in parts]
            for target, data in outgoing.items():
                if target != self.process:
                    works += [self._give(part, target, tag) for tag, part in _parts(data)]
            self._end(works)
        return found

    def pass_on(
        self,
        outgoing: Mapping[int, Sequence[Tensor]],
        sources: Sequence[int],
        num: int,
        room: Callable[[int, int], Tensor],
    ) -> dict[int, list[Tensor]]:
        """Sends bytes to some processes and gets those of others, where all know who sends to whom.

        Nobody else takes part. Both sides must call it equally often.

        Args:
            outgoing: Tensors of bytes by receiver; the same number of them everywhere.
            sources: Senders to this process.
            num: That number.
            room: Returns memory for the last tensor of a sender, of this size.
        """
        heads = {source: torch.empty(num, dtype=torch.int64) for source in sources}
        with self._together():
            first = [self._receive(head, source, 0) for source, head in heads.items()]
            works: list[dist.Work] = []
            for target, tensors in outgoing.items():
                assert len(tensors) == num
                head = torch.tensor([each.numel() for each in tensors])
                works.append(self._give(head, target, 0))
                works += [self._give(part, target, tag) for tag, part in _numbered(tensors)]
            found: dict[int, list[Tensor]] = {}
            for (source, head), begun in zip(heads.items(), first, strict=True):
                self._wait(begun)
                *sizes, last = head.tolist()
                its = [torch.empty(size, dtype=torch.uint8) for size in sizes]
                found[source] = [*its, room(source, last)]
                parts = _numbered(found[source])
                works += [self._receive(part, source, tag) for tag, part in parts]
            self._end(works)
        return found

    def _give(self, data: Tensor, target: int, tag: int) -> dist.Work:
        work = dist.isend(data, self._global(target), group=self._group, tag=tag)
        assert work is not None, "this process is in the group"
        return work

    def _receive(self, data: Tensor, source: int, tag: int) -> dist.Work:
        work = dist.irecv(data, self._global(source), group=self._group, tag=tag)
        assert work is not None, "this process is in the group"
        return work


def _numbered(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The parts in which tensors are sent, numbered from 1."""
    parts = itertools.chain.from_iterable(_parts(each) for each in tensors)
    return ((number, part) for number, (_, part) in enumerate(parts, 1))


def _asked(wants: Sequence[Want]) -> Tensor:
    rows = [[want.piece, [[each.start, each.stop] for each in want.region]] for want in wants]
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)


def _wanted(row: tuple[int, list[list[int]]]) -> tuple[int, Region]:
    piece, region = row
    return piece, tuple(slice(*each) for each in region)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors])


def _fill(wants: Sequence[Want], data: Tensor | None) -> None:
    assert data is not None, "whoever was asked has answered"
    begin = 0
    for want in wants:
        end = begin + want.target.nbytes
        # A copy: its bytes begin where that dtype may begin.
        part = data[begin:end].clone().view(want.target.dtype)
        want.target.copy_(part.view(want.target.shape))
        begin = end


def _parts(data: Tensor) -> Iterator[tuple[int, Tensor]]:
    for tag, start in enumerate(range(0, data.numel(), _PART)):
        yield tag, data[start : start + _PART]
