"""One optimizer step after another: plan, accumulate, vote, decide, commit. Read this first.

The loader begins a step (`begin_step`), on all replicas at the same point. Then the calls of the
loop drive it: `forward` for `model(x)`, `_backward_begins` and `_backward_ends` within
`loss.backward()`, `step_waits` and `make_step` within `optimizer.step()`. All that is known of it
is one frozen `Step` (`core.step`), which this module alone replaces.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from resilin.compat.torch_names import after_backward
from resilin.core._warn import warn
from resilin.core.hang import Phase
from resilin.core.membership import Membership
from resilin.core.step import LOST, NOT_STEPPED, Outcome, Part, Reduced, Step
from resilin.training import hints
from resilin.training.ballot import Ballot
from resilin.training.gates.factors import applied
from resilin.training.gates.optimizer import Gate, groups_of
from resilin.training.gates.scaler import ScalerGate, calling_scaler
from resilin.training.gates.scheduler import ClockedScheduler
from resilin.training.gradient import refusals
from resilin.training.gradient.gradient import Gradient
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.sharding import Sharding
from resilin.training.job import Job
from resilin.training.records import MicroBatch, StepSizes
from resilin.training.report.recorder import Recorder
from resilin.training.scaling.factors import Prepared, StepScaling
from resilin.training.start import start
from resilin.training.state.divergence import DivergenceCheck
from resilin.training.state.recovery import Recovery
from resilin.training.tensors import tensors_in

if TYPE_CHECKING:
    from resilin.training.script.ema import EMA

logger = logging.getLogger("resilin")


# Between two steps -----------------------------------------------------------------------------


def begin_step(job: Job, asked_by: object = None) -> Membership:
    """Ends the last step and begins the next one. Called by all replicas before each step.

    Args:
        job: The job.
        asked_by: The iteration that asks for the step; None for a loader that is not resilin's.

    Returns:
        Who takes part in the step.
    """
    begins = job.iterations.begins_step(asked_by)
    recovery, recorder = end_body(job, asked_by, ends_step=begins)
    recovery.between_steps()
    assert job.random is not None
    job.random.begin_step()
    if not begins:
        # Another loader has begun the step: within it nobody joins or leaves.
        return job.engine.membership
    membership = job.engine.begin_step()
    job.timer.begin()
    if job.measured is not None:
        hints.step_begins(job, job.measured)
    recorder.step_begins()
    job.engine.pulse.begin_step()
    if job.live is not None:
        job.live.step_begins()
    return membership


def end_body(
    job: Job, asked_by: object = None, *, ends_step: bool = True
) -> tuple[Recovery, Recorder]:
    """Ends the loop body of the last step, if there was one; it is reported before all else."""
    recovery = start(job)
    if job.trained is not None:
        job.trained.end_body()
        job.trained.close(asked_by)
    assert job.recorder is not None
    if ends_step:
        job.engine.pulse.beat(Phase.BETWEEN, job.clock.steps)
        job.timer.end()
        job.recorder.step_over()
    return recovery, job.recorder


def end_lost_step(job: Job) -> None:
    """Ends a step that was lost with a member, when the loop asks for what follows it."""
    if job.trained is not None and job.trained.step.lost:
        job.trained.commit(Outcome.FAILED)


class Steps:
    """The steps of one model. It is the owner that the gates of its optimizers ask.

    Args:
        job: The job.
        face: The `AdaptiveDataParallel` of the script.
        module: The module that is trained.
        optimizers: The user's optimizers, which step on one gradient.
        scaling: Gain and factors of a step.
        check: Compares the replicas.
        options: Arguments of the user for DistributedDataParallel.
        sharding: Division of the parameters among processes, if they are sharded.
    """

    def __init__(
        self,
        job: Job,
        face: nn.Module,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        scaling: StepScaling,
        check: DivergenceCheck,
        options: dict[str, Any],
        sharding: Sharding | None,
    ) -> None:
        self.job = job
        self.face = face
        self.module = module
        self.optimizers = optimizers
        ends = list(itertools.accumulate(len(each.param_groups) for each in optimizers))
        self._groups = [slice(a, b) for a, b in itertools.pairwise([0, *ends])]
        self.scaling = scaling
        self.scaler: ScalerGate | None = None
        self.schedulers: list[ClockedScheduler] = []
        """The schedulers that a clock steps, the same one."""
        self.due: tuple[int, ...] = tuple(range(len(optimizers)))
        """Numbers of the optimizers that make the next step."""
        self.averages: list[EMA] = []
        """Averages of the weights, which follow each step that is made."""
        self.weight: float | None = None
        """Weight of the micro-batch at hand, if the user says it."""
        self.using: Any = None
        """The batch that the model is called with, if the user says it."""
        self.thread: int | None = None
        """The thread that trains."""
        self._check = check
        engine = job.engine
        per_replica = engine.processes_per_replica
        self._ballot = Ballot(job.voters, engine.wait, processes_per_replica=per_replica)
        self.gradient = Gradient(
            module,
            GroupNorms(groups_of(optimizers), module.parameters()),
            options,
            engine,
            self._ballot,
            sharding,
            backward_begins=self._backward_begins,
        )
        self.now = self.gradient.exchange
        """What has the step under way, which this class alone replaces."""
        self.gates = [Gate(optimizer, self, n) for n, optimizer in enumerate(optimizers)]

    @property
    def step(self) -> Step:
        """The step under way, or the one to come."""
        return self.now.step

    # Questions -----------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.face.training

    @property
    def trains(self) -> bool:
        """Whether a forward pass that begins now is one of training."""
        return self.face.training and torch.is_grad_enabled()

    @property
    def stepped(self) -> bool:
        """Whether a step was made with the micro-batch that the loop works on."""
        return self.now.step.made_with(self._number())

    @property
    def has_averaged_weights(self) -> bool:
        """Whether the weights of the model are those of an average now."""
        return any(average.is_applied for average in self.averages)

    def _number(self) -> int | None:
        micro = self.job.iterations.micro_batch
        return None if micro is None else micro.number

    def _require_own_weights(self) -> None:
        if self.has_averaged_weights:
            raise RuntimeError(
                "the model trains while it has averaged weights: what it learns now would be lost "
                "when its own weights come back. Train outside of `with ema.applied():`, and call "
                "model.eval() or use torch.no_grad() within it"
            )

    def has_begun(self) -> bool:
        """Whether the step has a gradient, or may have one without more of this replica."""
        step = self.now.step
        if step.pending or step.part is None:
            return step.pending
        # Nothing was trained so far, but micro-batches or other replicas have it to come.
        elsewhere = not step.part.last or self.job.engine.membership.num_processes > 1
        return elsewhere and not self.gradient.calls.returned

    def schedule_waits(self) -> bool:
        """Asked by the gate: whether the body works on a step that is incomplete, or not made."""
        micro, step = self.job.iterations.micro_batch, self.now.step
        return step.failed or step.stopped or (micro is not None and not micro.last)

    # 1. A micro-batch: the model is called ---------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module in training, as the current micro-batch of the step."""
        self._require_own_weights()
        iterations, step = self.job.iterations, self.now.step
        values = (args, kwargs) if self.using is None else self.using
        iterations.follow(values, called=step.called, pending=step.pending)
        micro = iterations.micro_batch
        if micro is None:
            self._take_batch(self._size_of(args, kwargs))
        elif micro.training:
            self._take_micro_batch(micro)
        else:
            raise RuntimeError(refusals.EVALUATION)
        with iterations.measured_forward():
            return self.gradient.forward(args, kwargs)

    def _take_batch(self, weight: float) -> None:
        """Takes a batch of any other loader: each is a step of its own.

        Its size is that of the largest call before its backward pass.
        """
        if self.now.step.called:
            self.now.step = self.now.step.reweighed(weight)
        elif self.now.step.part is None or self.now.step.result is not None:
            begin_step(self.job)
            part = Part(weight=weight, samples=round(weight), last=True, total=None)
            self._begin(part, self._opened(part))

    def _take_micro_batch(self, micro: MicroBatch) -> None:
        """Takes the micro-batch that the loader has handed out, if it is a new one."""
        step = self.now.step
        if step.is_in(micro.number):
            return
        if self.weight is not None and micro.total_weight is None:
            raise ValueError(
                f"this micro-batch has two weights: {micro.weight:g} by batch_weight of the "
                f"loader, and {self.weight:g} by model.weight(); take one of them"
            )
        part = Part(
            number=micro.number,
            weight=self.weight if self.weight is not None and micro.weight else micro.weight,
            samples=micro.count,
            last=micro.last,
            total=micro.total_weight if self.weight is None else None,
        )
        # Where the loop has left out the first micro-batch, the step begins with another one.
        first = step.part is None or micro.index == 0
        self._begin(part, self._opened(part) if first else None)
        if not first and step.accumulated_by_hand and not self.job.iterations.in_framework:
            warn(refusals.BY_HAND)
        self.thread = get_ident()
        self.job.iterations.enter(first=first)

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

    def _opened(self, part: Part) -> Step:
        """The step whose first micro-batch this is, and what is known of it."""
        job = self.job
        # One micro-batch alone has nothing to be compared with.
        several = job.engine.membership.num_replicas > 1 or not part.last
        return self.now.step.opened(
            steps=job.clock.steps,
            measure=several and self.measures_next(),
            seconds=job.timer.usual,
        )

    def measures_next(self) -> bool:
        """Whether noise is measured in the next step, if its gradient comes in several parts."""
        return self.scaling.estimates.due(autoscaled=self.job.sized_by_noise)

    def _begin(self, part: Part, opened: Step | None) -> None:
        """Begins a micro-batch.

        Args:
            part: The micro-batch.
            opened: The step, if a new one begins with it.

        Raises:
            RuntimeError: The step or the micro-batch before it was not ended as it should be.
        """
        gradient = self.gradient
        if opened is not None:
            self._open(opened)
        else:
            self._end_micro_batch()
            if names := gradient.parameters.changed():
                raise RuntimeError(
                    f"requires_grad of {gradient.parameters.describe(names)} was changed in the "
                    "middle of a step, between two of its micro-batches; freeze and unfreeze "
                    "between two optimizer steps"
                )
            gradient.calls.next_micro_batch()
        self.now.step = self.now.step.with_part(part)
        gradient.begin()
        if opened is None:
            gradient.seals.close()

    def _open(self, opened: Step) -> None:
        """Opens a step: whoever is there takes part, with the parameters that are trained now."""
        gradient = self.gradient
        if self.now.step.pending:
            warn(refusals.LEFT)
        self.drop()
        gradient.parameters.check()
        others, changed = gradient.has_other_members(), bool(gradient.parameters.changed())
        if changed:
            gradient.update()
            if not others and gradient.exchange.group is not None:
                # In place of the reduction that the others expect, if they have changed nothing.
                self.now.step = opened.changed()
                gradient.take_part_empty()
        if others or changed:
            gradient.attach()
        self.now.step = opened
        gradient.hooks.begin_step()
        gradient.seals.begin_step()

    def _end_micro_batch(self) -> None:
        """Ends the micro-batch before another one: it was trained, or left out."""
        if self.now.step.in_backward:
            raise RuntimeError(refusals.FAILED)
        self._settle()
        self.gradient.leave_out()

    def _settle(self) -> None:
        """Takes in the micro-batch that is over, before another one changes `.grad`.

        Raises:
            RuntimeError: Somebody changed the gradient.
        """
        self.gradient.seals.verify(complete=self.now.step.complete)
        if self.now.step.fresh and self.now.step.result is None:
            self.now.step = self.now.step.taken_in()
            self.gradient.take_in()

    # 2. Its backward pass --------------------------------------------------------------------

    def _backward_begins(self) -> None:
        """Called when a backward pass reaches the output of a call of the model."""
        step, gradient = self.now.step, self.gradient
        if step.in_backward:
            return
        self.now.step = step.backward_under_way()
        after_backward(self._backward_ends)
        if step.part is None or step.result is not None:
            return  # Its end refuses it.
        gradient.seals.verify(complete=False)
        gradient.seals.open()
        gradient.seals.check_zeroed()
        self.now.step = self.now.step.reached(gradient.calls.weight())

    def _backward_ends(self) -> None:
        """Called at the end of that pass; the last one of this replica reduces, and votes."""
        self.now.step = self.now.step.without_backward()
        self.now.step = step = self.now.step.backward_over()
        self.gradient.calls.check()
        assert step.part is not None
        # DDP has queued its own end by now. Ours comes after it, when gradients are reduced. FSDP
        # may queue its own ends later than ours, and change gradients there.
        after_backward(self._vote if step.part.last else self.gradient.seals.close)

    # 3. The ballot of all replicas -----------------------------------------------------------

    def _vote(self) -> None:
        self._reduce()

    def _reduce(self) -> Reduced:
        """Completes the gradient: from here on, `.grad` is the mean over the global batch.

        Raises:
            RuntimeError: A second backward pass through the last micro-batch.
        """
        gradient = self.gradient
        self.now.step.check_reduced_once()
        if self.now.step.result is None:
            head = gradient.take_part(trained=self.now.step.fresh)
            self.now.step = self.now.step.reduced(LOST if head is None else gradient.complete(head))
            gradient.sync.reduced()
            if self.now.step.complete:
                gradient.seals.close()
        assert self.now.step.result is not None
        return self.now.step.result

    def _leave_replicas(self) -> None:
        """Leaves the step without its last backward pass: no replica makes it."""
        self.now.step = self.now.step.without_backward().leaving()
        if self.gradient.take_part_empty() is None:
            self.now.step = self.now.step.reduced(LOST)

    # 4. `optimizer.step()` decides -----------------------------------------------------------

    def step_waits(self, number: int | None = None) -> bool:
        """Whether `optimizer.step` must not step now.

        More micro-batches of the step are to come, or a replica has left the step.

        Args:
            number: Number of the optimizer; None for any.

        Raises:
            RuntimeError: There is no gradient, or it was changed, or it is not for this optimizer.
        """
        step = self.now.step
        if step.stopped or (step.failed and step.part is None):
            return True
        if number is not None and number not in self.due:
            raise RuntimeError(refusals.not_its_turn(self._name(number)))
        if step.turns:
            # The gradient is complete, and another optimizer may have changed its own part.
            return False
        micro = self.job.iterations.micro_batch
        if micro is not None and micro.training and self.now.step.part is not None:
            # It may be left out before its forward pass.
            self._take_micro_batch(micro)
        if self.now.step.part is None or not self.has_begun():
            raise RuntimeError(refusals.no_backward(self.gradient.calls.returned))
        if self.scaler is None and calling_scaler():
            raise RuntimeError(
                "a GradScaler steps this optimizer, and resilin does not know it: its gradients "
                "would be unscaled before they are complete; pass it as scaler="
            )
        self._settle()
        if self.now.step.part.last and self.now.step.result is None:
            self._end_micro_batch()
            self._reduce()
        self.now.step = self.now.step.asked()
        return self.now.step.waited

    def gradient_waits(self, number: int | None) -> bool:
        """Whether `zero_grad` would destroy a part of the step.

        Once the gradient is complete, `zero_grad` before `optimizer.step` leaves the step.

        Args:
            number: Number of the optimizer; None for the module.
        """
        step = self.now.step
        if step.complete and number is not None and number not in self.due:
            # Nobody looks at its part of the gradient.
            self.gradient.seals.open()
            return False
        if step.turns:
            if number in step.turns:
                return False
            self._end_turns()
        elif step.complete:
            self.leave_step()
        return self.now.step.pending

    def turn(self, optimizers: Sequence[Optimizer]) -> None:
        """Leaves the step that is under way, or to come, to some of the optimizers."""
        numbers = [n for n, own in enumerate(self.optimizers) if any(own is o for o in optimizers)]
        if len(numbers) != len(optimizers) or not numbers:
            given = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(
                f"turn({given}) must name one or more of the {len(self.optimizers)} optimizers "
                "that the AdaptiveDataParallel was made with, each once"
            )
        if self.now.step.turns:
            raise RuntimeError(
                "turn() came after an optimizer has stepped: call it before the first one steps"
            )
        self.due = tuple(numbers)

    def prepare(self) -> Prepared:
        """Turns the complete gradient into gain and factors, once per step."""
        reduced, step = self._reduce(), self.now.step
        if step.prepared is None:
            scaler = self.scaler if step.measure else None
            prepared = self.scaling.prepare(
                reduced,
                self.job.iterations.micro_batch,
                gradient_scale=None if scaler is None else scaler.scale(),
            )
            self.now.step = step = step.with_factors(prepared)
        assert isinstance(step.prepared, Prepared)
        return step.prepared

    def make_step(self, number: int, own: Callable[[], Any]) -> Any:
        """Makes a step whose gradient is complete; called by `optimizer.step`.

        The engine is asked before anything is changed: the parameters of a step that a lost replica
        took part in stay as they were, and it can be issued again. From there to the commit, which
        comes with the last optimizer, no other process is waited for: who survives makes all of it.

        Args:
            number: Number of the optimizer.
            own: Its own `step`.

        Returns:
            Its result; None if the step failed.
        """
        job = self.job
        self._require_own_weights()
        prepared = self.prepare()
        if not self.now.step.made:
            job.iterations.check_unused(told=self.scaling.reference.is_told)
            if not job.engine.all_committed():
                self.commit(Outcome.FAILED)
                return None
            self._check.check(self._ballot.said_to(self._check))
        made = self.now.step.with_turn(number, made=True)
        # Taken for one whose loop has not stepped, if the optimizer raises an error.
        self.now.step = self.now.step.without_turns()
        job.torn = True
        with applied(self.optimizers[number], prepared.scaled.factors[self._groups[number]]):
            result = own()
        self.now.step = made
        self._turn_over()
        return result

    def skip_turn(self, number: int) -> None:
        """Called by the scaler's gate: the gradient of this optimizer was not finite."""
        step = self.now.step
        if step.pending and number not in step.turns:
            # Neither clock nor noise count the samples of a step that all of them skip.
            self.now.step = step.with_turn(number, made=False)
            self._turn_over()

    def _turn_over(self) -> None:
        """Commits the step once all optimizers are done with it."""
        if set(self.now.step.turns) >= set(self.due):
            self._turns_over()
        else:
            # The loop may zero what was used.
            self.gradient.seals.open()

    def _turns_over(self) -> None:
        self.job.torn = False
        self.commit(Outcome.COMMITTED if self.now.step.made else Outcome.SKIPPED)

    def _end_turns(self) -> None:
        """Commits a step in which the loop has stepped some of its optimizers."""
        left = sorted(set(self.due) - set(self.now.step.turns))
        warn(refusals.not_all_stepped(*map(self._name, left)))
        self._turns_over()

    def _name(self, number: int) -> str:
        """How a message calls an optimizer."""
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        alike = kinds.count(kinds[number]) > 1
        return f"{kinds[number]} (optimizer {number})" if alike else kinds[number]

    def leave_step(self) -> None:
        """Called when the loop, here or on another replica, has abandoned the step."""
        self.commit(Outcome.FAILED if self.now.step.lost else Outcome.SKIPPED)

    # 5. Commit: the one place where clock, cursor and scheduler move -------------------------

    def commit(self, outcome: Outcome) -> None:
        """Ends a step with this outcome.

        - committed: clock, averages, report, votes, cursor and scheduler move, in this order;
        - skipped: votes count, and the cursor moves when the loader is asked for the next step;
        - failed: nothing moves, and the loader issues the step again. Buffers and random generators
          keep what the failed attempt did to them. A loader that is not one of resilin's cannot
          issue it again: its samples are lost.
        """
        if outcome is Outcome.COMMITTED:
            self._committed()
        elif outcome is Outcome.SKIPPED:
            self._end_step(outcome, measured=False)
        else:
            self._failed()

    def _committed(self) -> None:
        job, timeline, reference = self.job, self.job.timeline, self.scaling.reference
        prepared, measured = self.now.step.prepared, self.now.step.measure
        assert isinstance(prepared, Prepared)
        reduced, scaled = prepared.reduced, prepared.scaled
        due = [reference.read(scheduler.clock) for scheduler in self.schedulers]
        before, plan, micro = timeline.clock, job.iterations.plan, job.iterations.micro_batch
        samples = reduced.samples
        timeline.clock = before.advance(
            samples=samples,
            scale=scaled.scale,
            gain=scaled.gain,
            tokens=reduced.weight,
            sample_steps=None if micro is None else micro.sample_steps * (samples / micro.samples),
        )
        self.scaling.made(prepared, measured=measured)
        timeline.last_step = StepSizes(samples, 1 if plan is None else plan.steps)
        for average in self.averages:
            average.follow(before, timeline.clock, reference.of_clock())
        timeline.committed_in = job.engine.membership.generation
        job.engine.committed()
        if job.measured is not None:
            hints.committed(job, job.measured, plan)
        if job.recorder is not None:
            job.recorder.committed(self.scaling, self.optimizers, samples, plan)
        self._end_step(Outcome.COMMITTED, measured=measured)
        job.iterations.commit(timeline.clock.progress - before.progress)
        for scheduler, was in zip(self.schedulers, due, strict=True):
            scheduler.advance(was, reference.read(scheduler.clock), reference.schedule_end(was))

    def _end_step(self, outcome: Outcome, *, measured: bool) -> None:
        """Ends a step that was made or skipped: votes are counted, the next step may begin."""
        self.scaling.estimates.schedule.committed(measured=measured)
        self._ballot.count()
        self._end(outcome, self._number())

    def _end(self, outcome: Outcome, number: int | None) -> None:
        """Ends the gradient of a step; `.grad` is the loop's to zero."""
        if self.now.step.complete:
            self.gradient.seals.use()
        else:
            self.gradient.seals.forget_used()
        self.now.step = self.now.step.ended(outcome, number)
        self.due = tuple(range(len(self.optimizers)))
        self.gradient.forget()

    def _failed(self) -> None:
        """Discards a step, as if it had not begun; none of its votes counts."""
        job = self.job
        self.drop()
        self.due = tuple(range(len(self.optimizers)))
        self.now.step = self.now.step.ended(Outcome.FAILED, self._number())
        reissued = job.iterations.fail()
        if job.live is not None:
            job.live.step_lost()
        # A member that is lost is reported by the launcher, and the step is not lost.
        level = logging.DEBUG if job.live is not None and reissued else logging.WARNING
        logger.log(
            level,
            "step %d failed: not all replicas took part in it. %s",
            job.clock.steps,
            "It is issued again" if reissued else "Its loader cannot issue its samples again",
        )

    # What a loop leaves ----------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets the step that is under way, with its gradient."""
        step = self.now.step
        if step.untouched:
            return
        if step.backwards or step.in_backward:
            self.gradient.parameters.clear_grads()
        self.gradient.abandon()
        self.now.step = step.dropped()
        self.gradient.forget()

    def drop_step(self) -> bool:
        """Discards the current step, with its gradient.

        Returns:
            Whether it could: not if other replicas already have a part of it.
        """
        if self.now.step.result is not None or self.gradient.shared:
            return False
        self.drop()
        return True

    def let_go(self) -> None:
        """Gives up the replicas of a generation that is over, and the step that was lost in it."""
        self.drop()
        self.gradient.let_go()

    def follow_copies(self) -> None:
        """Gives a sharded model of a live job the groups of the present generation."""
        self.gradient.follow_copies()

    def end_body(self) -> None:
        """The loop body of a step is over, or that of one that was given up."""
        if self.now.step.turns:
            self._end_turns()
        for gate in self.gates:
            gate.schedulers.settle(given_up=self.now.step.pending or self.now.step.failed)
        # Others may have made the step, and given it to this replica: it is not issued again then,
        # and what the loop does next belongs to no failed step.
        self.now.step = self.now.step.body_over()

    def close(self, asked_by: object) -> None:
        """Called when an iteration over a loader asks for the next step: the last one is over.

        A replica that has left its last micro-batch without a backward pass leaves the step, and
        then no replica makes it. Its samples are used up, and do not count.

        Args:
            asked_by: The iteration that asks; None if it is not one over a loader of ours.

        Raises:
            RuntimeError: The gradient of the last step is complete, and was not used.
        """
        step, iterations = self.now.step, self.job.iterations
        if step.complete:
            raise RuntimeError(NOT_STEPPED)
        if step.stopped:
            if not step.lost:
                warn(refusals.LEFT_BY_ANOTHER)
            self.leave_step()
            return
        if asked_by is not None and iterations.is_elsewhere(asked_by):
            return  # Of nested or zipped loops, another one says what is trained on.
        micro = iterations.micro_batch
        if micro is None or not self._left_out(micro):
            if step.pending:
                warn(refusals.LEFT)
            self.drop()
            self.now.step = self.now.step.passed_over(self._number())
            return
        membership = self.job.engine.membership
        warn(
            f"replica {membership.replica} of {membership.num_replicas} left the last micro-batch "
            "of a step without a backward pass: no replica makes this step, and its samples do not "
            "count"
        )
        self._take_micro_batch(micro)
        self._leave_replicas()
        self.leave_step()

    def _left_out(self, micro: MicroBatch) -> bool:
        """Whether a last micro-batch was handed out to train on, and no step has ended since.

        Without a gradient, and without other replicas that wait for one, nothing was left.
        """
        if not (micro.training and micro.last):
            return False
        if micro.number == self.now.step.ended_at or self.job.iterations.committed:
            return False
        return self.now.step.pending or self.job.engine.membership.num_processes > 1
