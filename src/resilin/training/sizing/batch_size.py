"""The next global batch size of a loader and its split."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from resilin.core import _validate
from resilin.core.batch_schedule import BatchSchedule
from resilin.core.clock import Clock, Reference, Schedule
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.ramp import NoiseRamp
from resilin.core.trace import BatchTrace
from resilin.engine import overrides
from resilin.training.ballot import Voter
from resilin.training.sizing.autoscale import Autoscaler
from resilin.training.sizing.by_noise import Capping, Ramping
from resilin.training.sizing.context import KeptSizes, SizePart, tokens_per_step
from resilin.training.sizing.memory_limit import LocalLimit, SharedLimit

if TYPE_CHECKING:
    from resilin.training.job import Job

logger = logging.getLogger("resilin")

BatchSize = int | Schedule[int] | BatchSchedule | BatchTrace | NoiseRamp | Callable[[Clock], int]
"""A global batch size, or a schedule, a trace, a ramp, or a function of the clock."""
PARTS = ("autoscale", "ramp", "noise_cap")
"""Names of all parts of the batch sizes that have state."""


def _described(batch_size: BatchSize) -> str:
    if isinstance(batch_size, Schedule | BatchSchedule | BatchTrace | NoiseRamp):
        return f"a {type(batch_size).__name__}"
    return "a function of the clock"


@lru_cache(maxsize=32)
def _planned(
    bounds: BatchBounds, samples: int, replicas: int, *, bounded: bool, fits: int | None
) -> BatchPlan:
    """The split of a step. Most steps have that of the step before.

    Args:
        bounds: Bounds of the user.
        samples: Samples in the step.
        replicas: Data-parallel members.
        bounded: Whether a smallest size and the global limit apply; what does not fit at once is
            accumulated in any case.
        fits: The largest micro-batch that fits into memory; None sets no limit.
    """
    if bounded:
        plan = bounds.plan(samples, replicas)
    else:
        upper = bounds.local_bsz_bounds[1] if bounds.local_bsz_bounds else None
        plan = BatchPlan(samples, replicas, max_local_bsz=upper)
    if fits is None or plan.batch_size <= fits:
        return plan
    return BatchPlan(samples, replicas, max_local_bsz=fits)


@lru_cache(maxsize=32)
def _divided(plan: BatchPlan, shares: tuple[int, ...]) -> BatchPlan:
    """A plan with other shares; the plan itself if they are its own."""
    if all(plan.share(replica) == share for replica, share in enumerate(shares)):
        return plan
    samples, most = plan.global_batch_size, plan.max_local_bsz
    return BatchPlan(samples, plan.replicas, max_local_bsz=most, shares=shares)


def _check_tokens(clock: Clock, *, weighs: bool, told: float | None) -> None:
    """Refuse positions in tokens where the clock of the job has none.

    Args:
        clock: The clock of the job.
        weighs: Whether the loader weighs batches.
        told: Tokens in a reference step, if the model was told.

    Raises:
        ValueError: Nothing weighs the batches, or no model adds up their weights.
    """
    if not weighs and told is None:
        raise ValueError(
            "a BatchSchedule with unit='tokens' needs a job that counts tokens: batch_weight= of "
            "the AdaptiveDataLoader is None; set it to a function that returns the tokens of a "
            "batch, or choose unit='samples'"
        )
    # `model.weight()` may weigh instead of the loader: only a step shows whether it does.
    counted = clock.tokens > 0 and (weighs or clock.tokens != clock.samples)
    if clock.samples and not counted:
        raise ValueError(
            "a BatchSchedule with unit='tokens' needs a job that counts tokens: the clock has "
            f"{clock.tokens:g} tokens after {clock.samples} samples; train an "
            "AdaptiveDataParallel, with batch_weight= of the loader or within model.weight()"
        )


class BatchSizes:
    """The batch sizes of one loader: set by the user, or chosen by an autoscaler.

    Args:
        job: The job.
        reference: The reference run of the loader.
        max_local_bsz: Most samples in a micro-batch; None sets no limit.
        limit: What fits into the memory of this replica, if that is watched.
        weighs: Whether the loader weighs batches, as by their tokens.
        capped: Whether batches are at most as large as the noise allows.
    """

    def __init__(
        self,
        job: Job,
        reference: Reference,
        max_local_bsz: int | None = None,
        limit: LocalLimit | None = None,
        *,
        weighs: bool = False,
        capped: bool = False,
    ) -> None:
        self._job = job
        self._weighs = weighs
        self.memory = SharedLimit(job.engine, limit)
        """The largest micro-batch that fits into memory, on all replicas."""
        self._reference = reference
        self._max_local_bsz = max_local_bsz
        self._bounds = self._within(BatchBounds())
        self._wanted: BatchSize = reference.batch_size
        self._in_loop: int | str | None = None
        self._kept: KeptSizes | None = None
        self._own_clock = Clock()
        self._replayed: BatchTrace | None = None
        self._voted: list[tuple[SizePart, int]] = []
        self._chooser: Autoscaler | Ramping | None = None
        self._cap = Capping(job, reference.batch_size) if capped else None

    @property
    def autoscaler(self) -> Autoscaler | None:
        """The autoscaler, if the batch size is chosen automatically."""
        return self._chooser if isinstance(self._chooser, Autoscaler) else None

    @property
    def parts(self) -> dict[str, SizePart]:
        """The parts with state that the batch size depends on, by name; they need the noise."""
        parts: dict[str, SizePart] = {}
        if self._chooser is not None:
            parts["autoscale" if self.autoscaler else "ramp"] = self._chooser
        if self._cap is not None:
            parts["noise_cap"] = self._cap
        return parts

    def set(self, batch_size: BatchSize) -> None:
        """The user chooses."""
        if not (isinstance(batch_size, Schedule | BatchTrace | NoiseRamp) or callable(batch_size)):
            batch_size = _validate.whole("batch_size", batch_size, at_least=1)
        if self._replayed is not None:
            logger.debug("a trace is being replayed: the batch size %s waits", batch_size)
        before, self._chooser, self._wanted = self._chooser, None, batch_size
        if isinstance(batch_size, NoiseRamp) and self._replayed is None:
            self._chooser = Ramping(self._job, batch_size)
            self._continue(before)
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
        self._chooser = None
        self._bounds = bounds
        if self._replayed is None:
            self._chooser = Autoscaler(self._job, batch_size, bounds, self.memory)
        self._note("autoscale_batch_size()")

    def _continue(self, before: Autoscaler | Ramping | None) -> None:
        """Continues with what the one before has learned, or the size that it has reached."""
        now = self._chooser
        if isinstance(before, Autoscaler) and isinstance(now, Autoscaler):
            same = before.settings == now.settings
        else:
            same = isinstance(before, Ramping) and isinstance(now, Ramping)
        if same and before is not None and now is not None:
            now.load_state_dict(before.state_dict())

    def _note(self, chosen: int | str) -> None:
        """Make a choice of the running loop part of the state.

        A script sets its initial choice again after a restart. Its loop may not repeat a later one,
        such as in `if epoch == 5`.
        """
        if self._job.recovery is not None:
            self._in_loop = chosen
            if self._kept is not None:
                self._kept.chosen = chosen

    def _take_over(self, kept: KeptSizes, *, made_within: bool) -> None:
        """Sets what the loop had set before a restart, unless it has set something since.

        Args:
            kept: What survives of the loader's batch sizes.
            made_within: Whether the loader was made within an epoch: it begins as it was made.

        Raises:
            RuntimeError: The choice cannot be saved, and the loop has not repeated it.
        """
        self._kept = kept
        if self._in_loop is not None or made_within:
            kept.chosen = self._in_loop
        elif isinstance(kept.chosen, int):
            if kept.chosen != self._wanted:
                logger.info("the batch size is %d again, as the loop had set it", kept.chosen)
            self._in_loop = self._wanted = kept.chosen
            self._chooser = None
        elif kept.chosen is not None and self._replayed is None:
            raise RuntimeError(
                f"the loop had set the batch size to {kept.chosen} after the job had started, "
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

    def take_part(
        self, kept: KeptSizes, voters: list[Voter], *, made_within: bool
    ) -> dict[str, SizePart]:
        """The loader trains: it votes in the ballots from now on.

        A trace that is being replayed overrides the script's choice.

        Args:
            kept: What survives of the loader's batch sizes. A new loader in its place continues
                with what the autoscaler of the one before it has learned.
            voters: Members of the ballots.
            made_within: Whether the loader was made within an epoch.

        Returns:
            The parts that have state, by name.
        """
        if self._replayed is None and (trace := overrides.batch_trace()) is not None:
            self._job.events.replays = overrides.trace_source()
            logger.info("the batch size follows %s, not the script", self._job.events.replays)
            self._replayed = trace
            self._chooser = None
        self._take_over(kept, made_within=made_within)
        previous, kept.sizes = kept.sizes, self
        if isinstance(previous, BatchSizes) and previous is not self and previous in voters:
            voters.remove(previous)
            self._continue(previous._chooser)
            if self._cap is not None and previous._cap is not None:
                self._cap.load_state_dict(previous._cap.state_dict())
        if self._cap is not None:
            self._cap.begin()
        if self not in voters:
            voters.append(self)
        return self.parts

    # The ballot ----------------------------------------------------------------------------

    def votes(self) -> tuple[float, ...]:
        """Whether another micro-batch fits into memory than before; votes of the parts."""
        said = [(part, part.votes()) for part in self.parts.values()]
        self._voted = [(part, len(votes)) for part, votes in said]
        return (self.memory.vote(), *(vote for _, votes in said for vote in votes))

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up the sums of all replicas."""
        self.memory.counted(votes[0])
        rest, present = votes[1:], list(self.parts.values())
        for part, num in self._voted:
            # The loop may have set another one since.
            if part in present:
                part.counted(rest[:num])
            rest = rest[num:]

    # The next step -------------------------------------------------------------------------

    def now(self, clock: Clock | None = None) -> int:
        """The global batch size of the next step, or of one that begins at a later clock."""
        offered = self._offered(clock or self._clock())
        if self._cap is None:
            return offered
        size = self._cap.limit(offered)
        if size == offered or self._replayed is not None:
            return size
        # What the user allows goes before what the noise allows.
        return self._bounds.nearest(size, self._job.engine.membership.num_replicas)

    def _offered(self, clock: Clock) -> int:
        """The same without the cap."""
        if self._chooser is not None:
            return self._chooser.batch_size
        wanted = self._replayed or self._wanted
        assert not isinstance(wanted, NoiseRamp)
        if isinstance(wanted, int):
            size = wanted
        elif isinstance(wanted, BatchTrace):
            size = wanted.at(clock.steps)
        elif isinstance(wanted, Schedule):
            size = wanted.now(clock, self._with_tokens())
        else:
            if isinstance(wanted, BatchSchedule) and wanted.unit == "tokens":
                _check_tokens(clock, weighs=self._weighs, told=tokens_per_step(self._job))
            size = wanted(clock)
        return _validate.whole("the batch size", size, at_least=1)

    def _with_tokens(self) -> Reference:
        # Only the model is told how many tokens a reference step has.
        tokens = tokens_per_step(self._job)
        return (
            self._reference if tokens is None else replace(self._reference, tokens_per_step=tokens)
        )

    def _clock(self) -> Clock:
        # Without a model nobody commits steps, and the loader counts its own.
        return self._job.timeline.clock if self._job.trained is not None else self._own_clock

    def count_step(self, *, samples: int, scale: float, sample_steps: float) -> None:
        """A step is over, and there is no model that would count it.

        Raises:
            RuntimeError: The batch size waits for the noise of a model.
        """
        if isinstance(self._chooser, Ramping) or self._cap is not None:
            named = "noise_cap=True" if self._cap is not None else "a NoiseRamp"
            raise RuntimeError(
                f"{named} needs the noise of the gradient, which an AdaptiveDataParallel measures, "
                "and there is none: the batch would never grow"
            )
        self._own_clock = self._own_clock.advance(
            samples=samples, scale=scale, gain=min(1.0, scale), sample_steps=sample_steps
        )

    def as_fixed(self) -> tuple[int, int, BatchBounds]:
        """The reference batch, the batch size now, and the bounds of one that stays like that."""
        size, fits = self.now(), self.memory.limit
        lower, upper = self._bounds.local_bsz_bounds or (0, size)
        local = (min(lower, size), max(1, lower, min(upper, fits or upper)))
        if self._bounds.local_bsz_bounds is None and fits is None:
            return self._reference.batch_size, size, BatchBounds(size)
        bounds = BatchBounds(size, local, self._bounds.gradient_accumulation)
        return self._reference.batch_size, size, bounds

    def plan(
        self,
        samples: int,
        batch_size: int,
        *,
        training: bool = True,
        shares: tuple[int, ...] | None = None,
    ) -> BatchPlan:
        """The split of a step, over the present replicas.

        Args:
            samples: Samples in the step.
            batch_size: The global batch size; the remainder of an epoch has fewer samples.
            training: Whether the step trains: memory limits its micro-batches then.
            shares: Samples of each replica, where the data determine them; a smallest micro-batch
                cannot be kept then.
        """
        plan = _planned(
            self._bounds,
            samples,
            self._job.engine.membership.num_replicas,
            # The remainder of an epoch is what it is, and so is what a trace says.
            bounded=samples == batch_size and self._replayed is None,
            fits=self.memory.limit if training else None,
        )
        return plan if shares is None else _divided(plan, shares)

    def begin_step(self, plan: BatchPlan, *, whole: bool) -> None:
        """A step begins; one that is not whole says little about how long steps take."""
        if self.autoscaler is None:
            return
        if whole:
            self.autoscaler.begin_step(plan)
        else:
            self.autoscaler.pause()

    def pause(self) -> None:
        """An epoch is over: the time until the next step is not part of a step."""
        if self.autoscaler is not None:
            self.autoscaler.pause()
