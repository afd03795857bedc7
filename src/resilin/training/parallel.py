"""`AdaptiveDataParallel`: the model, the optimizer's gate, and what follows the batch size."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilin.core import _validate
from resilin.core.clock import Clock
from resilin.core.noise import Noise, gain
from resilin.core.rules import (
    ClipPolicy,
    Factors,
    ScalingRule,
    clip_threshold,
    default_rule,
    get_rule,
    group_factors,
    total_noise,
)
from resilin.engine import overrides
from resilin.telemetry.tensorboard import PREFIX, SummaryWriter, write_scalars
from resilin.training.ballot import Ballot
from resilin.training.gates.optimizer import Gate, ModuleGate, applied
from resilin.training.gates.scaler import ScalerGate
from resilin.training.gates.scheduler import ClockedScheduler
from resilin.training.gradient.arguments import check_model
from resilin.training.gradient.flow import StepFlow
from resilin.training.gradient.noise import NoiseEstimates
from resilin.training.gradient.norms import GroupNorms, MeasureSchedule
from resilin.training.gradient.records import Part, StepStart
from resilin.training.gradient.step import StepGradient
from resilin.training.job import current_job
from resilin.training.records import StepSizes
from resilin.training.sizing.reference import ReferenceBatch
from resilin.training.state.divergence import CrossCheck, DivergenceCheck
from resilin.training.state.freezing import Frozen

ScheduleBy = Literal["user", "rule", "samples", "tokens", "progress"]
"""Who steps the scheduler: the user's loop, or a clock (`rule`: the clock of the rule)."""


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
        optimizer: Its optimizer; gated until `release()`.
        lr_scheduler: A scheduler of that optimizer, if there is one.
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer.
        batch_size: The reference batch, over all replicas. Only with a loader that is not an
            `AdaptiveDataLoader`, which brings its own.
        schedule_by: `user` leaves the stepping of the scheduler to your loop, as before. A clock
            steps it once per reference step; then your loop must not.
        scaler: The GradScaler, if you use one.
        stats_every: Measure the noise every so many steps; `auto` as often as `stats_budget`
            allows.
        stats_budget: Time for measuring, as a fraction of the step, under `auto`; None takes 0.02.
        tokens_per_step: Tokens in one reference step, for the `tokens` clock.
        cross_check: Steps between two comparisons of all replicas; `auto`, `off`: `divergence`.
        **ddp_kwargs: Passed on to DistributedDataParallel, such as `find_unused_parameters`;
            `static_graph` is refused, and a `bucket_cap_mb` below 1 for a compiled module.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None = None,
        *,
        rule: str | ScalingRule = "auto",
        batch_size: int | None = None,
        schedule_by: ScheduleBy = "user",
        scaler: torch.amp.GradScaler | None = None,
        stats_every: int | Literal["auto"] = "auto",
        stats_budget: float | None = None,
        tokens_per_step: float | None = None,
        cross_check: CrossCheck = "auto",
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        if batch_size is not None:
            _validate.whole("batch_size", batch_size, at_least=1)
        if tokens_per_step is not None:
            _validate.real("tokens_per_step", tokens_per_step, above=0)
        check_model(model, ddp_kwargs)
        rule = overrides.rule() or rule
        chosen = default_rule(type(optimizer).__name__) if rule == "auto" else get_rule(rule)
        self.module = model
        self.rule: ScalingRule = chosen
        """The scaling rule."""
        self.optimizer = optimizer
        self.tokens_per_step = tokens_per_step
        """Tokens in one reference step, if they are counted."""
        self._estimates = NoiseEstimates(
            len(optimizer.param_groups), MeasureSchedule(stats_every, stats_budget), chosen.adaptive
        )
        self._job = current_job()
        self._check = DivergenceCheck(self._job, model, cross_check)
        self._reference = ReferenceBatch(self._job, batch_size, tokens_per_step)
        self._ballot = Ballot(self._job.voters)
        self._gradient = StepGradient(
            model,
            GroupNorms(optimizer, model.parameters()),
            dict(ddp_kwargs),
            self._job.engine,
            self._ballot.cast,
        )
        self._flow = StepFlow(
            self._job,
            self._gradient,
            start=self._start,
            left=lambda: self.end_step(made=False),
            knows_scaler=scaler is not None,
        )
        self._factors: tuple[Factors, ...] = (Factors(),) * len(optimizer.param_groups)
        self._gain = 1.0
        self._scale = 1.0
        self._step_seconds: deque[float] = deque(maxlen=9)
        self._committed_at = time.perf_counter()
        self._prepared: tuple[int, float] | None = None
        self._scheduler = ClockedScheduler.make(lr_scheduler, schedule_by, chosen.clock)
        self._gate = Gate(optimizer, self)
        self._gate.schedulers.hand_to(self._scheduler)
        self._module_gate = ModuleGate(model, self)
        self._scaler = None if scaler is None else ScalerGate(scaler, optimizer, self)
        self._job.model = self
        self._job.voters.append(self._check)
        self._register(lr_scheduler, scaler)

    def _register(self, scheduler: LRScheduler | None, scaler: torch.amp.GradScaler | None) -> None:
        parts: dict[str, Any] = {
            "model": self.module,
            "frozen": Frozen(self.module),
            "optimizer": self.optimizer,
            "noise": self._estimates,
            "scheduler": self._scheduler or scheduler,
            "scaler": scaler,
        }
        self._registered = [name for name, part in parts.items() if part is not None]
        for name in self._registered:
            self._job.registry.add(name, parts[name])
        self._gate.schedulers.keep_in(self._job.registry, handed_over=scheduler)

    def release(self) -> None:
        """Gives optimizer, scheduler and scaler their own methods back. The model stays usable."""
        for name in self._registered:
            self._job.registry.release(name)
        self._gate.remove()
        self._module_gate.remove()
        self._gradient.release()
        self._check.leave()
        if self._scaler is not None:
            self._scaler.release()
        if self._job.model is self:
            self._job.model = None

    # What it knows -------------------------------------------------------------------------

    @property
    def gain(self) -> float:
        """Reference steps that the last step was worth."""
        return self._gain

    @property
    def scale(self) -> float:
        """Global batch over reference batch, in the last step."""
        return self._scale

    @property
    def factors(self) -> tuple[Factors, ...]:
        """What the rule applied to each parameter group in the last step."""
        return self._factors

    @property
    def step_weight(self) -> float | None:
        """Weight of all micro-batches of the step, over all replicas: what its means divide by.

        None until its gradient is complete, and again behind `optimizer.step()`.
        """
        result = self._gradient.result
        return None if result is None else result.weight

    @property
    def noise(self) -> Noise | None:
        """Noise of the whole model's gradient; None until it was measured."""
        return total_noise(self.group_noise)

    @property
    def group_noise(self) -> list[Noise | None]:
        """Noise of each parameter group's gradient."""
        return self._estimates.group_noise

    @property
    def sample_noise(self) -> Noise | None:
        """The same per sample, also where batches are weighed by something else."""
        noise = self.noise
        return (
            None
            if noise is None
            else replace(noise, trace=noise.trace / self._reference.per_sample())
        )

    def sync_seconds(self) -> float | None:
        """How long the newest step that is known waited for the reduction of its gradient."""
        return self._gradient.sync.seconds()

    @property
    def clock(self) -> Clock:
        """Steps, samples, tokens and progress so far."""
        return self._job.clock

    @property
    def progress(self) -> float:
        """Reference steps done so far, by accumulated gain."""
        return self._job.clock.progress

    def predict_gain(self, scale: float) -> float:
        """The gain that a step at this scale would have now."""
        _validate.real("scale", scale, above=0)
        reference = self._reference.weight(self._reference.per_sample())
        return gain(self.noise, scale * reference, reference)

    def to_tensorboard(self, writer: SummaryWriter, step: int, prefix: str = PREFIX) -> None:
        """Writes what the model knows about the last step; only what the loop asks for.

        `resilin.listen(resilin.telemetry.tensorboard.TensorBoard(writer))` does it by itself.

        Args:
            writer: A SummaryWriter, of torch or tensorboardX.
            step: Where it is on the axis.
            prefix: What the tags begin with.
        """
        values = {
            "gain": self.gain,
            "scale": self.scale,
            "progress": self.progress,
            "lr_factor": self.factors[0].lr,
        }
        noise = self.sample_noise
        if noise is not None:
            values.update(sqr_norm=noise.sqr_norm, trace=noise.trace)
        write_scalars(writer, values, step, prefix)

    # The forward pass ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training, as the current micro-batch of the step."""
        if not (self.training and torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        self._flow.begin(args, kwargs)
        with self._measured_forward():
            return self._gradient.forward(*args, **kwargs)

    def _measured_forward(self) -> AbstractContextManager[None]:
        current = self._job.iterations.current
        return nullcontext() if current is None else current.measured_forward()

    @contextmanager
    def weight(self, weight: float) -> Iterator[None]:
        """Gives the micro-batch that is trained within this block its weight, such as its tokens.

        The gradient of the step is then the weighted mean over all micro-batches of all replicas.
        Surround the forward pass with it, on every replica.
        """
        self._flow.weight = _validate.real("weight", weight, at_least=0)
        try:
            yield
        finally:
            self._flow.weight = None

    def measures_next(self) -> bool:
        """Whether noise is measured in the next step, if its gradient comes in several parts."""
        return self._estimates.due(autoscaled=self._job.autoscaler is not None)

    def splits_next(self, scale: float) -> bool:
        """Whether one replica splits the next step, of this scale, to measure its noise."""
        return self._estimates.due(autoscaled=self._job.autoscaler is not None, split_at=scale)

    def _start(self, part: Part) -> StepStart:
        # The median: an evaluation between two steps is not a long step.
        usual = statistics.median(self._step_seconds) if self._step_seconds else math.inf
        # One micro-batch alone has nothing to be compared with.
        several = self._job.engine.num_replicas > 1 or not part.last
        measure = several and self.measures_next()
        return StepStart(measure=measure, step_seconds=usual, steps=self._job.clock.steps)

    # The step ------------------------------------------------------------------------------

    def step_waits(self) -> bool:
        """Asked by the gates: whether the optimizer must not step now."""
        return self._flow.step_waits()

    def step_pending(self) -> bool:
        """Asked by the scaler's gate: whether a gradient is there that was not used yet."""
        return self._gradient.pending

    def gradient_waits(self) -> bool:
        """Asked by the gates: whether `zero_grad` would destroy a part of the step."""
        return self._flow.gradient_waits()

    def close_step(self, asked_by: object = None) -> None:
        """Called when an iteration over a loader asks for the next step: the last one is over."""
        self._flow.close(asked_by)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradient; waits, as that of the optimizer does, while it is accumulated."""
        self.module.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def change_gradient(self) -> Iterator[bool]:
        """Allows changes of `.grad` within this block, once the gradient of the step is complete.

        Yields:
            Whether it is. If not, micro-batches are to come, and `.grad` must be left alone.
        """
        with self._gradient.changing():
            yield self._gradient.complete

    def schedule_waits(self) -> bool:
        """Asked by the gate: whether the loop body works on a step that is incomplete, or left."""
        micro, result = self._job.micro_batch, self._gradient.result
        if result is not None and result.skipped:
            return True
        return micro is not None and not micro.last

    def _prepare(self) -> tuple[int, float]:
        """Turns the complete gradient into gain and factors, once per step."""
        if self._prepared is not None:
            return self._prepared
        reduced = self._gradient.conclude()
        micro = self._job.micro_batch
        samples = reduced.samples
        scale = samples / self._reference.weight(1.0)
        if micro is not None:
            # Less where the loop has left micro-batches out.
            scale = micro.scale * (samples / micro.samples)
        per_sample = reduced.weight / samples
        reference = self._reference.weight(per_sample)
        self._estimates.take_in(
            reduced.noise,
            weight=reduced.weight,
            # The loss scale multiplies gradients; it must not reach the noise.
            gradient_scale=1.0 if self._scaler is None else self._scaler.scale(),
            reference=reference,
            total_steps=self._job.total_steps,
        )
        noise = self.group_noise
        self._scale = scale
        self._gain = gain(total_noise(noise), scale * reference, reference)
        self._factors = group_factors(
            self.rule,
            batch_size=scale * reference,
            reference=reference,
            noise=noise,
            elapsed=self._reference.read(self.rule.clock),
        )
        if self._gradient.measure:
            self._estimates.schedule.observe(reduced.cost)
        self._prepared = (samples, reduced.weight)
        return self._prepared

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surrounds the optimizer's own step: factors before it, the commit after it."""
        samples, weight = self._prepare()
        with applied(self.optimizer, self._factors):
            yield
        self._commit(samples, weight)

    def _commit(self, samples: int, weight: float) -> None:
        job, micro, scheduler = self._job, self._job.micro_batch, self._scheduler
        before = 0.0 if scheduler is None else self._reference.read(scheduler.clock)
        job.timeline.clock = job.clock.advance(
            samples=samples,
            scale=self._scale,
            gain=self._gain,
            tokens=weight,
            sample_steps=None if micro is None else micro.sample_steps * (samples / micro.samples),
        )
        current = job.iterations.current
        plan = None if current is None else current.plan
        job.timeline.last_step = StepSizes(samples, 1 if plan is None else plan.steps)
        if job.recorder is not None:
            job.recorder.committed(self, samples)
        self.end_step()
        job.iterations.commit()
        if scheduler is not None:
            after = self._reference.read(scheduler.clock)
            scheduler.advance(before, after, self._reference.schedule_end(before))

    def body_over(self) -> None:
        """The loop body of a step is over, or that of one that was given up."""
        self._gate.schedulers.settle(given_up=self._gradient.pending)

    def drop_step(self) -> bool:
        """Forgets the step that is under way, with its gradient.

        Returns:
            Whether it could: not if other replicas have a part of it already.
        """
        if self._gradient.shared:
            return False
        self._flow.drop()
        self._prepared = None
        return True

    def end_step(self, *, made: bool = True) -> None:
        """Makes ready for the next step.

        Args:
            made: False if the loop has left the step; True if the optimizer has stepped, or a
                GradScaler has skipped it.
        """
        now = time.perf_counter()
        self._flow.ended()
        self._estimates.schedule.committed(measured=made and self._gradient.measure)
        self._step_seconds.append(now - self._committed_at)
        self._committed_at = now
        self._ballot.count(self._gradient.votes())
        self._gradient.end()
        self._prepared = None

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
        if not self._flow.has_begun():
            raise RuntimeError("clip_grad_norm_() came before the backward pass of the step")
        if self.step_waits():
            return None
        self._prepare()
        threshold = clip_threshold(max_norm, self._gain, policy)
        with self.change_gradient():
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), threshold, norm_type)
