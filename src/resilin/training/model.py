"""`TrainedModel`: a model as its job knows it, from its gradient to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from resilin.core.clock import Clock, Reference
from resilin.core.plan import BatchPlan
from resilin.core.rules import ScalingRule
from resilin.training.ballot import Ballot
from resilin.training.data.iteration import Iterations
from resilin.training.gates.factors import applied
from resilin.training.gates.optimizer import Gate, ModuleGate
from resilin.training.gates.others import OtherOptimizers
from resilin.training.gates.patch import Patch, Removable
from resilin.training.gates.scaler import ScalerGate
from resilin.training.gates.scheduler import ClockedScheduler, SchedulerGate
from resilin.training.gradient.flow import StepFlow
from resilin.training.gradient.records import Reduced
from resilin.training.gradient.step import StepGradient
from resilin.training.records import StepOutcome, StepSizes
from resilin.training.scaling.factors import StepScaling
from resilin.training.state.divergence import DivergenceCheck


class Ends(NamedTuple):
    """The two ends of a step, given by the lifecycle of the job."""

    make_step: Callable[[Callable[[], Any]], Any]
    """Makes a step whose gradient is complete, with the optimizer's own method."""
    commit_step: Callable[[StepOutcome], None]
    """Ends a step with this outcome."""


class Average(Protocol):
    """An average of the weights that follows the steps of a model."""

    @property
    def is_applied(self) -> bool:
        """Whether the model has the averaged weights now, in place of its own."""
        ...

    def follow(self, before: Clock, after: Clock, reference: Reference) -> None:
        """Take in the weights after a step.

        Args:
            before: The clock before the step.
            after: The clock after it.
            reference: The reference run, in whose steps clocks are read.
        """
        ...


def _refuse_group(present: int, group: dict[str, Any]) -> None:
    raise ValueError(
        f"add_param_group() came after the optimizer was given to AdaptiveDataParallel with "
        f"{present} parameter groups: its factors, the noise and the saved state are those of "
        "these groups; add groups before that, and unfreeze them later with requires_grad_(True)"
    )


