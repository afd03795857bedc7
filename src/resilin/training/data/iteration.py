"""Iterations over loaders: whose batch the loop works on.

A script may nest loaders, zip them, leave one by `break`, or keep a generator that it never closes.
So each iteration over a loader is a record of its own. The current one is the iteration that handed
out the latest micro-batch, and only that one gives its place back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from resilin.core.clock import Clock
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.training.data.cursor import Cursor, Cursors
from resilin.training.records import MicroBatch
from resilin.training.timeline import Timeline


class Closable(Protocol):
    """Has workers that can be ended."""

    def close(self) -> None:
        """Ends them."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Iteration:
    """One iteration over a loader, from its first batch to its end.

    Loader, model and lifecycle read this record.
    """

    loader: object | None
    """The loader that is iterated; only its identity is used. None once this is closed."""
    name: str
    """Its name in the state of the job."""
    cursor: Cursor
    """The cursor of that loader."""
    measured_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds the forward pass of the current micro-batch, to measure its memory."""
    training: bool
    """Whether it trains; decided once, when the iteration begins."""
    moves: bool
    """Whether it moves the cursor of the loader; an evaluation does not."""
    began: Clock
    """The clock when it began."""
    membership: Membership
    """Members that take part in the current step."""
    epoch: int
    """The epoch of the loop in which it began."""
    position: int
    """Start of the next step."""
    data_end: int | None
    """End of its epoch's data in the stream; None if nobody knows it."""
    outer: Iteration | None = None
    """The iteration in whose body this one began, if any."""
    micro_batch: MicroBatch | None = None
    """The micro-batch that was handed out last."""
    span: range = range(0)
    """The positions of the current step."""
    plan: BatchPlan | None = None
    """The split of that step."""
    handed_out_at: int | None = None
    """Steps committed when the last micro-batch of the current step was handed out."""
    failed_at: int | None = None
    """Steps committed when its current step failed; None if that has not failed."""
    repeats_below: int | None = None
    """Samples of the micro-batch that ran out of memory: this replica's part of the step is issued
    again in smaller ones. None if none did."""
    closed: bool = False
    """Whether it is over: exhausted, left, or superseded by a later one."""
    enclosing: dict[str, int] = field(default_factory=dict)
    """Positions of the training iterations that were open when this one began, by loader."""

    def advance(self, position: int) -> None:
        """Moves to the next step, and the cursor of the loader with it unless this evaluates."""
        self.position = position
        if self.moves:
            self.cursor.position = position


