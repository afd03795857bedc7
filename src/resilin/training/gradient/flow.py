"""The rules of a step: micro-batches begin, wait, are left out, or left altogether."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from resilin.core._warn import warn
from resilin.engine.base import Engine
from resilin.training.gradient import refusals
from resilin.training.gradient.records import Part, StepStart
from resilin.training.gradient.step import StepGradient
from resilin.training.records import MicroBatch
from resilin.training.tensors import tensors_in


class Loop(Protocol):
    """The user's loop over the loaders of the job."""

    in_framework: bool
    """Whether a framework owns the loop, and calls `optimizer.step()` only where a step ends."""

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch that the loop body works on; None outside a resilin loader."""
        ...

    def is_elsewhere(self, iteration: object) -> bool:
        """Whether the loop body works on a micro-batch of another iteration than this one."""
        ...

    @property
    def committed(self) -> bool:
        """Whether a step was committed since its last micro-batch was handed out."""
        ...

    def follow(self, values: Any, *, called: bool, pending: bool) -> None:
        """Makes the micro-batch current that the model is called with."""
        ...

    def enter(self, *, first: bool) -> None:
        """Counts the current micro-batch as one that the model was called with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCalls:
    """Functions of the model that surround its steps."""

    begin: Callable[[], object]
    """Called before a step that no loader of ours begins."""
    start: Callable[[Part], StepStart]
    """Returns what is known of a step that begins with this micro-batch."""
    left: Callable[[], None]
    """Called when the loop has left a step: it is over, and was not made."""
    unknown_scaler: Callable[[], bool]
    """Whether a GradScaler that the model does not know steps the optimizer right now."""


