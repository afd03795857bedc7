"""Data without an index: streams whose shards are read in order.

Replicas read different shards, and nobody knows where a shard ends before it was read to its end.
So a step is planned as if no shard ended in it, each replica reads its part, and all tell each
other which ends they have met: one number in most steps. If there are any, the step is planned
again. What replicas know never changes the order, only who finds out when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from resilin.core.clock import Reference
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.core.shard_order import UNKNOWN, Lengths, ShardOrder, Turn
from resilin.core.stream import Tail
from resilin.engine.base import Engine
from resilin.engine.lost import PeerLost
from resilin.streams.protocol import Stream
from resilin.training.data.cursor import Cursor
from resilin.training.data.iteration import Iteration
from resilin.training.data.order import DataOrder
from resilin.training.data.shard_cursor import ShardCursor
from resilin.training.data.shard_fetching import Pair, ShardFetcher
from resilin.training.data.shard_reading import Ask, ShardReader, ShardTicket
from resilin.training.data.supply import Place, Plans
from resilin.training.state.randomness import preserved

_MARKS_EVERY = 32
"""Steps between two exchanges of saved places."""


class StreamShare(NamedTuple):
    """Samples of one step that this replica has read."""

    slot: int
    """This replica."""
    shares: tuple[int, ...]
    """Samples of each replica."""
    mine: list[Pair]
    """Its samples, by shard and number."""
    supply: StreamSupply
    """Where they are."""
    fetcher: ShardFetcher
    """Has them."""

    def take(self, used: int, sizes: Sequence[int]) -> Any:
        """A micro-batch, collated; see `Share`."""
        return self.fetcher.collate(self.mine[used : used + sizes[0]])

    def filler(self) -> Any:
        """A batch of one sample that is not of this share."""
        pair = self.fetcher.any
        return self.supply.example() if pair is None else self.fetcher.collate([pair])


class News:
    """What replicas tell each other about shards. Collective.

    Args:
        engine: Who is in the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num = 0
        self._complete = False

    def begin(self) -> None:
        """Members, or the cursor, have changed: what one knows, another may not know."""
        self._num, self._complete = 0, False

    def tell(self, cursor: ShardCursor, fetcher: ShardFetcher) -> bool | None:
        """Tells and hears what is new.

        Returns:
            Whether a shard has ended that all believed to go on; None if a replica was lost
            meanwhile.
        """
        ends = [each for each in fetcher.ends.items() if cursor.lengths[each[0]] != each[1]]
        self._num += 1
        marks = fetcher.marks() if self._num % _MARKS_EVERY == 0 else []
        if self._engine.membership.num_processes == 1:
            cursor.mark(marks)
            return cursor.learn(ends)
        if not self._complete:
            known = np.flatnonzero(cursor.lengths < UNKNOWN)
            ends += zip(known.tolist(), cursor.lengths[known].tolist(), strict=True)
        try:
            everyone = self._exchange(ends, marks, cursor)
        except PeerLost:
            return None  # the next generation tells it all again
        self._complete = True
        if everyone is None:
            return False
        for _, _, theirs in everyone:
            cursor.mark(map(tuple, theirs))
        return cursor.learn((shard, length) for _, told, _ in everyone for shard, length in told)

    def _exchange(self, ends: list[Pair], marks: list[Any], cursor: ShardCursor) -> Any:
        collectives = self._engine.collectives()
        if self._complete:
            num = torch.tensor([len(ends) + len(marks)])
            collectives.reduce(num)
            if not num.item():
                return None
        place = [cursor.number, cursor.position]
        everyone = collectives.gather([place, ends, marks])
        places = [each[0] for each in everyone]
        if any(each != place for each in places):
            raise RuntimeError(
                f"replicas are at different places (pass, position) of a stream: {places}; all of "
                "them have to iterate over its loader, with the same batch sizes"
            )
        return everyone


