"""Fetches samples of shards ahead of the step, through a stock DataLoader and its workers.

Samples come one by one, and are collated when a step uses them: which samples share a micro-batch
is known only then. What was fetched stays valid when batch sizes or replicas change, since a sample
is named by its shard and number.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from resilin.compat.torch_names import end_workers, pin_batch
from resilin.core.shard_order import ShardOrder
from resilin.streams.protocol import Json, Stream
from resilin.training.data.left_out import Rows, collated
from resilin.training.data.shards.cursor import Bookmark
from resilin.training.data.shards.reading import (
    Ask,
    Read,
    ShardDataset,
    ShardReader,
    ShardTicket,
    unpacked,
)
from resilin.training.data.tickets import ticket_loader
from resilin.training.state.randomness import preserved

Pair = tuple[int, int]
"""A shard, and the number of a sample in it."""
Ahead = Callable[[], Sequence[Pair]]
"""The samples of one more step that this replica will need; none if no step is in sight."""
_FIRST = itemgetter(0)


class ShardFetcher:
    """Samples of shards that this replica has prefetched, or is prefetching.

    Args:
        stream: The user's stream.
        order: Its order.
        ahead: A method of the object that owns this one.
        dataloader_kwargs: The user's arguments of the DataLoader.
    """

    def __init__(
        self, stream: Stream, order: ShardOrder, ahead: Ahead, dataloader_kwargs: dict[str, Any]
    ) -> None:
        options = dict(dataloader_kwargs)
        self._collate = options.pop("collate_fn", None) or default_collate
        self._pins = bool(options.pop("pin_memory", False)) and torch.accelerator.is_available()
        self._stream, self._order = stream, order
        self._dataset: ShardDataset | None = ShardDataset(stream, order)
        self._num_workers = int(options.get("num_workers", 0))
        self._persistent = bool(options.get("persistent_workers"))
        self._loader: DataLoader[Read] | None = None
        if self._num_workers:
            self._loader = ticket_loader(self._dataset, self, order.seed, options)
        self._batches: Iterator[Read] | None = None
        # Weak, or owner and fetcher would be a cycle: see TicketSampler.
        self._ahead = weakref.WeakMethod(ahead)
        self._tickets: deque[ShardTicket] = deque()
        self._known = _Known()
        self.rows = Rows()
        """Rows of the latest batch, if its collate function has left samples out."""

    # What a step needs -----------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Drops all that belongs to another pass over the data."""
        if self._known.epoch != epoch:
            # They keep their places: tickets go to the workers in turn.
            self._tickets = deque(ticket._replace(asks=()) for ticket in self._tickets)
            self._known = _Known(epoch)

    def renew(self) -> None:
        """Ends the workers, unless they persist: the next pass reads the stream as it is then."""
        if self._batches is not None and not self._persistent:
            end_workers(self._batches)
            self._batches = None
            self._tickets.clear()
            self._known = _Known()

    def expect(self, given: int, bookmarks: dict[int, Bookmark]) -> None:
        """Takes up what all shards have given, and drops samples before that.

        Args:
            given: Samples that each shard has given that has not ended.
            bookmarks: Saved places of shards.
        """
        known = self._known
        known.bookmarks = bookmarks
        if given != known.given:
            known.given = given
            known.samples = {p: sample for p, sample in known.samples.items() if p[1] >= given}

    @property
    def ends(self) -> dict[int, int]:
        """Lengths of shards whose end was met here in this pass."""
        return self._known.ends

    def marks(self) -> list[tuple[int, int, Json]]:
        """The latest saved place of each shard that all have come by; each is told once."""
        return self._known.marks()

    def fetch(self, pairs: Sequence[Pair]) -> None:
        """Waits until each of these samples is here, or its shard has ended before it.

        Raises:
            RuntimeError: It was closed.
        """
        if self._dataset is None:
            raise RuntimeError(
                "this pass over an AdaptiveDataLoader belongs to a job that reset_job() has ended, "
                "or to an evaluation that is over: begin a new pass"
            )
        known = self._known
        missing = known.missing(pairs)
        self._tickets.extend(self._cut([pair for pair in missing if pair not in known.asked]))
        if missing and self._loader is not None and self._batches is None:
            self._batches = iter(self._loader)
        try:
            while missing:
                read = self._next()
                if read.epoch == known.epoch:
                    known.take(read)
                    missing = known.missing(missing)
        except BaseException:
            known.asked.clear()  # what was under way may be lost
            raise

    def _next(self) -> Read:
        if self._batches is not None:
            read = next(self._batches)
            return read._replace(samples=unpacked(read.samples))
        assert self._dataset is not None
        while not self._tickets[0].asks:
            self._tickets.popleft()
        return self._dataset[self._tickets.popleft()]

    def collate(self, pairs: Sequence[Pair]) -> Any:
        """A batch of samples that are here."""
        here = self._known.samples
        return self.batch([_own(here[pair]) for pair in pairs])

    def batch(self, samples: list[Any]) -> Any:
        """A batch of these samples."""
        batch, self.rows.left = collated(self._collate, samples, ())
        return pin_batch(batch) if self._pins else batch

    @property
    def any(self) -> Pair | None:
        """A sample that is here, if there is one."""
        return next(iter(self._known.samples), None)

    def example(self) -> Any:
        """A batch of one sample, which is not used up; read here and now.

        It is no part of what the script would fetch, so the global random generators are left as
        they are.

        Raises:
            ValueError: No shard has a sample.
        """
        reader, seats = ShardReader(self._stream, self._order), self._order.begin(0).seats.tolist()
        with preserved():
            for shard in seats:
                read = reader.read(ShardTicket(0, 0, [Ask(shard, [0], 0, None)]))
                if read.samples:
                    return self.batch(read.samples)
        raise ValueError(f"the stream is empty: none of its {len(seats)} shards has a sample")

    def close(self) -> None:
        """Ends the workers, after what each of them is reading."""
        end_workers(self._batches)  # for the reason, see Fetcher
        self._batches = self._loader = self._dataset = None

    # Tickets ---------------------------------------------------------------------------------

    def next_ticket(self) -> ShardTicket:
        """The next ticket; called when a worker is free. They go to the workers in turn."""
        if not self._tickets:
            ahead = self._ahead()
            assert ahead is not None
            pairs = ahead()
            while pairs and not (asked := self._known.not_asked(pairs)):
                pairs = ahead()
            self._tickets.extend(self._cut(asked if pairs else ()) or self._empty())
        return self._tickets.popleft()

    def _cut(self, pairs: Sequence[Pair]) -> list[ShardTicket]:
        """One ticket for each worker; none if there is nothing to read."""
        if not pairs:
            return []
        known = self._known
        known.asked.update(pairs)
        by_shard: dict[int, list[int]] = {}
        for shard, index in pairs:
            by_shard.setdefault(shard, []).append(index)
        given, marks = known.given, known.bookmarks
        asks = [Ask(shard, each, given, marks.get(shard)) for shard, each in by_shard.items()]
        if self._num_workers < 2:
            return [ShardTicket(known.epoch, 0, asks)]
        parts: list[list[Ask]] = [[] for _ in range(self._num_workers)]
        for ask in asks:
            parts[known.worker(ask.shard, len(parts))].append(ask)
        return [ShardTicket(known.epoch, worker, part) for worker, part in enumerate(parts)]

    def _empty(self) -> list[ShardTicket]:
        return [ShardTicket(self._known.epoch, w, ()) for w in range(self._num_workers)]


