"""Passes over a stream that move no cursor, such as evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.core.shard_order import Lengths, ShardOrder, Turn
from resilin.streams.protocol import Stream
from resilin.training.data.shards.fetching import Pair, ShardFetcher
from resilin.training.data.shards.share import StreamShare


class Evaluation:
    """A pass that moves no cursor: each replica reads its own shards to their ends, on its own.

    Args:
        stream: The user's stream.
        order: Its order.
        options: The user's arguments of the DataLoader.
        members: Members that take part.
        epoch: The epoch of the loop.
    """

    def __init__(
        self,
        stream: Stream,
        order: ShardOrder,
        options: dict[str, Any],
        members: Membership,
        epoch: int,
    ) -> None:
        self._members = members
        self._turn = Turn(order.begin(epoch).seats[members.replica :: members.num_replicas])
        self._lengths = order.unknown()
        self._ahead = self._turn
        self._size = 1
        self._mine: list[Pair] = []
        self.fetcher = ShardFetcher(stream, order, self._next, options)
        """Samples that are fetched ahead."""
        self.fetcher.begin(epoch)

    def span(self, batch_size: int) -> range:
        """The next samples of this replica."""
        members = self._members
        self._size = max(1, BatchPlan(batch_size, members.num_replicas).share(members.replica))
        self.fetcher.expect(self._turn.round, {})
        new, more = 1, 0
        while new:
            taken, after = self._turn.take(self._size, self._lengths)
            self._mine = taken.of(0)
            if self._ahead.position < after.position:
                self._ahead = after
            self.fetcher.fetch(self._mine)
            if more:
                self.fetcher.fetch(after.take(more, self._lengths)[0].of(0))
            known = self._lengths
            self._lengths = with_ends(known, self.fetcher.ends)
            new = int((known != self._lengths).sum())
            if new:
                self._ahead = self._turn
                more = reach(new)
        start, self._turn = self._turn.position, after
        return range(start, after.position)

    def share(self) -> StreamShare:
        """The samples that `span` has read."""
        shares = [0] * self._members.num_replicas
        shares[self._members.replica] = len(self._mine)
        return StreamShare(self._members.replica, tuple(shares), self._mine, self.fetcher)

    def is_over(self) -> bool:
        """Whether all shards of this replica have ended, as far as is known."""
        return self._turn.is_end(self._lengths)

    def _next(self) -> Sequence[Pair]:
        lengths = with_ends(self._lengths, self.fetcher.ends)
        taken, self._ahead = self._ahead.take(self._size, lengths)
        return taken.of(0)


def reach(new: int) -> int:
    """Number of samples to look for beyond a step that has met new ends.

    Shards of one length end together. If a step were planned again for each batch of them, V shards
    would take V / B plans, each of which passes over all ends; twice as many ends each time are
    soon all of them. As many samples as that, at most, are here before their step.

    Args:
        new: Number of ends.
    """
    return 2 * new


def with_ends(lengths: Lengths, ends: dict[int, int]) -> Lengths:
    """Lengths, with the ends that were met here alone."""
    if any(lengths[shard] != length for shard, length in ends.items()):
        lengths = lengths.copy()
        lengths[list(ends)] = list(ends.values())
    return lengths