class StreamSupply:
    """The samples of a stream.

    Args:
        stream: The user's stream.
        order: Its order.
        tail: Treatment of the remainder of an epoch, `short` or `drop`.
        reference: The run that the learning rate was tuned for.
        plans: Sizes of steps.
        engine: Who is in the job.
        dataloader_kwargs: The user's arguments of the DataLoader.
    """

    def __init__(
        self,
        stream: Stream,
        order: ShardOrder,
        tail: Tail,
        reference: Reference,
        plans: Plans,
        engine: Engine,
        dataloader_kwargs: dict[str, Any],
    ) -> None:
        self.batches = None
        """None: nobody knows how many samples there are."""
        self.order = order
        """The order of the samples."""
        self.reference = reference
        """The run that the learning rate was tuned for."""
        self._stream = stream
        self._drops = tail == "drop"
        self._plans = plans
        self._options = dataloader_kwargs
        self._news = News(engine)
        self.fetcher = ShardFetcher(stream, order, self._next, dataloader_kwargs)
        """Samples that are fetched ahead."""
        self._ahead: tuple[Turn, Lengths, Membership] | None = None
        self._evaluations: dict[int, _Evaluation] = {}
        self._share: StreamShare | None = None

    def new_cursor(self, name: str) -> Cursor:
        """A cursor at the beginning of the data."""
        return ShardCursor(name, self.order)

    def begin(self, cursor: Cursor) -> None:
        """Takes up that members, or the cursor, have changed."""
        self._news.begin()
        self._ahead = None

    def open(self, cursor: Cursor, membership: Membership, epoch: int, *, moves: bool) -> Place:
        """Begins a pass; see `Supply`."""
        return Place(cursor.position if moves else 0, None)

    def span(self, current: Iteration, batch_size: int) -> range | None:
        """The positions of the next step of a pass; see `Supply`. Collective if it moves."""
        if not current.moves:
            return self._evaluation(current).span(batch_size)
        cursor, members = _cursor(current), current.membership
        turn = cursor.turn(current.position)
        self.fetcher.begin(cursor.number)
        self.fetcher.expect(turn.round, cursor.bookmarks)
        new: bool | None = True
        while new:
            taken, after = turn.take(batch_size, cursor.lengths, members.num_replicas)
            mine = taken.of(members.replica)
            self._look_ahead(after, cursor, members)
            self.fetcher.fetch(mine)
            new = self._news.tell(cursor, self.fetcher)
            if new:
                self._ahead = None
        if new is None:
            return None
        if self._drops and len(taken) < batch_size:
            return range(current.position, current.position)
        cursor.note(current.position + len(taken), after)
        shares = taken.shares(members.num_replicas)
        self._share = StreamShare(members.replica, shares, mine, self, self.fetcher)
        return range(current.position, current.position + len(taken))

    def share(self, current: Iteration, span: range) -> StreamShare:
        """This replica's part of the step that `span` has returned."""
        if not current.moves:
            return self._evaluation(current).share()
        assert self._share is not None
        return self._share

    def is_over(self, current: Iteration, position: int) -> bool:
        """Whether the data of the epoch end at this position, as far as is known."""
        if not current.moves:
            return self._evaluation(current).is_over()
        cursor = _cursor(current)
        turn = cursor.turn(position)
        if turn.is_end(cursor.lengths):
            return True
        if not self._drops:
            return False
        num = self._plans.batch_size()
        return turn.skip(num, cursor.lengths).position < turn.position + num

    def sample_steps(self, span: range, scale: float) -> float:
        """Reference steps that the reference run made with these samples.

        A short last batch counts as the whole steps that it would have been.
        """
        return scale

    def close(self, current: Iteration, *, complete: bool) -> None:
        """Ends a pass."""
        if not current.moves:
            if evaluation := self._evaluations.pop(id(current), None):
                evaluation.fetcher.close()
        elif complete:
            self._ahead = None
            current.cursor.end_pass()

    def example(self) -> Any:
        """A batch of one sample, which is not used up."""
        reader = ShardReader(self._stream, self.order)
        seats = self.order.begin(0).seats.tolist()
        with preserved():
            for shard in seats:
                read = reader.read(ShardTicket(0, 0, [Ask(shard, [0], 0, None)]))
                if read.samples:
                    return self.fetcher.batch(read.samples)
        raise ValueError(f"the stream is empty: none of its {len(seats)} shards has a sample")

    # Ahead of the step -----------------------------------------------------------------------

    def _look_ahead(self, after: Turn, cursor: ShardCursor, members: Membership) -> None:
        """Says where prefetching continues: after this step, or where it already is."""
        if self._ahead is None or self._ahead[0].position < after.position:
            self._ahead = (after, cursor.lengths, members)

    def _next(self) -> Sequence[Pair]:
        """The samples of one more step that this replica will need, as far as is known."""
        if self._ahead is None:
            return ()
        turn, lengths, members = self._ahead
        # Each replica has a sample in so many, as long as one of its shards goes on.
        num = max(self._plans.batch_size(), 2 * members.num_replicas)
        taken, turn = turn.take(num, _with(lengths, self.fetcher.ends), members.num_replicas)
        self._ahead = (turn, lengths, members)
        return taken.of(members.replica)

    def _evaluation(self, current: Iteration) -> _Evaluation:
        found = self._evaluations.get(id(current))
        if found is None:
            found = _Evaluation(self, self._stream, self._options, current)
            self._evaluations[id(current)] = found
        return found


