"""A step as a value: what one replica knows of the optimizer step under way, and how that changes.

A `Step` is frozen; each thing that a loop does makes the next one. Nothing here touches a gradient,
a group or a clock, so tables and simulated loops try every order of calls.

    Step()                 nothing has begun; it remembers how the step before has ended
    .opened(...)           the first micro-batch of a step is about to begin
    .with_part(part)       a micro-batch begins: the model is called with it
    .reached(weight)       a backward pass reaches its output: it counts
    .backward_over()       that pass is over
    .asked()               `optimizer.step()` asks whether it has to wait
    .reduced(result)       the ballot of all replicas is complete: the step can be made, or cannot
    .ended(outcome)        it was made, skipped, or it failed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple


class Outcome(Enum):
    """Outcome of a step; the same on all replicas."""

    COMMITTED = "committed"
    """The optimizer stepped: the step counts."""
    SKIPPED = "skipped"
    """No replica made it: a GradScaler found infinities, or the loop left it. Its samples are
    used up and do not count."""
    FAILED = "failed"
    """A replica was lost in the middle of it. Nothing moves, and it is issued again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One micro-batch of this replica, as far as its gradient is concerned."""

    number: int | None = None
    """Number of the micro-batch in the job; None if it comes from another loader."""
    weight: float
    """Weight of its gradient; 0 if it must not count at all."""
    samples: int
    """Samples of this replica in it."""
    last: bool
    """Whether this replica's part of the step ends with it."""
    total: float | None
    """Weight of all micro-batches of all replicas; None if only a reduction can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Result of a step whose gradient is complete; the same bits on all replicas."""

    weight: float = 0.0
    """Weight of all micro-batches that had a backward pass, over all replicas."""
    samples: int = 0
    """Samples in them."""
    noise: Any = None
    """Noise per parameter group, to be read in a later step; None if it was not measured."""
    cost: float = 0.0
    """Time that measuring took, as a fraction of the step; a mean over the replicas."""
    skipped: bool = False
    """Whether the step must not be made: a replica left it, or nothing in it was trained."""
    lost: bool = False
    """Whether it was not completed here, because a member is gone; it is skipped, too."""