class _Known:
    """Samples that were read, or asked for, in one pass over the data."""

    def __init__(self, epoch: int = -1) -> None:
        self.epoch = epoch
        self.given = 0
        self.bookmarks: dict[int, Bookmark] = {}
        self.samples: dict[Pair, Any] = {}
        self.asked: set[Pair] = set()
        self.ends: dict[int, int] = {}
        self._marks: dict[int, list[Bookmark]] = {}
        self._workers: dict[int, int] = {}

    def missing(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those that are neither here nor beyond the end of their shard."""
        ends, here = self.ends, self.samples
        if not ends:
            return [pair for pair in pairs if pair not in here]
        return [p for p in pairs if p not in here and p[1] < ends.get(p[0], p[1] + 1)]

    def not_asked(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those that have to be asked for."""
        return [p for p in self.missing(pairs) if p not in self.asked]

    def worker(self, shard: int, num: int) -> int:
        """The worker that reads a shard, always the same one."""
        return self._workers.setdefault(shard, len(self._workers) % num)

    def take(self, read: Read) -> None:
        """Takes up what a worker has read."""
        self.ends.update(read.ends)
        self.asked.difference_update(read.places)
        if read.ends:
            ends = dict(read.ends)
            self.asked = {p for p in self.asked if p[1] < ends.get(p[0], p[1] + 1)}
        self.samples.update(zip(read.places, read.samples, strict=True))
        for shard, index, state in read.bookmarks:
            self._marks.setdefault(shard, []).append((index, state))

    def marks(self) -> list[tuple[int, int, Json]]:
        """The latest saved place of each shard that all have come by; each is told once."""
        found: list[tuple[int, int, Json]] = []
        for shard, marks in self._marks.items():
            passed = [mark for mark in marks if mark[0] <= self.given]
            if passed:
                found.append((shard, *max(passed, key=_FIRST)))
                self._marks[shard] = [mark for mark in marks if mark[0] > self.given]
        return found


def _own(sample: Any) -> Any:
    """A sample whose entries a collate function may take out: a step may be made again."""
    return copy(sample) if type(sample) in (dict, list) else sample