def stream_supply(
    stream: Stream,
    order: DataOrder,
    reference: Reference,
    plans: Plans,
    engine: Engine,
    dataloader_kwargs: dict[str, Any],
) -> StreamSupply:
    """The supply of a loader over a stream.

    Args:
        stream: The user's stream.
        order: The settings of the loader.
        reference: The run that the learning rate was tuned for.
        plans: Sizes of steps.
        engine: Who is in the job.
        dataloader_kwargs: The user's arguments of the DataLoader.

    Raises:
        ValueError: A setting that a stream cannot honour.
    """
    if order.tail == "straddle":
        raise ValueError(
            "tail ('straddle') must be 'short' or 'drop' for a stream: where an epoch ends is "
            "known only when its last shard has ended"
        )
    if not dataloader_kwargs.get("in_order", True):
        raise ValueError(
            "in_order (False) must be True for a stream: its samples have one order at any number "
            "of replicas and workers"
        )
    own = getattr(stream, "fingerprint", None)
    return StreamSupply(
        stream,
        ShardOrder(
            stream.num_shards,
            seed=order.seed,
            shuffle=order.shuffle,
            fingerprint=order.fingerprint or own or f"{type(stream).__qualname__}",
        ),
        order.tail,
        reference,
        plans,
        engine,
        dataloader_kwargs,
    )


class _Evaluation:
    """A pass that moves no cursor: each replica reads its own shards to their ends, by itself.

    Args:
        supply: The supply that it belongs to.
        stream: The user's stream.
        options: The user's arguments of the DataLoader.
        current: The pass.
    """

    def __init__(
        self, supply: StreamSupply, stream: Stream, options: dict[str, Any], current: Iteration
    ) -> None:
        self._supply = supply
        self._members = current.membership
        order, members = supply.order, current.membership
        self._turn = Turn(order.begin(current.epoch).seats[members.replica :: members.num_replicas])
        self._lengths = order.unknown()
        self._ahead = self._turn
        self._size = 1
        self._mine: list[Pair] = []
        self.fetcher = ShardFetcher(stream, order, self._next, options)
        self.fetcher.begin(current.epoch)

    def span(self, batch_size: int) -> range:
        """The next samples of this replica."""
        members = self._members
        self._size = max(1, BatchPlan(batch_size, members.num_replicas).share(members.replica))
        self.fetcher.expect(self._turn.round, {})
        new = True
        while new:
            taken, after = self._turn.take(self._size, self._lengths)
            self._mine = taken.of(0)
            if self._ahead.position < after.position:
                self._ahead = after
            self.fetcher.fetch(self._mine)
            known = self._lengths
            self._lengths = _with(known, self.fetcher.ends)
            new = bool((known != self._lengths).any())
            if new:
                self._ahead = self._turn
        start, self._turn = self._turn.position, after
        return range(start, after.position)

    def share(self) -> StreamShare:
        """The samples that `span` has read."""
        shares = [0] * self._members.num_replicas
        shares[self._members.replica] = len(self._mine)
        return StreamShare(
            self._members.replica, tuple(shares), self._mine, self._supply, self.fetcher
        )

    def is_over(self) -> bool:
        """Whether all shards of this replica have ended, as far as is known."""
        return self._turn.is_end(self._lengths)

    def _next(self) -> Sequence[Pair]:
        lengths = _with(self._lengths, self.fetcher.ends)
        taken, self._ahead = self._ahead.take(self._size, lengths)
        return taken.of(0)


def _with(lengths: Lengths, ends: dict[int, int]) -> Lengths:
    """Lengths, with the ends that were met here alone."""
    if any(lengths[shard] != length for shard, length in ends.items()):
        lengths = lengths.copy()
        lengths[list(ends)] = list(ends.values())
    return lengths


def _cursor(current: Iteration) -> ShardCursor:
    assert isinstance(current.cursor, ShardCursor)
    return current.cursor
