"""Fetches micro-batches ahead of the step, through a stock DataLoader and its workers.

Whenever a worker is free, the next ticket is cut by the sizes of that moment. By the time it comes
back they may have changed: then it is split, or, where that is impossible, dropped and cut anew.
What a step gets is what it asks for, in the order of the stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from resilin.core.stream import SampleStream
from resilin.training.data.tickets import (
    CannotSplit,
    Ticket,
    TicketDataset,
    TicketSampler,
    WorkerInit,
    split,
)
from resilin.training.state.randomness import preserved

Cut = Callable[[int], tuple[list[range], int]]
"""For a position, the positions of each micro-batch that this replica would run if a step began
there now, and where that step would end."""


class Fetcher:
    """Data that this replica has prefetched, or is prefetching, for later steps.

    Args:
        dataset: The user's dataset.
        stream: Says which sample is at which position.
        cut: A method of the object that owns this one.
        dataloader_kwargs: The user's arguments of the DataLoader.
    """

    def __init__(
        self, dataset: Any, stream: SampleStream, cut: Cut, dataloader_kwargs: dict[str, Any]
    ) -> None:
        options = dict(dataloader_kwargs)
        if options.get("num_workers", 0):
            options["persistent_workers"] = True
            options["worker_init_fn"] = WorkerInit(options.pop("worker_init_fn", None))
        collate = options.pop("collate_fn", None) or default_collate
        # Its own: a DataLoader draws a seed for its workers, from the global one if it has none.
        options["generator"] = torch.Generator().manual_seed(stream.seed)
        # Weak, or owner and fetcher would be a cycle: see TicketSampler.
        self._cut = weakref.WeakMethod(cut)
        self._dataset = TicketDataset(dataset, stream, collate)
        self._loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=TicketSampler(self),
            collate_fn=_as_it_is,
            **options,
        )
        self._batches: Iterator[tuple[Ticket, Any]] | None = None
        self._generation = 0
        self._ahead: deque[Ticket] = deque()
        self._next = 0
        self._expected = 0
        self._left_over: tuple[Ticket, Any] | None = None

    def begin(self, position: int) -> None:
        """Drop all pending fetches, and restart at this position."""
        self._generation += 1
        self._ahead.clear()
        self._left_over = None
        self._next = self._expected = position

    def expect(self, position: int) -> None:
        """Says where the next step begins; drops what is on its way if it is for elsewhere."""
        if position != self._expected:
            self.begin(position)

    def take(self, positions: range, limit: int, *, behind: int) -> tuple[Any, int]:
        """The next micro-batch: the first of these positions, at most `limit` of them.

        Args:
            positions: What this replica still needs of the current step.
            limit: The largest micro-batch.
            behind: Where the next step begins.

        Returns:
            The collated micro-batch, and how many positions it has.
        """
        if self._batches is None:
            self._batches = iter(self._loader)
        self._expected = behind
        while True:
            ticket, batch = self._left_over or next(self._batches)
            self._left_over = None
            if ticket.generation != self._generation:
                continue
            if ticket.start != positions.start:
                # What was fetched ahead does not fit any more: a step was left uncommitted, or
                # another tail was dropped.
                self._again(positions, limit, behind)
                continue
            count = min(ticket.num, len(positions), limit)
            if count == ticket.num:
                return batch, count
            try:
                first, rest = split(batch, count, ticket.num)
            except CannotSplit:
                self._again(positions, limit, behind)
                continue
            later = ticket._replace(start=ticket.positions[count], num=ticket.num - count)
            self._left_over = (later, rest)
            return first, count

    def one(self, position: int) -> Any:
        """The sample at one position, collated; fetched here and now.

        It is no part of what the script would fetch, so the global random generators are left as
        they are.
        """
        with preserved():
            _, batch = self._dataset[self._ticket(range(position, position + 1))]
        return batch

    def next_ticket(self) -> Ticket:
        """Cuts the next ticket by the sizes of now; called when a worker is free."""
        while not self._ahead:
            cut = self._cut()
            assert cut is not None
            parts, self._next = cut(self._next)
            self._ahead.extend(map(self._ticket, parts))
        return self._ahead.popleft()

    def _again(self, positions: range, limit: int, behind: int) -> None:
        """Cuts new tickets for the rest of this step, and for what follows it."""
        self.begin(behind)
        for offset in range(0, len(positions), limit):
            self._ahead.append(self._ticket(positions[offset : offset + limit]))

    def _ticket(self, positions: range) -> Ticket:
        return Ticket(self._generation, positions.start, positions.step, len(positions))


def _as_it_is(item: Any) -> Any:
    return item
