"""Iterations over loaders: whose batch the loop works on.

A script may nest loaders, zip them, leave one by `break`, or keep a generator that it never closes.
So each iteration over a loader is a record of its own. The current one is the iteration that handed
out the latest micro-batch, and only that one gives its place back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from resilin.core.clock import Clock, Reference
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.training.data.copier import Copier, Fetched
from resilin.training.data.cursor import Cursor, Cursors
from resilin.training.data.planned import Planned
from resilin.training.data.reading import Handed, Reading, trained_one
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
    reference: Reference
    """The run that the learning rate of its loader was tuned for."""
    began: float
    """Progress with its loader when it began."""
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
    steps: Iterator[Any] = field(default_factory=lambda: iter(()))
    """Runs its steps: each item is a micro-batch that is handed out to the model."""
    under_way: Planned | None = None
    """The current step."""
    planned: deque[Planned] = field(default_factory=deque)
    """Later steps of which a batch was read."""
    copier: Copier | None = None
    """Copies its batches to a device."""
    fetched: deque[Fetched] = field(default_factory=deque)
    """Batches of these and of the current step that the loop does not have yet."""
    reading: Reading = field(default_factory=lambda: Reading(None))
    """Batches that the loop has and has not trained."""
    batch: Any = None
    """The batch of the current micro-batch; None if the loop had read it before."""
    entered: bool = False
    """Whether the model was called with the current micro-batch."""
    used: bool = False
    """Whether a step was committed with it."""
    credit: float = 0.0
    """Progress of a step with a batch that the loop has read together with the current one."""
    made: bool = False
    """Whether a step was committed with one of its batches."""
    passed: bool = False
    """Whether one of its steps is over: committed, or left out."""
    round: int = 0
    """Batches that a loop reads together, as with `zip`, are of one round."""

    def handed(self, *, copies: bool = True) -> Handed:
        """The current micro-batch, recognised by its tensors."""
        return self.reading.first or Handed.of(self.batch, self.span, copies=copies)

    def own_progress(self, clock: Clock) -> float:
        """Progress that was made with batches of its loader."""
        return clock.progress - self.cursor.others

    def foreseen(self, planned: Planned) -> Planned:
        """This step as it was foreseen, with what was fetched of it, if it is still the same."""
        if self.planned:
            first = self.planned.popleft()
            if (first.span, first.plan) == (planned.span, planned.plan):
                return first
            self.drop_ahead()
        return planned

    def drop_ahead(self) -> None:
        """Drops later steps and their batches, of which the loop has none."""
        self.planned.clear()
        self.fetched.clear()

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
        self._round = 0
        self._together: list[Iteration] = []
        self._in_step: list[Iteration] = []
        self._in_turn: bool | None = None
        self.entries = 0
        """Micro-batches that the model was called with."""
        self._trains = False
        self.in_framework = False
        """Whether a framework owns the loop: it calls `optimizer.step()` only where a step ends."""
        self.gone: list[Handed] = []
        """Batches that the loop has left out, or may train later: the next call tells."""
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
        iteration.entered, iteration.used = False, False
        iteration.credit, iteration.round = 0.0, self.entries
        self._round, self._trains = self.entries, self._trains or iteration.training
        self.current = iteration

    # What the model is called with -----------------------------------------------------------

    def follow(self, values: Any, *, called: bool, pending: bool) -> None:
        """Makes the micro-batch current that the model is called with.

        That is the one handed out last, unless the loop reads ahead or has zipped several loaders.

        Args:
            values: Arguments of the model, or a batch as the loader gave it.
            called: Whether an earlier call waits for its backward pass.
            pending: Whether the step has a part of its gradient, and waits for the rest.

        Raises:
            RuntimeError: The batch of the call cannot be told, or cannot be trained.
        """
        current = self.current
        if current is None or not current.training:
            return
        if self.gone or any(each.reading.ahead for each in self.training):
            self._recognise(values, called=called)
        fresh: list[Iteration] = []
        if len(self.training) > 1:
            fresh = [e for e in self.training if e.round == self._round and not e.entered]
        if fresh:
            self._choose(fresh, values, called=called, pending=pending)

    def _recognise(self, values: Any, *, called: bool) -> None:
        """Moves to the batch that the model is called with, where the loop has read ahead."""
        readers = [e for e in self.training if e.reading.ahead or (self.gone and e is self.current)]
        found = [each.reading.find(each.handed(), values, self.gone, called) for each in readers]
        # Of several loaders, one may give labels only: its batches are read with those of another.
        known = {index for index in found if index is not None}
        alike = len({len(each.reading.ahead) for each in readers}) == 1
        for each, index in zip(readers, found, strict=True):
            if index is None and not (alike and len(known) == 1):
                raise RuntimeError(each.reading.undecided(self.gone))
            with each.reading.lock:
                for _ in range(max(known) if index is None else index):
                    next(each.steps)
        self.gone.clear()

    def _choose(self, fresh: list[Iteration], values: Any, *, called: bool, pending: bool) -> None:
        """Tells which of several loaders that were read together the model is called with."""
        current = self.current
        assert current is not None
        if called and self._in_step:
            # Several calls, and one loss.
            one, self._in_turn = self._in_step[-1], False
            _check_alike([one, *fresh])
            self._take(fresh)
            self.current, self._timeline.reference = one, one.reference
            return
        chosen: int | None = None
        if len(fresh) > 1:
            copies = self._in_turn is None
            handed = [each.handed(copies=copies) for each in fresh]
            chosen = trained_one(values, handed, copies=copies)
        elif current.used:
            self._in_turn = True
        if chosen is None and not self._in_turn:
            _check_alike(fresh)
            self._together = fresh
        else:
            self._together = [fresh[chosen or 0]]
        if pending and not any(each in self._in_step for each in self._together):
            raise RuntimeError(_IN_TURN)
        one = self._together[-1]
        self.current, self._timeline.reference = one, one.reference

    def enter(self, *, first: bool) -> None:
        """Counts the current micro-batch as one that the model was called with.

        Args:
            first: Whether a step begins with it.
        """
        current = self.current
        assert current is not None
        assert current.micro_batch is not None
        together, self._together = self._together or [current], []
        self._in_step = [] if first else self._in_step
        self._take(together)
        reading = current.reading
        reading.called = reading.requests
        reading.one_by_one = reading.one_by_one or reading.requests == 1
        self.entries += 1

    def _take(self, parts: list[Iteration]) -> None:
        for each in parts:
            each.entered = True
            if each not in self._in_step:
                self._in_step.append(each)

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

    def check_unused(self, *, told: bool) -> None:
        """Refuses a step on a batch that was trained before, as from a list of batches.

        Args:
            told: Whether the reference batch is known without a loader of resilin.

        Raises:
            RuntimeError: The batch of the step was trained, or comes from no pass over a loader.
        """
        current = self.current
        if current is None:
            # The pass may be left between the call of the model and the step, as by `break`.
            refused = self._trains and not told and not self._in_step
        else:
            # A loop at hand may make several steps on one batch.
            micro, alone = current.micro_batch, current.reading.one_by_one and not self.training[1:]
            whole = micro is not None and micro.index == 0 and micro.last
            refused = current.used and not (alone and whole and not current.reading.ahead)
        if refused:
            raise RuntimeError(
                "a step on a batch that is not that of a pass over an AdaptiveDataLoader, in a job "
                "that trains on one: its pass was closed, as by `next(iter(loader))`, or it was "
                "trained before and kept, as by `itertools.cycle(loader)`, and its weight and its "
                "place in the order are unknown. Keep one iterator per pass, and iterate over the "
                "loader again for each epoch; say which of several batches is meant with `with "
                "model.using(batch):`; for batches of your own, give batch_size= to the "
                "AdaptiveDataParallel"
            )

    def commit(self, gain: float) -> None:
        """Moves the cursor past the current step.

        Progress counts for the loaders whose batches were in the step, and for those that were read
        together with them: labels may come from another loader. Of nested or zipped loops,
        the cursor of the innermost one that trains moves: the others move when they are asked for
        their next step.

        Args:
            gain: Progress of the step.
        """
        parts = [each for each in self.training if each in self._in_step]
        for each in self.training:
            if each in parts:
                # It was called itself, and not only read with a batch that was. Of several steps
                # on one batch, the first one counts.
                each.cursor.others += each.credit + (gain if each.used else 0.0)
                each.credit, each.used = 0.0, True
            elif parts and each.round == parts[-1].round and not each.entered and not each.credit:
                each.credit = gain
            else:
                each.cursor.others += gain
                continue
            each.made = True
        trained = parts or self._in_step
        iteration = trained[-1] if trained else self.current
        self._in_step = []
        while iteration is not None and not iteration.moves:
            iteration = iteration.outer
        if iteration is not None:
            iteration.advance(iteration.span.stop)

    def settle(self) -> None:
        """Ends the passes that the loop has read to their end: what it has not trained is left out.

        It may turn out to have read that ahead of its training: the next call of the model tells.
        """
        for each in [other for other in self.training if other.reading.over]:
            untrained = [] if each.entered else [each.handed()]
            self.gone += [*untrained, *each.reading.ahead]
            for _ in each.steps:
                pass
            self.end(each)

    def end_epoch(self) -> None:
        """Ends the passes of an epoch: the loop will not train what it has left."""
        self.settle()
        self.gone.clear()

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
        iteration.steps, iteration.batch = iter(()), None
        iteration.drop_ahead()

    def end_all(self) -> None:
        """Closes all iterations: nobody asks for a batch any more."""
        while self.current is not None:
            self.end(self.current)
        for each in list(self.training):
            self.end(each)

    def close(self) -> None:
        """Ends the workers of all loaders: the job is over."""
        for fetcher in list(self.fetchers):
            fetcher.close()


def _open(iteration: Iteration | None) -> Iteration | None:
    """This iteration, or the nearest one around it that is not closed."""
    while iteration is not None and iteration.closed:
        iteration = iteration.outer
    return iteration


def _check_alike(parts: list[Iteration]) -> None:
    """Refuses batches of one loss that are not the same part of their steps.

    Raises:
        RuntimeError: They are not: one weight cannot be right for all of them.
    """
    micros = [each.micro_batch for each in parts]
    first, *others = [each for each in micros if each is not None]
    for other in others:
        place = (first.index, first.last) == (other.index, other.last)
        weights, totals = (first.weight, other.weight), (first.total_weight, other.total_weight)
        if totals[0] is None or totals[1] is None:
            same = weights[0] == weights[1]
        else:
            same = weights[0] * totals[1] == weights[1] * totals[0]
        if not (place and same):
            raise RuntimeError(
                f"one loss over batches of several loaders: that of {parts[0].name!r} is "
                f"{first.weight:g} of {first.samples} samples of its step on this replica, and "
                f"another is {other.weight:g} of {other.samples}. One weight is right for both "
                "only if they are the same part of their steps: give the loaders equal batch_size, "
                "max_local_bsz and drop_last=True, load one dataset that returns both, or make a "
                "step on each"
            )


_IN_TURN = (
    "a step on the batch of one loader is accumulated, and the model is called with the batch of "
    "another: steps on the loaders of a `zip` in turn need one micro-batch per step, and one step "
    "on all of them one backward pass; set a larger max_local_bsz, or add up the losses and call "
    "backward() once"
)
