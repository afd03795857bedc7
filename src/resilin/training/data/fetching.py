"""Fetches micro-batches ahead of the step, through a stock DataLoader and its workers.

Whenever a worker is free, the next ticket is cut by the sizes of that moment. By the time it comes
back they may have changed: then batches are split and joined, or, where that is impossible, dropped
and fetched anew. A step gets the sizes that it asks for, in the order of the stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import DataLoader, default_collate

from resilin.compat.torch_names import end_workers
from resilin.core.stream import SampleStream
from resilin.training.data.tickets import (
    CannotResize,
    Ticket,
    TicketDataset,
    join,
    split,
    ticket_loader,
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
        collate = options.pop("collate_fn", None) or default_collate
        # Weak, or owner and fetcher would be a cycle: see TicketSampler.
        self._cut = weakref.WeakMethod(cut)
        self._dataset = TicketDataset(dataset, stream, collate)
        self._loader: DataLoader[Any] | None = ticket_loader(
            self._dataset, self, stream.seed, options
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

    def take(self, positions: range, sizes: Sequence[int], *, behind: int) -> Any:
        """The next micro-batch: the first `sizes[0]` of these positions, collated.

        Args:
            positions: What this replica still needs of the current step.
            sizes: Sizes of the micro-batches that they are to be fetched in.
            behind: Where the next step begins.

        Raises:
            RuntimeError: It was closed.
        """
        if self._loader is None:
            raise RuntimeError(
                "this pass over an AdaptiveDataLoader belongs to a job that reset_job() has ended: "
                "make a new loader and begin a new pass"
            )
        if self._batches is None:
            self._batches = iter(self._loader)
        self._expected = behind
        parts: list[tuple[Any, int]] = []
        missing = sizes[0]
        while missing:
            ticket, batch = self._left_over or next(self._batches)
            self._left_over = None
            if ticket.generation != self._generation:
                continue
            count = min(ticket.num, missing)
            try:
                if ticket.start != positions[sizes[0] - missing]:
                    # What was fetched ahead does not fit any more: a step was left uncommitted,
                    # or another tail was dropped.
                    raise CannotResize
                if count < ticket.num:
                    batch, rest = split(batch, count, ticket.num)
                    later = ticket._replace(start=ticket.positions[count], num=ticket.num - count)
                    self._left_over = (later, rest)
                if parts:
                    batch = join(*parts.pop(), batch, count)
            except CannotResize:
                parts, missing = [], sizes[0]
                self._again(positions, sizes, behind)
                continue
            missing -= count
            parts.append((batch, sizes[0] - missing))
        return parts[0][0]

    def one(self, position: int) -> Any:
        """The sample at one position, collated; fetched here and now.

        It is no part of what the script would fetch, so the global random generators are left as
        they are.
        """
        with preserved():
            _, batch = self._dataset[self._ticket(range(position, position + 1))]
        return batch

    def close(self) -> None:
        """End the workers, after the batch that each of them is fetching."""
        # Not left to the last reference: an exception that somebody keeps is one. The garbage
        # collector would finalize its queues in any order, and wait 5 s for each worker.
        end_workers(self._batches)
        self._batches = self._loader = self._left_over = None

    def next_ticket(self) -> Ticket:
        """Cuts the next ticket by the sizes of now; called when a worker is free."""
        while not self._ahead:
            cut = self._cut()
            assert cut is not None
            parts, self._next = cut(self._next)
            self._ahead.extend(map(self._ticket, parts))
        return self._ahead.popleft()

    def _again(self, positions: range, sizes: Sequence[int], behind: int) -> None:
        """Cuts new tickets for the rest of this step, and for what follows it."""
        self.begin(behind)
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            self._ahead.append(self._ticket(positions[end - size : end]))

    def _ticket(self, positions: range) -> Ticket:
        return Ticket(self._generation, positions.start, positions.step, len(positions))