class TrainedModel:
    """The parts that make steps of a model: gradient, scaling, gates.

    It is the owner that the gates of optimizer, scaler and schedulers ask.

    Args:
        face: The `AdaptiveDataParallel` of the script.
        optimizer: The user's optimizer.
        scaling: Gain and factors of a step.
        gradient: The gradient of a step.
        flow: The calls of the user's loop.
        ballot: What replicas agree on in a step.
        iterations: The micro-batch that the loop works on.
        ends: Functions that end a step.
        check: Compares the replicas.
    """

    def __init__(
        self,
        face: nn.Module,
        optimizer: Optimizer,
        *,
        scaling: StepScaling,
        gradient: StepGradient,
        flow: StepFlow,
        ballot: Ballot,
        iterations: Iterations,
        ends: Ends,
        check: DivergenceCheck,
    ) -> None:
        self.face = face
        self.optimizer = optimizer
        self.scaling = scaling
        self.gradient = gradient
        self.flow = flow
        self.scheduler: ClockedScheduler | None = None
        """The scheduler that a clock steps, if there is one."""
        self.averages: list[Average] = []
        """Averages of the weights, which follow each step that is made."""
        self._ballot = ballot
        self._iterations = iterations
        self._ends = ends
        self._check = check
        self._failed = False
        self._made_in: tuple[int | None] | None = None
        self._gate = Gate(optimizer, self)
        self._gates: list[Removable] = [self._gate]
        self._scaler: ScalerGate | None = None

    # Gates ---------------------------------------------------------------------------------

    @property
    def schedulers(self) -> SchedulerGate:
        """The gate of the optimizer's schedulers."""
        return self._gate.schedulers

    def gate(
        self,
        module: nn.Module,
        scheduler: ClockedScheduler | None,
        scaler: torch.amp.GradScaler | None,
        keeps: Callable[[Optimizer], bool],
    ) -> None:
        """Make the module, the scheduler of a clock and the scaler wait, as the optimizer does.

        Args:
            module: The module that is trained.
            scheduler: The scheduler that a clock steps, if there is one.
            scaler: The GradScaler, if there is one.
            keeps: Whether the job keeps the state of another optimizer.
        """
        self.scheduler = scheduler
        self._gate.schedulers.hand_to(scheduler)
        self.add_gate(ModuleGate(module, self))
        refuse = partial(_refuse_group, len(self.optimizer.param_groups))
        self.add_gate(Patch(self.optimizer, {"add_param_group": refuse}))
        self.add_gate(OtherOptimizers(self._gate, module.parameters(), keeps, self._in_training))
        if scaler is not None:
            self._scaler = ScalerGate(scaler, self.optimizer, self)
            self.add_gate(self._scaler)

    def add_gate(self, gate: Removable) -> None:
        """Remove this gate together with the others, in `release`."""
        self._gates.append(gate)

    def release(self) -> None:
        """Restore the methods of optimizer, schedulers, scaler and module."""
        for gate in self._gates:
            gate.remove()
        self.gradient.release()

    # Queries -------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.face.training

    @property
    def trains(self) -> bool:
        """Whether a forward pass that begins now is one of training."""
        return self.face.training and torch.is_grad_enabled()

    @property
    def rule(self) -> ScalingRule:
        """The scaling rule."""
        return self.scaling.rule

    @property
    def stepped(self) -> bool:
        """Whether a step was made with the micro-batch that the loop works on."""
        return self._made_in == self._at()

    def _at(self) -> tuple[int | None]:
        """The number of that micro-batch; None outside a resilin loader."""
        micro = self._iterations.micro_batch
        return (None if micro is None else micro.number,)

    def _in_training(self) -> bool:
        micro = self._iterations.micro_batch
        return micro is not None and micro.training

    def step_waits(self) -> bool:
        """Asked by the gates: whether the optimizer must not step now."""
        return self.flow.step_waits()

    def step_pending(self) -> bool:
        """Asked by the scaler's gate: whether a gradient is there that was not used yet."""
        return self.gradient.step.pending

    def step_failed(self) -> bool:
        """Asked by the scaler's gate: whether the step failed, and is issued again."""
        return self._failed

    def gradient_waits(self) -> bool:
        """Asked by the gates: whether `zero_grad` would destroy a part of the step."""
        return self.flow.gradient_waits()

    def schedule_waits(self) -> bool:
        """Asked by the gate: whether the body works on a step that is incomplete, or not made."""
        micro, result = self._iterations.micro_batch, self.gradient.step.result
        if self._failed or (result is not None and result.skipped):
            return True
        return micro is not None and not micro.last

    @contextmanager
    def change_gradient(self) -> Iterator[bool]:
        """Allows changes of `.grad` within this block, once the gradient of the step is complete.

        Yields:
            Whether it is. If not, more micro-batches follow, and `.grad` must not be changed.
        """
        with self.gradient.changing():
            yield self.gradient.step.complete

    # A step --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass of training begins."""
        self._made_in = None
        self._require_own_weights()

    @property
    def has_averaged_weights(self) -> bool:
        """Whether the weights of the model are those of an average now."""
        return any(average.is_applied for average in self.averages)

    def _require_own_weights(self) -> None:
        if self.has_averaged_weights:
            raise RuntimeError(
                "the model trains while it has averaged weights: what it learns now would be lost "
                "when its own weights come back. Train outside of `with ema.applied():`, and call "
                "model.eval() or use torch.no_grad() within it"
            )

    def begin_step(self) -> None:
        """A step begins with its first forward pass."""
        self._failed = False

    def prepare(self) -> Reduced:
        """Turns the complete gradient into gain and factors, once per step."""
        if self.scaling.prepared is not None:
            return self.scaling.prepared
        reduced, measured = self.gradient.conclude(), self.gradient.step.measure
        scaler = self._scaler if measured else None
        self.scaling.prepare(
            reduced,
            self._iterations.micro_batch,
            measured=measured,
            gradient_scale=None if scaler is None else scaler.scale(),
        )
        return reduced

    def make_step(self, own: Callable[[], Any]) -> Any:
        """Asked by the gate: makes the step, with the optimizer's own method."""
        self._require_own_weights()
        return self._ends.make_step(own)

    def check_replicas(self) -> None:
        """Refuses a step if the replicas differ."""
        self._check.check(self._ballot.said_to(self._check))

    def step_optimizer(self, own: Callable[[], Any]) -> Any:
        """Steps the optimizer, by the factors of the rule."""
        with applied(self.optimizer, self.scaling.last.factors):
            return own()

    def skip_step(self) -> None:
        """Called by the scaler's gate: the gradient was not finite."""
        self._ends.commit_step(StepOutcome.SKIPPED)

    def leave_step(self) -> None:
        """Called when the loop, here or on another replica, has abandoned the step."""
        if self.gradient.step.lost:
            self._ends.commit_step(StepOutcome.FAILED)
            return
        self._ends.commit_step(StepOutcome.SKIPPED)

    def advance(self, clock: Clock, plan: BatchPlan | None) -> tuple[Clock, StepSizes]:
        """The clock after the step that was made, and its sizes.

        Args:
            clock: The clock before it.
            plan: How it was split; None without a loader of resilin.
        """
        reduced, scaled = self.prepare(), self.scaling.last
        micro, samples = self._iterations.micro_batch, reduced.samples
        after = clock.advance(
            samples=samples,
            scale=scaled.scale,
            gain=scaled.gain,
            tokens=reduced.weight,
            sample_steps=None if micro is None else micro.sample_steps * (samples / micro.samples),
        )
        return after, StepSizes(samples, 1 if plan is None else plan.steps)

    def made_step(self, before: Clock, after: Clock) -> None:
        """Notes that a step was made, and has the averages of the weights follow it.

        Args:
            before: The clock before it.
            after: The clock after it.
        """
        self._made_in = self._at()
        if self.averages:
            reference = self.scaling.reference.of_clock()
            for average in self.averages:
                average.follow(before, after, reference)

    def read_schedule(self) -> float:
        """Reading of the clock that steps the scheduler, in reference steps; 0 without one."""
        if self.scheduler is None:
            return 0.0
        return self.scaling.reference.read(self.scheduler.clock)

    def advance_schedule(self, before: float) -> None:
        """Steps the scheduler of a clock for the reference steps that a step has completed.

        Args:
            before: The reading before the step.
        """
        if self.scheduler is not None:
            end = self.scaling.reference.schedule_end(before)
            self.scheduler.advance(before, self.read_schedule(), end)

    def end_step(self, *, measured: bool) -> None:
        """Ends a step that was made or skipped: votes are counted, the next step may begin.

        Args:
            measured: Whether it was made, and its noise was measured.
        """
        self.flow.ended()
        self.scaling.estimates.schedule.committed(measured=measured)
        self._ballot.count()
        self.gradient.end()
        self.scaling.end()

    def fail_step(self) -> None:
        """Discard a step that failed, as if it had not begun; none of its votes counts."""
        self.flow.ended()
        self.flow.drop()
        self.scaling.take_back()
        self._failed = True

    def drop_step(self) -> bool:
        """Discard the current step, with its gradient.

        Returns:
            Whether it could: not if other replicas already have a part of it.
        """
        if self.gradient.shared:
            return False
        self.flow.drop()
        self.scaling.end()
        return True

    def end_body(self) -> None:
        """The loop body of a step is over, or that of one that was given up."""
        self._gate.schedulers.settle(given_up=self.gradient.step.pending or self._failed)
        # Others may have made the step, and given it to this replica: it is not issued again then,
        # and what the loop does next belongs to no failed step.
        self._failed = False
