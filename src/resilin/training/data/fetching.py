"""Fetches micro-batches ahead of the step, through a stock DataLoader and its workers.

Whenever a worker is free, the next ticket is cut by the sizes of that moment. By the time it comes
back they may have changed: then batches of the default collate function are split and joined, and
others are dropped and fetched again, since only their function knows what is in them. A step gets
the sizes that it asks for, in the order of the stream.
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
from resilin.training.data.left_out import Rows
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

Fetched = tuple[Ticket, Any, int | None]
"""A batch, and its rows if its collate function has left samples out."""


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
        self._resizes = collate is default_collate
        self.persistent = bool(options.get("persistent_workers"))
        """Whether workers are kept for later passes."""
        # Weak, or owner and fetcher would be a cycle: see TicketSampler.
        self._cut = weakref.WeakMethod(cut)
        self._dataset = TicketDataset(dataset, stream, collate)
        self._loader: DataLoader[Any] | None = ticket_loader(
            self._dataset, self, stream.seed, options
        )
        self._batches: Iterator[Fetched] | None = None
        self._generation = 0
        self._ahead: deque[Ticket] = deque()
        self._next = 0
        self._expected = 0
        self._end: int | None = None
        self.rows = Rows()
        """Rows of the batch that was taken last, if its collate function has left samples out."""
        self._left_over: Fetched | None = None
        self._wanted: deque[int] = deque()
        self._kept: deque[Fetched] = deque()

    def follow(self, stream: SampleStream) -> None:
        """Takes up another order from the next pass on."""
        self._dataset.stream = stream

    def open(self, position: int, end: int) -> None:
        """A pass begins. Unless workers persist, its data are fetched by new ones, as they are now.

        Args:
            position: Where its first step begins.
            end: Where its data end: no more is fetched before it is known to continue.
        """
        if self.persistent:
            if position != self._expected:
                self.begin(position)
            return
        self.end_pass()
        self._end = end
        self.begin(position)

    def end_pass(self) -> None:
        """Ends the workers, unless they persist, after the batch that each of them is fetching."""
        if not self.persistent:
            # Not left to the last reference: an exception that somebody keeps is one. The garbage
            # collector would finalize its queues in any order, and wait 5 s for each worker.
            end_workers(self._batches)
            self._batches = None
            self.begin(self._expected)

    def begin(self, position: int) -> None:
        """Drop all pending fetches, and restart at this position."""
        self._generation += 1
        self._ahead.clear()
        self._wanted.clear()
        self._kept.clear()
        self._left_over = None
        self._next = self._expected = position

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
        if self._end is not None and positions.start >= self._end:
            self._end = None
        if self._batches is None:
            self._batches = iter(self._loader)
        self._expected = behind
        parts: list[tuple[Any, int]] = []
        missing = sizes[0]
        while missing:
            start = positions[sizes[0] - missing]
            ticket, batch, self.rows.left = self._left_over or self._receive(start, behind)
            self._left_over = None
            if ticket.start != start:
                # What was fetched ahead does not fit any more: a step was left uncommitted, or
                # another tail was dropped.
                self.begin(behind)
                parts, missing = [], sizes[0]
                self._again(positions, sizes, behind)
                continue
            count = min(ticket.num, missing)
            try:
                if ticket.num != missing and not self._resizes:
                    raise CannotResize
                if count < ticket.num:
                    batch, rest = split(batch, count, ticket.num)
                    later = ticket._replace(start=ticket.positions[count], num=ticket.num - count)
                    self._left_over = (later, rest, None)
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
            _, batch, _ = self._dataset[self._ticket(range(position, position + 1))]
        return batch

    def close(self) -> None:
        """End the workers, after the batch that each of them is fetching."""
        end_workers(self._batches)
        self._batches = self._loader = self._left_over = None

    def next_ticket(self) -> Ticket:
        """Cuts the next ticket by the sizes of now; called when a worker is free."""
        while not self._ahead:
            cut = self._cut()
            assert cut is not None
            parts, behind = cut(self._next)
            if self._end is not None and parts and parts[0].start >= self._end:
                return Ticket(self._generation, self._end, 1, 0)
            self._next = behind
            self._ahead.extend(map(self._ticket, parts))
        return self._ahead.popleft()

    def _receive(self, start: int, behind: int) -> Fetched:
        """The next batch. One that was asked for again comes after those that were on their way.

        Args:
            start: Its first position.
            behind: Where the next step begins.
        """
        again = bool(self._wanted) and self._wanted[0] == start
        if self._kept and not again:
            return self._kept.popleft()
        assert self._batches is not None
        while True:
            fetched = next(self._batches)
            ticket = fetched[0]
            if ticket.generation != self._generation or not (ticket.num or self._end):
                continue
            if not again:
                return fetched
            if ticket.again:
                self._wanted.popleft()
                return fetched
            if ticket.num and ticket.start >= behind:
                self._kept.append(fetched)

    def _again(self, positions: range, sizes: Sequence[int], behind: int) -> None:
        """Cuts new tickets for the rest of this step; those for later steps stay on their way."""
        ends = accumulate(sizes)
        parts = [positions[end - size : end] for size, end in zip(sizes, ends, strict=True) if size]
        later = [ticket for ticket in self._ahead if ticket.start >= behind]
        again = [self._ticket(part)._replace(again=True) for part in parts]
        self._ahead = deque([*again, *later])
        self._kept = deque(each for each in self._kept if each[0].start >= behind)
        self._wanted = deque(part.start for part in parts)
        self._left_over = None
        self._next = max(self._next, behind)

    def _ticket(self, positions: range) -> Ticket:
        return Ticket(self._generation, positions.start, positions.step, len(positions))
