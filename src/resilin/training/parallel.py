"""`AdaptiveDataParallel`: the model, the optimizer's gate, and what follows the batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilin.compat.torch_names import keep_from_tracing
from resilin.core import _validate
from resilin.core._warn import warn
from resilin.core.clock import Clock
from resilin.core.hang import Phase
from resilin.core.noise import Noise
from resilin.core.rules import (
    ClipPolicy,
    Factors,
    ScalingRule,
    clip_threshold,
    total_noise,
)
from resilin.engine import overrides
from resilin.telemetry.tensorboard import PREFIX, SummaryWriter, write_scalars
from resilin.training.ballot import Voter
from resilin.training.gates.optimizer import (
    ModuleGate,
    check_optimizer,
    groups_of,
    taken_apart,
)
from resilin.training.gates.others import OtherOptimizers
from resilin.training.gates.patch import Patch, Removable
from resilin.training.gates.scaler import ScalerGate
from resilin.training.gates.scheduler import LOOSE, ClockedScheduler, matched
from resilin.training.gradient.arguments import check_model, divide_replicas
from resilin.training.job import current_job
from resilin.training.scaling.choice import choose_rules
from resilin.training.scaling.estimates import MeasureSchedule, NoiseEstimates
from resilin.training.scaling.factors import StepScaling
from resilin.training.scaling.reference import ReferenceBatch
from resilin.training.state.buffers import UnsavedBuffers
from resilin.training.state.divergence import CrossCheck, DivergenceCheck, decided_by
from resilin.training.state.freezing import Frozen
from resilin.training.state.registry import Stateful
from resilin.training.step import Steps

if TYPE_CHECKING:
    from resilin.training.script.ema import EMA

ScheduleBy = Literal["user", "rule", "samples", "tokens", "progress"]
"""Stepping of the scheduler: by the user's loop, or a clock (`rule`: the clock of the rule)."""