class Iterations:
    """The open iterations of one job.

    Args:
        timeline: The clock and the epochs of the job.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._handed_out = 0
        self._asked: list[object] = []
        self._asked_at = -1
        self.cursors = Cursors()
        """Positions of the loaders that train."""
        self.current: Iteration | None = None
        """The iteration that handed out the latest micro-batch."""
        self.training: list[Iteration] = []
        """The open iterations that train, in the order in which they began."""
        self.fetchers: weakref.WeakSet[Closable] = weakref.WeakSet()
        """The fetchers of all loaders of the job that still exist."""

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch that the loop body works on; None outside a resilin loader."""
        return None if self.current is None else self.current.micro_batch

    @property
    def plan(self) -> BatchPlan | None:
        """The split of the step that the loop body works on; None outside a resilin loader."""
        return None if self.current is None else self.current.plan

    def measured_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of the current micro-batch, to measure its memory."""
        return nullcontext() if self.current is None else self.current.measured_forward()

    def is_elsewhere(self, iteration: object) -> bool:
        """Whether the loop body works on a micro-batch of another iteration than this one."""
        return self.current is not None and self.current is not iteration

    @property
    def committed(self) -> bool:
        """Whether a step was committed since its last micro-batch was handed out."""
        at = None if self.current is None else self.current.handed_out_at
        return at is not None and self._timeline.clock.steps > at

    def begin(self, iteration: Iteration) -> None:
        """Opens an iteration."""
        iteration.outer = _open(self.current)
        if iteration.training:
            iteration.enclosing = self.positions()
            self.training.append(iteration)

    def positions(self) -> dict[str, int]:
        """Positions of the open training iterations, by the names of their loaders."""
        return {each.name: each.span.start for each in self.training}

    def begins_step(self, asked_by: object) -> bool:
        """Whether a new step begins as an iteration asks for its next batch.

        Not so for the second of two zipped loaders, or for the first batch of an inner loop: their
        batch goes into the step that another one has begun. A step is over when it was committed,
        or when somebody asks who has asked in it before.

        Args:
            asked_by: The iteration that asks; None if it is not one of ours.
        """
        steps = self._timeline.clock.steps
        again = asked_by is None or any(each is asked_by for each in self._asked)
        begins = again or steps != self._asked_at
        if begins:
            self._asked, self._asked_at = [], steps
        if asked_by is not None:
            self._asked.append(asked_by)
        return begins

    def next_number(self) -> int:
        """A number that no other micro-batch of the job has."""
        self._handed_out += 1
        return self._handed_out

    def hand_out(self, iteration: Iteration, micro_batch: MicroBatch) -> None:
        """Makes this the micro-batch that the loop works on."""
        iteration.micro_batch = micro_batch
        iteration.handed_out_at = self._timeline.clock.steps if micro_batch.last else None
        iteration.failed_at = None
        self.current = iteration

    def fail(self) -> bool:
        """Marks the current step as failed, in all iterations that handed out a part of it.

        Returns:
            Whether there are any, which will issue it again.
        """
        steps = self._timeline.clock.steps
        parts = [each for each in self.training if each.handed_out_at == steps]
        if self.current is not None and self.current.moves and self.current not in parts:
            parts.append(self.current)
        for each in parts:
            each.failed_at = steps
        return bool(parts)

    def must_reissue(self, iteration: Iteration) -> bool:
        """Whether the current step of an iteration failed, and no other was committed since.

        An outer loop handed its batch out before the inner steps: it is used once one of these was
        committed.
        """
        return iteration.failed_at == self._timeline.clock.steps

    def commit(self) -> None:
        """Moves the cursor past the current step.

        Of nested or zipped loops, that of the innermost one that trains: the others move when they
        are asked for their next step.
        """
        iteration = self.current
        while iteration is not None and not iteration.moves:
            iteration = iteration.outer
        if iteration is not None:
            iteration.advance(iteration.span.stop)

    def commit_zipped(self, iteration: Iteration) -> None:
        """Moves the cursors of later training iterations whose current step was committed.

        `zip(a, b, c)` asks `a` first. What `b` and `c` have handed out went into the same step, so
        their cursors move before the state is taken, too. In nested loops the inner iterations are
        closed by the time the outer one is asked.
        """
        for each in self.training[self.training.index(iteration) + 1 :]:
            at = each.handed_out_at
            if at is not None and self._timeline.clock.steps > at:
                each.advance(each.span.stop)

    def end(self, iteration: Iteration) -> None:
        """Closes an iteration; the enclosing one is current again if this one was."""
        if iteration.closed:
            return
        iteration.closed = True
        self._asked = [each for each in self._asked if each is not iteration]
        if iteration in self.training:
            self.training.remove(iteration)
        if self.current is iteration:
            self.current = _open(iteration.outer)
        # The loader keeps its latest iteration. In a cycle it would be left to the garbage
        # collector, which takes 5 s for each of its workers.
        iteration.loader, iteration.measured_forward = None, nullcontext

    def close(self) -> None:
        """Ends the workers of all loaders: the job is over."""
        for fetcher in list(self.fetchers):
            fetcher.close()


def _open(iteration: Iteration | None) -> Iteration | None:
    """This iteration, or the nearest one around it that is not closed."""
    while iteration is not None and iteration.closed:
        iteration = iteration.outer
    return iteration