SKIPPED = Reduced(skipped=True)
LOST = Reduced(skipped=True, lost=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This replica's part of a reduction, once its gradient is computed."""

    divisor: float
    """Total weight that its gradient was divided by; the same on all replicas."""
    num_gradients: int = 0
    """Gradients that were measured separately; 0 if it has no samples."""
    seconds: float = 0.0
    """Time that measuring takes in the whole step."""


class Head(NamedTuple):
    """One replica's part of a step, in numbers, or the sums over all replicas."""

    weight: float
    """Weight of its micro-batches that had a backward pass."""
    samples: float
    """Samples in them."""
    gradients: float
    """Gradients that were measured separately: where replicas are compared, 1 if it has any."""
    seconds: float
    """Time that measuring takes."""
    step_seconds: float
    """Usual duration of a step."""
    steps: float
    """Steps made so far."""
    divisor: float
    """Total weight that its gradient was divided by."""
    skips: float
    """1 if it left the step without the backward pass of its last micro-batch."""
    changes: float
    """1 if it has other trained parameters than in the step before."""
    signature: float
    """Hash of the parameters it trains."""
    voters: float = 0.0
    """Hash of the names of those who vote, and of how many numbers each has."""


class Step(NamedTuple):
    """The step under way on this replica, or the one to come."""

    steps: int = 0
    """Steps that this replica has made before it."""
    measure: bool = False
    """Whether it is measured; the same on all replicas."""
    seconds: float = 0.0
    """Usual duration of a step on this replica."""
    part: Part | None = None
    """The micro-batch at hand; None before the first one."""
    trained: bool = False
    """Whether that had a backward pass, or is having it."""
    waited: bool = False
    """Whether `optimizer.step()` has waited since that."""
    in_backward: bool = False
    """Whether a backward pass is under way, or has failed."""
    fresh: bool = False
    """Whether a backward pass has ended and its micro-batch is not taken in yet."""
    backwards: int = 0
    """Backward passes so far."""
    weight: float = 0.0
    """Weight of the micro-batches that had one."""
    samples: int = 0
    """Samples in them."""
    skips: bool = False
    """Whether this replica leaves the step without its last backward pass."""
    changes: bool = False
    """Whether it has other trained parameters than in the step before."""
    result: Reduced | None = None
    """Outcome of its reduction, once its gradient is complete."""
    prepared: Any = None
    """What it does to the optimizers, once that was asked for."""
    turns: tuple[int, ...] = ()
    """Numbers of the optimizers that are done with its gradient."""
    made: bool = False
    """Whether one of them has stepped; the others were skipped."""
    before: Outcome | None = None
    """How the step before has ended; None once the loop has asked for what follows it."""
    ended_at: int | None = None
    """Number of the micro-batch at which that was."""

    # Questions -----------------------------------------------------------------------------

    @property
    def untouched(self) -> bool:
        """Whether nothing of it has begun."""
        return self.part is None and self.result is None and not (self.in_backward or self.changes)

    @property
    def pending(self) -> bool:
        """Whether `.grad` holds a part of the step, which was not made yet."""
        return self.backwards > 0 and (self.result is None or not self.result.skipped)

    @property
    def complete(self) -> bool:
        """Whether `.grad` is the mean over the global batch, and was not used yet."""
        return self.result is not None and not self.result.skipped

    @property
    def stopped(self) -> bool:
        """Whether no replica makes it."""
        return self.result is not None and self.result.skipped

    @property
    def lost(self) -> bool:
        """Whether a member was lost before its gradient was complete."""
        return self.result is not None and self.result.lost

    @property
    def failed(self) -> bool:
        """Whether the step before has failed, and the loop is still in its body."""
        return self.before is Outcome.FAILED

    @property
    def called(self) -> bool:
        """Whether the model was called with the micro-batch at hand, and nothing more was done."""
        return self.part is not None and not (self.trained or self.waited)

    @property
    def leaves_batch(self) -> bool:
        """Whether it needs the batch at hand no more: it is over, or another one follows."""
        return self.part is None or self.stopped or (self.trained and not self.part.last)

    @property
    def accumulated_by_hand(self) -> bool:
        """Whether the loop goes on to another micro-batch and has not called `optimizer.step()`."""
        return self.trained and not self.waited

    def is_in(self, number: int) -> bool:
        """Whether this micro-batch is the one at hand."""
        return self.part is not None and self.part.number == number

    def made_with(self, number: int | None) -> bool:
        """Whether the step before was made with this micro-batch, and no other has begun."""
        return self.before is Outcome.COMMITTED and self.part is None and self.ended_at == number

    # The reduction -------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether this replica takes part in the reduction without a gradient."""
        return self.skips or self.changes

    @property
    def reduces(self) -> bool:
        """Whether a reduction is due: the micro-batch under way is the last one."""
        return self.empty or (self.part is not None and self.part.last)

    @property
    def own_weight(self) -> float:
        """Weight of this replica's gradient in the reduction."""
        return 0.0 if self.empty else self.weight

    @property
    def total(self) -> float | None:
        """Weight of all micro-batches of all replicas; None if only a reduction can tell."""
        return None if self.part is None else self.part.total

    def head(self, share: Share, signature: int) -> Head:
        """This replica's part of the ballot.

        Args:
            share: Its part of the reduction.
            signature: Hash of the parameters that it trains.
        """
        return Head(
            weight=self.own_weight,
            samples=0.0 if self.empty else float(self.samples),
            gradients=float(share.num_gradients),
            seconds=share.seconds,
            step_seconds=self.seconds,
            steps=float(self.steps),
            divisor=0.0 if self.empty else share.divisor,
            skips=float(self.skips),
            changes=float(self.changes),
            signature=float(signature),
        )

    # What a loop does ----------------------------------------------------------------------

    def opened(self, *, steps: int, measure: bool, seconds: float) -> Step:
        """A step, of which nothing has begun, and what is known of it.

        Raises:
            RuntimeError: The gradient of the step before is complete, and was not used.
        """
        if self.complete:
            raise RuntimeError(NOT_STEPPED)
        return Step(steps=steps, measure=measure, seconds=seconds, ended_at=self.ended_at)

    def changed(self) -> Step:
        """This replica trains other parameters than in the step before, and has no gradient."""
        return self._replace(changes=True)

    def with_part(self, part: Part) -> Step:
        """It takes the next micro-batch."""
        return self._replace(part=part, trained=False, waited=False)

    def reweighed(self, weight: float) -> Step:
        """It corrects the weight of the micro-batch at hand, where each sample weighs 1."""
        assert self.part is not None
        return self._replace(part=replace(self.part, weight=weight, samples=round(weight)))

    def reached(self, weight: float) -> Step:
        """It counts the micro-batch at hand, whose backward pass has begun.

        A second pass changes nothing.

        Args:
            weight: Weight of the largest call of the model, if that is more.

        Raises:
            RuntimeError: `optimizer.step()` has waited for the others since the first pass.
        """
        assert self.part is not None
        if self.trained:
            if self.waited:
                raise RuntimeError(TWICE)
            return self
        step = self.reweighed(weight) if weight > self.part.weight else self
        assert step.part is not None
        return step._replace(
            trained=True,
            weight=step.weight + step.part.weight,
            samples=step.samples + step.part.samples,
        )

    def backward_under_way(self) -> Step:
        """A backward pass has begun."""
        return self._replace(in_backward=True)

    def without_backward(self) -> Step:
        """No backward pass is under way any more."""
        return self._replace(in_backward=False)

    def backward_over(self) -> Step:
        """A backward pass has ended.

        Raises:
            RuntimeError: It belongs to no step.
        """
        if self.part is None:
            raise RuntimeError(STALE)
        return self._replace(backwards=self.backwards + 1, fresh=True)

    def taken_in(self) -> Step:
        """The gradient of the micro-batch at hand was added to the others."""
        return self._replace(fresh=False)

    def asked(self) -> Step:
        """`optimizer.step()` was called: it waits until the gradient is complete."""
        return self._replace(waited=not self.complete)

    def check_reduced_once(self) -> None:
        """Refuses a second backward pass after the reduction.

        Raises:
            RuntimeError: There was one.
        """
        if self.result is not None and self.backwards > 1 and self.part and self.part.last:
            raise RuntimeError(SECOND)

    def with_factors(self, prepared: Any) -> Step:
        """Its gain and factors are known."""
        return self._replace(prepared=prepared)

    def with_turn(self, number: int, *, made: bool) -> Step:
        """An optimizer is done with its gradient.

        Args:
            number: Which of them.
            made: Whether it has stepped.

        Raises:
            RuntimeError: It was done with it before.
        """
        if number in self.turns:
            raise RuntimeError(AGAIN)
        return self._replace(turns=(*self.turns, number), made=self.made or made)

    def without_turns(self) -> Step:
        """Nothing is known of its optimizers."""
        return self._replace(turns=(), made=False)

    def leaving(self) -> Step:
        """This replica leaves it without its last backward pass: no replica makes it."""
        return self._replace(skips=True, result=SKIPPED)

    def reduced(self, result: Reduced) -> Step:
        """All replicas have said their part."""
        return self._replace(result=result, backwards=1)

    def ended(self, outcome: Outcome, number: int | None) -> Step:
        """The step after it, of which nothing has begun.

        Args:
            outcome: How it has ended.
            number: Number of the micro-batch that the loop works on.
        """
        return Step(before=outcome, ended_at=number)

    def dropped(self) -> Step:
        """It is forgotten, as if nothing of it had begun."""
        return Step(before=self.before, ended_at=self.ended_at)

    def body_over(self) -> Step:
        """The loop is not in the body of a failed step any more."""
        return self._replace(before=None) if self.failed else self

    def passed_over(self, number: int | None) -> Step:
        """The loop asks for what follows this micro-batch, of which nothing is left to do."""
        return self._replace(before=None, ended_at=number)


def check(own: Head, sums: Head, replicas: int) -> None:
    """Refuses a step that replicas do not make alike.

    Raises:
        RuntimeError: They are at different steps, train different parameters, or have different
            totals of the weights.
    """
    if sums.steps != replicas * own.steps:
        raise RuntimeError(
            f"replicas are not in the same step: this one has made {own.steps:.0f} steps, the mean "
            f"over all {replicas} is {sums.steps / replicas:g}; each replica has to make, or to "
            "leave, the same steps"
        )
    if sums.signature != replicas * own.signature or 0 < sums.changes < replicas:
        state = "has changed" if own.changes else "has not changed"
        raise RuntimeError(
            f"requires_grad differs between replicas: {sums.changes:.0f} of {replicas} have frozen "
            f"or unfrozen parameters since the last step, and this replica {state} any; all "
            "replicas have to change requires_grad of the same parameters between the same steps"
        )
    apart = abs(sums.divisor - replicas * own.divisor) > 1e-9 * abs(sums.divisor)
    if apart and not sums.skips and not sums.changes:
        raise RuntimeError(
            f"replicas divide by different total weights: this one by {own.divisor:g}, the mean "
            f"over all is {sums.divisor / replicas:g}. A batch size that the script sets must be "
            "the same on all replicas: choose it by model.clock or by a number that was averaged "
            "over them, not by the time of one or by its own loss; and surround the forward pass "
            "with model.weight() on all replicas, or on none"
        )


NOT_STEPPED = (
    "the gradient of a step is complete, and another one begins without optimizer.step(): "
    "accumulation by hand? The loader hands out micro-batches and the model accumulates them; "
    "call optimizer.step() after each backward pass, which waits where it has to. To leave a step "
    "on purpose, call optimizer.zero_grad() on all replicas"
)
AGAIN = (
    "an optimizer steps a second time with the gradient of one step, before the others have "
    "stepped; step each of them once per backward pass"
)
TWICE = (
    "a micro-batch is trained a second time after optimizer.step(), which has waited for the other "
    "micro-batches of the step: each counts once; ask the loader for the next one, or set a larger "
    "max_local_bsz"
)
STALE = (
    "a backward pass came for a step that is over: its forward pass belongs to an earlier step; "
    "run forward and backward within one micro-batch, and begin a pass over the loader after the "
    "last step of the one before"
)
SECOND = (
    "a second backward pass came after the gradient of the step was complete; add up the losses of "
    "a micro-batch and call backward() once. torch.autograd.grad() through the model counts as "
    "one: compute a gradient penalty with model.module"
)