class AdaptiveDataParallel(nn.Module):
    """A data-parallel model whose optimizer follows the batch size.

    Wrap the model after its optimizer (and scheduler) were made; the loop stays as it was. Within
    an `AdaptiveDataLoader` the model knows the split of each step; with any other loader it reads
    the size of its batch from the first tensor that it is called with. After the backward pass of
    a step's last micro-batch, `.grad` is the exact mean gradient of the global batch.

    It assumes that the loss is a mean over the micro-batch (or, with weights, over its tokens),
    and that each micro-batch has one backward pass. BatchNorm statistics still come from single
    micro-batches. The model trains while it is in training mode and gradients are enabled;
    otherwise a call goes straight to the module, with no communication.

    Args:
        model: The module to train. Parameters may be frozen and unfrozen between two steps, on all
            replicas alike.
        optimizer: Its optimizer, or several that step one after the other on one backward pass;
            gated until `release()`.
        lr_scheduler: A scheduler of that optimizer, if there is one; of several, a list in any
            order.
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer. A list
            has one for each optimizer.
        batch_size: The reference batch, over all replicas. Only with a loader that is not an
            `AdaptiveDataLoader`, which brings its own.
        schedule_by: `user` leaves the stepping of the scheduler to your loop, as before. A clock
            steps it once per reference step; then your loop must not.
        scaler: The GradScaler, if you use one.
        stats_every: Measure the noise every so many steps; `auto` as often as `stats_budget`
            allows.
        stats_budget: Time for measuring, as a fraction of the step, under `auto`; None takes 0.01.
        tokens_per_step: Tokens in one reference step, for the `tokens` clock.
        cross_check: Steps between two comparisons of all replicas; `auto`, `off`: `divergence`.
        mesh: The data-parallel mesh of a model that is sharded with `fully_shard`, where it cannot
            be derived from the parameters: other processes then work on the same data.
        **ddp_kwargs: Passed on to DistributedDataParallel, such as `find_unused_parameters`;
            `static_graph` is refused, and a `bucket_cap_mb` below 1 for a compiled module.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        *,
        rule: str | ScalingRule | Sequence[str | ScalingRule] = "auto",
        batch_size: int | None = None,
        schedule_by: ScheduleBy = "user",
        scaler: torch.amp.GradScaler | None = None,
        stats_every: int | Literal["auto"] = "auto",
        stats_budget: float | None = None,
        tokens_per_step: float | None = None,
        cross_check: CrossCheck = "auto",
        mesh: DeviceMesh | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        if batch_size is not None:
            _validate.whole("batch_size", batch_size, at_least=1)
        if tokens_per_step is not None:
            _validate.real("tokens_per_step", tokens_per_step, above=0)
        job = self.job = current_job()
        """The job that trains this model."""
        # What can be refused is refused before anything is changed.
        check_model(model, ddp_kwargs, taken=job.trained is not None)
        optimizers, containers = taken_apart(optimizer)
        for each in optimizers:
            check_optimizer(each)
        rules = choose_rules(overrides.rule() or rule, optimizers)
        schedulers = matched(lr_scheduler, optimizers)
        clocked = ClockedScheduler.make(schedulers, schedule_by, rules[0].clock)
        schedule = MeasureSchedule(stats_every, stats_budget)
        sharding = divide_replicas(
            model, optimizers, mesh, ddp_kwargs, job.engine, scaled=scaler is not None
        )
        self.module = model
        self.optimizers = tuple(optimizers)
        """Its optimizers, in the order of their state in checkpoints."""
        self.tokens_per_step = tokens_per_step
        """Tokens in one reference step, if they are counted."""
        adaptive = any(own.adaptive for own in rules)
        self._scaling = StepScaling(
            rules,
            NoiseEstimates(len(groups_of(optimizers)), schedule, adaptive),
            ReferenceBatch(job.timeline, batch_size, tokens_per_step),
            job.timeline,
            optimizers,
        )
        self._check = DivergenceCheck(
            job.engine,
            job.timeline,
            model,
            cross_check,
            lambda: decided_by(groups_of(optimizers), self.scale, self.gain, self.factors),
            optimizers,
        )
        self._steps = Steps(
            job,
            self,
            model,
            optimizers,
            scaling=self._scaling,
            check=self._check,
            options=ddp_kwargs,
            sharding=sharding,
        )
        self._unsaved = UnsavedBuffers(model)
        self._voters: list[Voter] = [self._check]
        if self._unsaved:
            self._voters.append(self._unsaved)
        self._registered: list[str] = []
        self._gates: list[Removable] = [*self._steps.gates]
        try:
            self._put_gates(clocked, scaler, containers)
            self._register(schedulers, clocked, scaler)
        except BaseException:
            self.release()
            raise
        job.trained = self._steps
        keep_from_tracing("resilin")
        job.voters += self._voters

    def _put_gates(
        self,
        clocked: Sequence[ClockedScheduler | None],
        scaler: torch.amp.GradScaler | None,
        containers: Sequence[Optimizer],
    ) -> None:
        """Makes module, schedulers and scaler wait, as the optimizers do."""
        steps, gates = self._steps, self._gates
        steps.schedulers = [own for own in clocked if own is not None]
        gates.append(ModuleGate(self.module, steps))
        for gate, own in zip(steps.gates, clocked, strict=True):
            gate.schedulers.hand_to(own)
            refuse = partial(_refuse_group, len(gate.optimizer.param_groups))
            gates.append(Patch(gate.optimizer, {"add_param_group": refuse}))
        parameters, iterations = self.module.parameters(), self.job.iterations
        others = OtherOptimizers(steps.gates, containers, parameters, self._keeps, iterations)
        gates.append(others)
        if scaler is not None:
            steps.scaler = ScalerGate(scaler, steps)
            gates.append(steps.scaler)

    def _register(
        self,
        schedulers: Sequence[LRScheduler | None],
        clocked: Sequence[ClockedScheduler | None],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        parts: dict[str, Any] = {
            "model": self.module,
            "frozen": Frozen(self.module),
            "buffers": self._unsaved or None,
            # It compares the optimizers, before that of the state is loaded.
            "noise": self._scaling,
        }
        for number, optimizer in enumerate(self.optimizers):
            parts[f"optimizer{number or ''}"] = optimizer
        for number, (scheduler, own) in enumerate(zip(schedulers, clocked, strict=True)):
            parts[f"scheduler{number or ''}"] = own or scheduler
        parts["scaler"] = scaler
        for name, part in parts.items():
            if part is not None:
                self.job.registry.add(name, part)
                self._registered.append(name)
        for number, (gate, handed) in enumerate(zip(self._steps.gates, schedulers, strict=True)):
            gate.schedulers.keep_in(self.job.registry, handed, f"{LOOSE}{number or ''}")

    def _keeps(self, optimizer: Optimizer) -> bool:
        """Whether the job keeps the state of another optimizer, or keeps none at all."""
        recovery = self.job.recovery
        return recovery is None or not recovery.active or self.job.registry.has(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies of it, also pickled ones, train in no job: what is copied is the module.
        return ModuleCopy, (self.module, self.training)

    def release(self) -> None:
        """Gives optimizer, scheduler and scaler their own methods back. The model stays usable."""
        for name in self._registered:
            self.job.registry.release(name)
        for gate in self._gates:
            gate.remove()
        self._steps.gradient.release()
        for voter in self._voters:
            if voter in self.job.voters:
                self.job.voters.remove(voter)
        if self.job.trained is self._steps:
            self.job.trained = None

    def add_gate(self, gate: Removable) -> None:
        """Removes this gate, too, in `release()`: for integrations that replace methods."""
        self._gates.append(gate)

    def add_average(self, name: str, state: Stateful, average: EMA) -> None:
        """Have an average of the weights follow each step until `release()`; `resilin.EMA` does.

        Args:
            name: Its name in the state of the job.
            state: What has that state.
            average: The average.
        """
        self.job.registry.add(name, state)
        self._registered.append(name)
        self._steps.averages.append(average)

    @property
    def has_averaged_weights(self) -> bool:
        """Whether it has the weights of an average now, within `with ema.applied():`."""
        return self._steps.has_averaged_weights

    # What it knows -------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer; the first one, if there are several."""
        return self.optimizers[0]

    @property
    def rule(self) -> ScalingRule:
        """The scaling rule, of the first optimizer if there are several."""
        return self.rules[0]

    @property
    def rules(self) -> tuple[ScalingRule, ...]:
        """The scaling rule of each optimizer."""
        return self._scaling.rules

    @property
    def gain(self) -> float:
        """Reference steps that the last step was worth."""
        return self._scaling.last.gain

    @property
    def scale(self) -> float:
        """Global batch over reference batch, in the last step."""
        return self._scaling.last.scale

    @property
    def factors(self) -> tuple[Factors, ...]:
        """Factors of the rule for each parameter group in the last step."""
        return self._scaling.last.factors

    @property
    def step_weight(self) -> float | None:
        """Weight of all micro-batches of the step, over all replicas: what its means divide by.

        None until its gradient is complete, and again after `optimizer.step()`.
        """
        result = self._steps.step.result
        return None if result is None else result.weight

    @property
    def noise(self) -> Noise | None:
        """Noise of the whole model's gradient, last step included; waits for the device."""
        return total_noise(self.group_noise)

    @property
    def group_noise(self) -> list[Noise | None]:
        """Noise of each parameter group's gradient; None until it was measured."""
        return self._scaling.estimates.newest()

    @property
    def sample_noise(self) -> Noise | None:
        """The same per sample, also where batches are weighed by something else."""
        return self._scaling.per_sample(self.noise)

    @property
    def clock(self) -> Clock:
        """Steps, samples, tokens and progress so far."""
        return self.job.clock

    @property
    def stepped(self) -> bool:
        """Whether `optimizer.step()` has made a step with the micro-batch that the loop works on.

        It is True once per optimizer step: after `optimizer.step()`, until the loader gives the
        next micro-batch, or the model begins its next forward pass in training. It is False where
        that call waited for more micro-batches of the step, where a GradScaler skipped the step,
        and where the step was lost with a replica and is issued again.
        """
        return self._steps.stepped

    @property
    def progress(self) -> float:
        """Reference steps done so far, by accumulated gain."""
        return self.job.clock.progress

    def predict_gain(self, scale: float) -> float:
        """The gain that a step at this scale would have now."""
        return self._scaling.predict_gain(_validate.real("scale", scale, above=0))

    def to_tensorboard(self, writer: SummaryWriter, step: int, prefix: str = PREFIX) -> None:
        """Writes what the model knows about the last step; only what the loop asks for.

        `resilin.listen(resilin.telemetry.tensorboard.TensorBoard(writer))` does it automatically.

        Args:
            writer: A SummaryWriter, of torch or tensorboardX.
            step: Where it is on the axis.
            prefix: What the tags begin with.
        """
        values = {**self._scaling.scalars(), "progress": self.progress}
        write_scalars(writer, values, step, prefix)

    # The forward pass ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training, as the current micro-batch of the step."""
        steps, job = self._steps, self.job
        if job.recovery is not None and job.trained is steps:
            # A long evaluation counts as progress, and so does a step of many micro-batches.
            job.engine.pulse.beat(Phase.STEP if steps.trains else Phase.BETWEEN, job.clock.steps)
        return steps.forward(args, kwargs) if steps.trains else self.module(*args, **kwargs)

    @contextmanager
    def weight(self, weight: float) -> Iterator[None]:
        """Gives the micro-batch that is trained within this block its weight, such as its tokens.

        The gradient of the step is then the weighted mean over all micro-batches of all replicas.
        Surround the forward pass with it, on every replica.
        """
        self._steps.weight = _validate.real("weight", weight, at_least=0)
        try:
            yield
        finally:
            self._steps.weight = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Does nothing, for loops that had DDP: of a step, only the last micro-batch reduces."""
        warn(
            "model.no_sync() does nothing here: of the micro-batches of a step only the last one "
            "reduces. Leave it out, and call optimizer.step() after each backward pass: it waits "
            "where a step is accumulated"
        )
        return nullcontext()

    @contextmanager
    def using(self, batch: Any) -> Iterator[None]:
        """Says which batch the model trains within this block.

        Only a loop that reads ahead or leaves batches out, and calls the model with other tensors
        than those of the batch, has to say it.

        Args:
            batch: The batch, as the loader gave it.
        """
        self._steps.using = batch
        try:
            yield
        finally:
            self._steps.using = None

    def measures_next(self) -> bool:
        """Whether noise is measured in the next step, if its gradient comes in several parts."""
        return self._steps.measures_next()

    # The step ------------------------------------------------------------------------------

    def step_waits(self) -> bool:
        """Whether `optimizer.step()` would wait now: micro-batches of the step are to come."""
        return self._steps.step_waits()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradient; waits, as that of the optimizer does, while it is accumulated."""
        self.module.zero_grad(set_to_none=set_to_none)

    def change_gradient(self) -> AbstractContextManager[bool]:
        """Allows changes of `.grad` within this block, once the gradient of the step is complete.

        Returns:
            A context manager that gives whether it is. If not, micro-batches are to come, and
            `.grad` must be left alone.
        """
        return self._steps.gradient.changing()

    def turn(self, *optimizers: Optimizer) -> None:
        """Says which optimizers make this step, where players take turns; the others rest.

        Say it in each step, before the first of them steps. All replicas have to say the same. The
        part of the gradient that belongs to the others is not used.

        Args:
            *optimizers: At least one of those that the model was made with.

        Raises:
            ValueError: One of them is another optimizer.
        """
        self._steps.turn(optimizers)

    # Clipping ------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, policy: ClipPolicy = "loosen"
    ) -> Tensor | None:
        """Clips the averaged gradient of the step, once; waits while it is being accumulated.

        Call it where `torch.nn.utils.clip_grad_norm_` stood. The threshold is meant for the
        reference batch and follows the gain as `policy` says. Noise is measured before clipping.

        Args:
            max_norm: The threshold at the reference batch.
            norm_type: As in `torch.nn.utils.clip_grad_norm_`.
            policy: `loosen`, `fixed` or `invariant`; see `resilin.core.rules.clip_threshold`.

        Returns:
            The norm before clipping, or None while micro-batches of the step are to come.
        """
        if not self._steps.has_begun():
            raise RuntimeError("clip_grad_norm_() came before the backward pass of the step")
        if self._steps.step_waits():
            return None
        if self._steps.step.turns:
            raise RuntimeError(
                "clip_grad_norm_() came after an optimizer has stepped with a part of the "
                "gradient: clip before the first of them"
            )
        gain = self._steps.prepare().scaled.gain
        with self.change_gradient():
            return self._steps.gradient.clip(clip_threshold(max_norm, gain, policy), norm_type)


def _refuse_group(present: int, group: dict[str, Any]) -> None:
    raise ValueError(
        f"add_param_group() came after the optimizer was given to AdaptiveDataParallel with "
        f"{present} parameter groups: its factors, the noise and the saved state are those of "
        "these groups; add groups before that, and unfreeze them later with requires_grad_(True)"
    )


class ModuleCopy(nn.Module):
    """What `copy.deepcopy` and pickle make of an `AdaptiveDataParallel`: its module alone.

    It has the same parameters, buffers and names as the original, as `AveragedModel` and other
    averages of the weights need it, and a call goes straight to the module.

    Args:
        module: The copy of the module.
        training: Whether the original was in training mode.
    """

    def __init__(self, module: nn.Module, training: bool = True) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)
