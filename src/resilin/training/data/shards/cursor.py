"""Position of the job in a stream of shards, and what all replicas know of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resilin.core.shard_order import (
    UNKNOWN,
    Lengths,
    ShardOrder,
    Turn,
    pack_lengths,
    unpack_lengths,
)
from resilin.streams.protocol import Json
from resilin.training.data.cursor import Cursor, Order

Bookmark = tuple[int, Json]
"""Samples that a shard had given, and its state then."""


class ShardCursor(Cursor):
    """Position of the job in a stream, and what is known of its shards.

    Positions count samples over all passes. What is known is the same on all replicas, but for a
    replica that was lost while they told each other; it does not affect the order.

    Args:
        name: Its name in the state of the job.
        stream: The order of the stream of the loader that has it now.
    """

    stream: ShardOrder

    def __init__(self, name: str, stream: ShardOrder) -> None:
        super().__init__(name, stream)
        self.number = 0
        """Number of the pass over the data, from 0."""
        self._start = 0
        self.lengths: Lengths = stream.unknown()
        """Lengths of the shards, as far as replicas have met their ends in this pass."""
        self.bookmarks: dict[int, Bookmark] = {}
        """The latest saved place of each shard that has any, in this pass."""
        self.renews = False
        """Whether the next pass begins if nothing is left of this one.

        A loop may leave a pass just after its last sample, which it does not know to be the last:
        the next loop is not to be empty. A job that is resumed there ends its pass instead.
        """
        self._opened_in: int | None = None
        self._opened_here = False
        self._turns: dict[int, Turn] = {}

    @property
    def is_unused(self) -> bool:
        """Whether no step of this pass was committed."""
        return self.position == self._start

    def open(self, epoch: int) -> None:
        """An iteration over the loader begins, in this epoch of the loop."""
        if not self.is_unused and (self._opened_here or self._opened_in != epoch):
            self.renews = True
        self._opened_in, self._opened_here = epoch, True

    def turn(self, position: int) -> Turn:
        """The place in the order of this pass that has this position."""
        if position not in self._turns:
            self._turns = {self.position: self._find(self.position)}
            self._turns[position] = self._find(position)
        return self._turns[position]

    def _find(self, position: int) -> Turn:
        near = [known for known in self._turns if known <= position]
        if not near:
            begin = self.stream.begin(self.number)
            return begin.skip(position - self._start, self.lengths)
        known = max(near)
        return self._turns[known].skip(position - known, self.lengths)

    def note(self, position: int, turn: Turn) -> None:
        """Remembers the place that has a position, so that it need not be found."""
        kept = self._turns.get(self.position)
        self._turns = {position: turn} if kept is None else {self.position: kept, position: turn}

    def learn(self, ends: Iterable[tuple[int, int]]) -> int:
        """Takes up lengths of shards; returns how many of them are new.

        Raises:
            ValueError: A shard has ended before samples that were used already: it has other data
                than it had.
        """
        new = 0
        for shard, length in ends:
            known = int(self.lengths[shard])
            if known == length:
                continue
            given = self.turn(self.position).given(shard)
            if known != UNKNOWN or length < given:
                before = f"{given} of it were used" if known == UNKNOWN else f"{known} before"
                raise ValueError(
                    f"shard {shard} of {self.stream.fingerprint!r} has ended after {length} "
                    f"samples, and {before}: a shard must have the same samples whenever it is "
                    f"opened in one pass (pass {self.number})"
                )
            self.lengths[shard] = length
            new += 1
        return new

    def mark(self, bookmarks: Iterable[tuple[int, int, Json]]) -> None:
        """Takes up saved places: shard, samples that it had given, and its state."""
        for shard, index, state in bookmarks:
            if shard not in self.bookmarks or self.bookmarks[shard][0] < index:
                self.bookmarks[shard] = (index, state)

    def follow(self, stream: Order) -> None:
        """Takes up the order of its loader, which may have other shards in the next pass."""
        assert isinstance(stream, ShardOrder)
        before, self.stream = self.stream.num_shards, stream
        if before != stream.num_shards:
            self._forget()

    def end_pass(self) -> None:
        """Moves to the beginning of the next pass."""
        self.number += 1
        self._start, self.renews = self.position, False
        self._forget()

    def _forget(self) -> None:
        self.lengths, self.bookmarks, self._turns = self.stream.unknown(), {}, {}

    def place(self) -> dict[str, Any]:
        """The order, the place in it, and what is known of its shards."""
        state = super().place()
        turn = self.turn(self.position)
        # A shard that has given up its seat is read no more.
        seated = set(turn.seats.tolist()) if self.bookmarks else set()
        bookmarks = [[s, *mark] for s, mark in sorted(self.bookmarks.items()) if s in seated]
        state.update(number=self.number, start=self._start, bookmarks=bookmarks)
        state.update(opened_in=self._opened_in, renews=self.renews)
        state["lengths"] = pack_lengths(self.lengths)
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what `place` returned."""
        between = (
            not state.get("under_way", True)
            and state.get("epoch") != self.epoch
            and "start" in state
            and state["cursor"] == state["start"]
        )
        if between:
            # No pass is under way, so the next one may have another order.
            own = self.stream.identity()
            state = {**state, **{name: own[name] for name in ("seed", "shuffle")}}
        super().resume(state)
        self.number, self._start = int(state["number"]), int(state["start"])
        self._opened_in, self.renews = state["opened_in"], bool(state["renews"])
        self._opened_here = False
        self._forget()
        self.lengths = unpack_lengths(state["lengths"], self.stream.num_shards)
        self.mark((int(shard), int(index), saved) for shard, index, saved in state["bookmarks"])
