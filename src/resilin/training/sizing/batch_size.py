"""The next global batch size of a loader and its split."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from resilin.core import _validate
from resilin.core.clock import Clock, Reference, Schedule
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.trace import BatchTrace
from resilin.engine import overrides
from resilin.training.data.cursor import Cursor
from resilin.training.job import Job, current_job
from resilin.training.sizing.autoscale import Autoscaler
from resilin.training.sizing.memory_limit import Room
from resilin.training.state.registry import FormerName

logger = logging.getLogger("resilin")

BatchSize = int | Schedule[int] | BatchTrace | Callable[[Clock], int]
"""A global batch size, or a schedule, a trace, or a function of the clock that it follows."""


def _described(batch_size: BatchSize) -> str:
    if isinstance(batch_size, Schedule | BatchTrace):
        return f"a {type(batch_size).__name__}"
    return "a function of the clock"


class BatchSizes:
    """The batch sizes of one loader: set by the user, or chosen by an autoscaler."""

    def __init__(self, reference: Reference, max_local_bsz: int | None, room: Room | None) -> None:
        self._reference = reference
        self._max_local_bsz = max_local_bsz
        self._bounds = self._within(BatchBounds())
        self._wanted: BatchSize = reference.batch_size
        self._in_loop: int | str | None = None
        self._cursor: Cursor | None = None
        self._own_clock = Clock()
        self._replayed: BatchTrace | None = None
        self.room = room
        """Memory limit of this replica, if it is measured."""
        self.autoscaler: Autoscaler | None = None
        """The autoscaler, if the batch size is chosen automatically."""

    def set(self, batch_size: BatchSize) -> None:
        """The user chooses."""
        if not (isinstance(batch_size, Schedule | BatchTrace) or callable(batch_size)):
            batch_size = _validate.whole("batch_size", batch_size, at_least=1)
        if self._replayed is not None:
            logger.debug("a trace is being replayed: the batch size %s waits", batch_size)
        self._wanted = batch_size
        self._forget_autoscaler()
        self._note(batch_size if isinstance(batch_size, int) else _described(batch_size))

    def autoscale(self, bounds: BatchBounds) -> None:
        """The autoscaler chooses, within these bounds and those of the loader."""
        batch_size = self._reference.batch_size
        bounds = self._within(bounds)
        if bounds.max_batch_size is not None and bounds.max_batch_size < batch_size:
            raise ValueError(
                f"max_batch_size ({bounds.max_batch_size}) must be at least batch_size "
                f"({batch_size})"
            )
        self._forget_autoscaler()
        self._bounds = bounds
        if self._replayed is None:
            self.autoscaler = Autoscaler(current_job(), batch_size, bounds, self.room)
        self._note("autoscale_batch_size()")

    def _note(self, chosen: int | str) -> None:
        """Make a choice of the running loop part of the state.

        A script sets its initial choice again after a restart. Its loop may not repeat a later one,
        such as in `if epoch == 5`.
        """
        if current_job().recovery is not None:
            self._in_loop = chosen
            if self._cursor is not None:
                self._cursor.chosen = chosen

    def _take_over(self, cursor: Cursor, *, made_within: bool) -> None:
        """Restore the choice of the loop from before a restart, unless it has made a new one.

        Args:
            cursor: The cursor of the loader.
            made_within: Whether the loader was created within an epoch: then it starts as created.

        Raises:
            RuntimeError: The choice cannot be saved, and the loop has not repeated it.
        """
        self._cursor = cursor
        if self._in_loop is not None or made_within:
            cursor.chosen = self._in_loop
        elif isinstance(cursor.chosen, int):
            if cursor.chosen != self._wanted:
                logger.info("the batch size is %d again, as the loop had set it", cursor.chosen)
            self._in_loop = self._wanted = cursor.chosen
            self._forget_autoscaler()
        elif cursor.chosen is not None and self._replayed is None:
            raise RuntimeError(
                f"the loop had set the batch size to {cursor.chosen} after the job had started, "
                "and has not set it again since the job was resumed. Only a number can be saved: "
                "set anything else before the loop over epochs, or at the beginning of every epoch"
            )

    def _within(self, bounds: BatchBounds) -> BatchBounds:
        """The bounds with micro-batches of at most the loader's `max_local_bsz`."""
        if self._max_local_bsz is None:
            return bounds
        lower, upper = bounds.local_bsz_bounds or (0, self._max_local_bsz)
        if lower > self._max_local_bsz:
            raise ValueError(
                f"lower bound of local_bsz_bounds ({lower}) must be at most max_local_bsz "
                f"({self._max_local_bsz})"
            )
        return replace(bounds, local_bsz_bounds=(lower, min(upper, self._max_local_bsz)))

    def _forget_autoscaler(self) -> None:
        voters = current_job().voters
        if self.autoscaler is not None and self.autoscaler in voters:
            voters.remove(self.autoscaler)
        self.autoscaler = None

    def take_part(
        self, job: Job, name: str, cursor: Cursor, former: FormerName, *, made_within: bool
    ) -> None:
        """Register a training loader: its autoscaler has state and takes part in ballots.

        A trace that is being replayed overrides the script's choice.

        Args:
            job: The job.
            name: Name of the autoscaler in the state of the job.
            cursor: The cursor of the loader. A loader that was created again continues with the
                measurements of the previous autoscaler.
            former: Another name that its restored state may have.
            made_within: Whether the loader was created within an epoch.
        """
        if self._replayed is None and (trace := overrides.batch_trace()) is not None:
            job.events.replays = overrides.trace_source()
            logger.info("the batch size follows %s, not the script", job.events.replays)
            self._replayed = trace
            self._forget_autoscaler()
        self._take_over(cursor, made_within=made_within)
        job.autoscaler = self.autoscaler
        previous, cursor.autoscaler = cursor.autoscaler, self.autoscaler
        if previous is not self.autoscaler and previous in job.voters:
            job.voters.remove(previous)
            if self.autoscaler is not None and previous.settings == self.autoscaler.settings:
                self.autoscaler.load_state_dict(previous.state_dict())
        if self.autoscaler is None:
            job.registry.remove(name)
        else:
            # The user may have set another one since the last epoch.
            job.registry.release(name)
            job.registry.add(name, self.autoscaler, ages=False, former=former)
            if self.autoscaler not in job.voters:
                job.voters.append(self.autoscaler)

    # The next step -------------------------------------------------------------------------

    def now(self) -> int:
        """The global batch size of the next step."""
        if self.autoscaler is not None:
            return self.autoscaler.batch_size
        wanted, clock = self._replayed or self._wanted, self._clock()
        if isinstance(wanted, int):
            size = wanted
        elif isinstance(wanted, BatchTrace):
            size = wanted.at(clock.steps)
        elif isinstance(wanted, Schedule):
            size = wanted.now(clock, self._with_tokens())
        else:
            size = wanted(clock)
        return _validate.whole("the batch size", size, at_least=1)

    def _with_tokens(self) -> Reference:
        # Only the model is told how many tokens a reference step has.
        model = current_job().model
        if model is None or model.tokens_per_step is None:
            return self._reference
        return replace(self._reference, tokens_per_step=model.tokens_per_step)

    def _clock(self) -> Clock:
        # Without a model nobody commits steps, and the loader counts its own.
        return self._own_clock if current_job().model is None else current_job().clock

    def count_step(self, *, samples: int, scale: float, sample_steps: float) -> None:
        """A step is over, and there is no model that would count it."""
        self._own_clock = self._own_clock.advance(
            samples=samples, scale=scale, gain=min(1.0, scale), sample_steps=sample_steps
        )

    def plan(self, samples: int, batch_size: int) -> BatchPlan:
        """The split of a step, over the present replicas.

        Args:
            samples: Samples in the step.
            batch_size: The global batch size; the remainder of an epoch has fewer samples.
        """
        replicas = current_job().engine.membership.num_replicas
        if samples == batch_size and self._replayed is None:
            return self._bounds.plan(samples, replicas)
        # Remainders of epochs and sizes of a trace are given: no smallest size and no global limit
        # apply. Samples beyond one micro-batch are accumulated.
        upper = self._bounds.local_bsz_bounds[1] if self._bounds.local_bsz_bounds else None
        return BatchPlan(samples, replicas, max_local_bsz=upper)

    def begin_step(self, plan: BatchPlan, *, whole: bool) -> None:
        """A step begins; one that is not whole says little about how long steps take."""
        if self.autoscaler is None:
            return
        if not whole:
            self.autoscaler.pause()
            return
        if self.room is not None and self.room.limit < plan.batch_size:
            # What will be run: micro-batches are no larger than what fits.
            plan = BatchPlan(plan.global_batch_size, plan.replicas, max_local_bsz=self.room.limit)
        self.autoscaler.begin_step(plan)

    def pause(self) -> None:
        """An epoch is over: the time until the next step is not part of a step."""
        if self.autoscaler is not None:
            self.autoscaler.pause()