class StepFlow:
    """Follows the calls of a user's loop through one step after another.

    Args:
        gradient: The gradient of the step.
        loop: The micro-batch that is at hand.
        engine: Who is in the job.
        calls: Functions of the model that surround its steps.
    """

    def __init__(
        self, gradient: StepGradient, loop: Loop, engine: Engine, calls: StepCalls
    ) -> None:
        self._gradient = gradient
        self._loop = loop
        self._engine = engine
        self._calls = calls
        self._seen: int | None = None
        self._over: int | None = None
        self.weight: float | None = None
        """Weight of the micro-batch at hand, if the user says it."""
        self.using: Any = None
        """The batch that the model is called with, if the user says it."""
        self.thread: int | None = None
        """The thread that trains."""

    # Beginning -----------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each forward pass in training."""
        gradient = self._gradient
        step = gradient.step
        called = step.part is not None and not (step.trained or step.waited)
        values = (args, kwargs) if self.using is None else self.using
        self._loop.follow(values, called=called, pending=step.pending)
        micro = self._loop.micro_batch
        if micro is not None:
            if not micro.training:
                raise RuntimeError(refusals.EVALUATION)
            self._enter(micro)
            return
        # Any other loader: each batch is a step of its own.
        weight = self._size_of(args, kwargs)
        if gradient.step.part is not None and not gradient.step.trained:
            gradient.add_call(weight)
        elif gradient.step.part is None or gradient.step.result is not None:
            self._calls.begin()
            part = Part(weight=weight, samples=round(weight), last=True, total=None)
            gradient.begin(part, self._calls.start(part))

    def _enter(self, micro: MicroBatch) -> None:
        """Begins the micro-batch that the loader has handed out, if it is a new one."""
        gradient = self._gradient
        if micro.number == self._seen and gradient.step.part is not None:
            return
        told = self.weight
        if told is not None and micro.total_weight is None:
            raise ValueError(
                f"this micro-batch has two weights: {micro.weight:g} by batch_weight of the "
                f"loader, and {told:g} by model.weight(); take one of them"
            )
        weight = told if told is not None and micro.weight else micro.weight
        total = micro.total_weight if told is None else None
        part = Part(weight=weight, samples=micro.count, last=micro.last, total=total)
        # Where the loop has left out the first micro-batch, the step begins with another one.
        first = gradient.step.part is None or micro.index == 0
        by_hand = not first and gradient.step.trained and not gradient.step.waited
        gradient.begin(part, self._calls.start(part) if first else None)
        if by_hand and not self._loop.in_framework:
            warn(refusals.BY_HAND)
        self._seen, self.thread = micro.number, get_ident()
        self._loop.enter(first=first)

    def _size_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if self.weight is not None:
            return self.weight
        first = next((t for t in tensors_in(args, kwargs) if t.dim() > 0), None)
        if first is None:
            raise ValueError(
                "the size of this batch cannot be read from the model's inputs: no tensor with a "
                "first dimension; say it with `with model.weight(n):`"
            )
        return float(first.shape[0])

    # Waiting -------------------------------------------------------------------------------

    def has_begun(self) -> bool:
        """Whether the step has a gradient, or may have one without more of this replica."""
        gradient = self._gradient
        if gradient.step.pending or gradient.step.part is None:
            return gradient.step.pending
        # Nothing was trained so far, but micro-batches or other replicas have it to come.
        elsewhere = not gradient.step.part.last or self._engine.membership.num_processes > 1
        return elsewhere and not gradient.returned

    def step_waits(self) -> bool:
        """Whether `optimizer.step` must not step now.

        More micro-batches of the step are to come, or a replica has left the step.

        Raises:
            RuntimeError: There is no gradient, or it was changed.
        """
        gradient, micro = self._gradient, self._loop.micro_batch
        if gradient.step.result is not None and gradient.step.result.skipped:
            return True
        left_out = micro is not None and micro.training and micro.number != self._seen
        if left_out and micro is not None and gradient.step.part is not None:
            # Left out before its forward pass.
            self._enter(micro)
        if gradient.step.part is None or not self.has_begun():
            raise RuntimeError(refusals.no_backward(gradient.returned))
        if self._calls.unknown_scaler():
            raise RuntimeError(
                "a GradScaler steps this optimizer, and resilin does not know it: its gradients "
                "would be unscaled before they are complete; pass it as scaler="
            )
        gradient.settle()
        if gradient.step.part.last and gradient.step.result is None:
            gradient.conclude_without_backward()
        gradient.step.waited = not gradient.step.complete
        return gradient.step.waited

    def gradient_waits(self) -> bool:
        """Whether `zero_grad` would destroy a part of the step.

        Once the gradient is complete, `zero_grad` before `optimizer.step` leaves the step.
        """
        if self._gradient.step.complete:
            self._calls.left()
        return self._gradient.step.pending

    # The end -------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets the step that is under way, with its gradient."""
        self._gradient.drop()
        self._seen = None

    def ended(self) -> None:
        """The step is over: made, skipped or left."""
        micro = self._loop.micro_batch
        self._over = None if micro is None else micro.number

    def close(self, asked_by: object) -> None:
        """Called when an iteration over a loader asks for the next step: the last one is over.

        A replica that has left its last micro-batch without a backward pass leaves the step, and
        then no replica makes it. Its samples are used up, and do not count.

        Args:
            asked_by: The iteration that asks; None if it is not one over a loader of ours.

        Raises:
            RuntimeError: The gradient of the last step is complete, and was not used.
        """
        gradient = self._gradient
        if gradient.step.complete:
            raise RuntimeError(refusals.NOT_STEPPED)
        if gradient.step.result is not None:
            if not gradient.step.lost:
                warn(refusals.LEFT_BY_ANOTHER)
            self._calls.left()
            return
        if asked_by is not None and self._loop.is_elsewhere(asked_by):
            return  # Of nested or zipped loops, another one says what is trained on.
        micro = self._loop.micro_batch
        if micro is None or not self._left_out(micro):
            if gradient.step.pending:
                warn(refusals.LEFT)
            self.drop()
            self._over = None if micro is None else micro.number
            return
        membership = self._engine.membership
        warn(
            f"replica {membership.replica} of {membership.num_replicas} left the last micro-batch "
            "of a step without a backward pass: no replica makes this step, and its samples do not "
            "count"
        )
        if micro.number != self._seen:
            self._enter(micro)
        gradient.leave()
        self._calls.left()

    def _left_out(self, micro: MicroBatch) -> bool:
        """Whether a last micro-batch was handed out to train on, and no step has ended since.

        Without a gradient, and without other replicas that wait for one, nothing was left.
        """
        if not (micro.training and micro.last):
            return False
        if micro.number == self._over or self._loop.committed:
            return False
        return self._gradient.step.pending or self._engine.membership.num_processes > 1
