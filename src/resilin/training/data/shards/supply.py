"""Data without an index: streams whose shards are read in order.

Replicas read different shards, and nobody knows where a shard ends before it was read to its end.
So a step is planned as if no shard ended in it, each replica reads its part, and all tell each
other which ends they have met: one number in most steps. If there are any, the step is planned
again. What replicas know never changes the order, only who finds out when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resilin.core.clock import Clock, Reference
from resilin.core.membership import Membership
from resilin.core.shard_order import Lengths, ShardOrder, Turn
from resilin.engine.base import Engine
from resilin.streams.protocol import Seekable, Stateful, Stream
from resilin.training.data.cursor import Cursor
from resilin.training.data.iteration import Iteration
from resilin.training.data.order import DataOrder
from resilin.training.data.sampled import Sampled
from resilin.training.data.shards.cursor import ShardCursor
from resilin.training.data.shards.evaluation import Evaluation, reach, with_ends
from resilin.training.data.shards.fetching import Pair, ShardFetcher
from resilin.training.data.shards.news import News
from resilin.training.data.shards.share import StreamShare
from resilin.training.data.supply import Place

if TYPE_CHECKING:
    from resilin.training.step_plans import StepPlans

logger = logging.getLogger("resilin")


class StreamSupply:
    """The samples of a stream.

    Args:
        stream: The user's stream.
        order: The settings of the loader.
        reference: The run that the learning rate was tuned for.
        plans: Sizes of steps.
        engine: Who is in the job.
        dataloader_kwargs: The user's arguments of the DataLoader.
        by_samples: Whether micro-batches are weighed by their samples.

    Raises:
        ValueError: A setting that a stream cannot honour.
    """

    def __init__(
        self,
        stream: Stream,
        order: DataOrder,
        reference: Reference,
        plans: StepPlans,
        engine: Engine,
        dataloader_kwargs: dict[str, Any],
        *,
        by_samples: bool = True,
    ) -> None:
        self._by_samples = by_samples
        self.batches = None
        """None: nobody knows how many samples there are."""
        self.order = _shard_order(stream, order, dataloader_kwargs)
        """The order of the samples."""
        self.reference = reference
        """The run that the learning rate was tuned for."""
        self._stream = stream
        self._drops = order.tail == "drop"
        self._plans = plans
        self._options = dataloader_kwargs
        self._engine = engine
        self._news = News(engine)
        self.fetcher = ShardFetcher(stream, self.order, self._next, dataloader_kwargs)
        """Samples that are fetched ahead."""
        self._ahead: tuple[Turn, Lengths, Membership] | None = None
        self._evaluations: dict[int, Evaluation] = {}
        self._share: StreamShare | None = None
        self._told = 0

    def new_cursor(self, name: str) -> Cursor:
        """A cursor at the beginning of the data."""
        return ShardCursor(name, self.order)

    def renew(self, cursor: Cursor) -> None:
        """Lengths of shards are those that are met."""

    def sampled(self) -> Sampled:
        """None: shards are named by their numbers."""
        return {}

    def begin(self, cursor: Cursor) -> None:
        """Takes up that members, or the cursor, have changed."""
        self._news.begin()
        self._ahead = None
        assert isinstance(cursor, ShardCursor)
        if cursor.num_loads != self._told:
            self._told = cursor.num_loads
            if self._engine.membership.is_first:
                self._tell_cost(cursor)

    def _tell_cost(self, cursor: ShardCursor) -> None:
        """Tells what it costs to come back to where a saved pass was, before it is paid."""
        turn = cursor.turn(cursor.position)
        if not turn.round or not len(turn.seats):
            return
        shard = self._stream.open(int(turn.seats[0]), self.order.num_shards, cursor.number)
        if isinstance(shard, Stateful):
            marks = [cursor.bookmarks.get(each, (0, None))[0] for each in turn.seats.tolist()]
            num, how = sum(turn.round - mark for mark in marks), "continue from their saved states"
        elif isinstance(shard, Seekable):
            num, how = 0, "skip what was used"
        else:
            num, how = turn.round * len(turn.seats), "have neither a state nor skip()"
        logger.info(
            "the pass over %r continues at sample %d: its %d open shards %s, and %d samples are "
            "read again, over all replicas",
            *(self.order.fingerprint, turn.position, len(turn.seats), how, num),
        )

    def open(self, cursor: Cursor, membership: Membership, epoch: int, *, moves: bool) -> Place:
        """Begins a pass; see `Supply`."""
        if not moves:
            return Place(0, None)
        assert isinstance(cursor, ShardCursor)
        cursor.open(epoch)
        if cursor.is_unused:
            # In a pass that continues, new ones would read its shards from their beginning.
            self.fetcher.renew()
        return Place(cursor.position, None)

    def span(self, current: Iteration, batch_size: int) -> range | None:
        """The positions of the next step of a pass; see `Supply`. Collective if it moves."""
        if not current.moves:
            return self._evaluation(current).span(batch_size)
        cursor, members = _cursor(current), current.membership
        turn = cursor.turn(current.position)
        self.fetcher.begin(cursor.number)
        self.fetcher.expect(turn.round, cursor.bookmarks)
        new: int | None = 1
        more = 0
        while new:
            taken, after = turn.take(batch_size, cursor.lengths, members.num_replicas)
            mine = taken.of(members.replica)
            self._look_ahead(after, cursor, members)
            self.fetcher.fetch(mine)
            if more:
                beyond, _ = after.take(more, cursor.lengths, members.num_replicas)
                self.fetcher.fetch(beyond.of(members.replica))
            new = self._news.tell(cursor, self.fetcher)
            if new:
                self._ahead = None
                more = reach(new)
        if new is None:
            return None
        if len(taken) < (batch_size if self._drops else 1):
            if not cursor.renews:
                if self._drops and cursor.is_unused:
                    logger.warning(
                        "a pass over %r has no step: its %d samples are fewer than batch_size (%d),"
                        " and the remainder is dropped",
                        *(self.order.fingerprint, len(taken), batch_size),
                    )
                return range(current.position, current.position)
            self._ahead = None
            cursor.end_pass()
            self.fetcher.renew()
            return self.span(current, batch_size)
        cursor.renews = False
        cursor.note(current.position + len(taken), after)
        shares = taken.shares(members.num_replicas)
        by_samples = self._by_samples and current.training
        self._share = StreamShare(members.replica, shares, mine, self.fetcher, by_samples)
        return range(current.position, current.position + len(taken))

    def span_ahead(self, position: int, batch_size: int) -> None:
        """Replicas agree on the positions of a step when it begins."""

    def share(self, current: Iteration, span: range) -> StreamShare:
        """This replica's part of the step that `span` has returned."""
        if not current.moves:
            return self._evaluation(current).share()
        assert self._share is not None
        return self._share

    def is_over(self, current: Iteration, position: int, clock: Clock | None = None) -> bool:
        """Whether the data of the epoch end at this position, as far as is known."""
        if not current.moves:
            return self._evaluation(current).is_over()
        cursor = _cursor(current)
        if cursor.renews:
            return False  # the next step is that of another pass, if this one has none
        turn = cursor.turn(position)
        if turn.is_end(cursor.lengths):
            return True
        if not self._drops:
            return False
        num = self._plans.batch_size(clock)
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
            self.fetcher.renew()
            current.cursor.end_pass()

    def example(self) -> Any:
        """A batch of one sample, which is not used up."""
        return self.fetcher.example()

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
        # Each replica has a sample in so many, as long as one of its shards continues.
        num = max(self._plans.batch_size(), 2 * members.num_replicas)
        taken, turn = turn.take(num, with_ends(lengths, self.fetcher.ends), members.num_replicas)
        self._ahead = (turn, lengths, members)
        return taken.of(members.replica)

    def _evaluation(self, current: Iteration) -> Evaluation:
        found = self._evaluations.get(id(current))
        if found is None:
            members = current.membership
            found = Evaluation(self._stream, self.order, self._options, members, current.epoch)
            self._evaluations[id(current)] = found
        return found


def _shard_order(stream: Stream, order: DataOrder, options: Mapping[str, Any]) -> ShardOrder:
    """The order of a stream; refuses settings that it cannot honour."""
    if order.tail == "straddle":
        raise ValueError(
            "tail ('straddle') must be 'short' or 'drop' for a stream: where an epoch ends is "
            "known only when its last shard has ended"
        )
    if not options.get("in_order", True):
        raise ValueError(
            "in_order (False) must be True for a stream: its samples have one order at any number "
            "of replicas and workers"
        )
    own = getattr(stream, "fingerprint", None)
    return ShardOrder(
        stream.num_shards,
        seed=order.seed,
        shuffle=order.shuffle,
        fingerprint=order.fingerprint or own or type(stream).__qualname__,
    )


def _cursor(current: Iteration) -> ShardCursor:
    assert isinstance(current.cursor, ShardCursor)
    return current.cursor
