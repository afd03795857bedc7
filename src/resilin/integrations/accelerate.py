"""Accelerate: `prepare` in place of `accelerator.prepare`.

Accelerate keeps devices, mixed precision, evaluation, trackers and its checkpoint folders. The step
is resilin's: an `AdaptiveDataLoader` deals out the samples, an `AdaptiveDataParallel` weighs
gradients, and a clock steps the scheduler. They set in the accelerator which micro-batch completes
a step, so `accelerator.accumulate`, `sync_gradients` and `clip_grad_norm_` refer to the step at any
batch size and any number of processes. With an FSDP plugin of version 2 Accelerate shards the model
(`accelerate_sharded`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilin.compat import accelerate_names
from resilin.core.rules import ScalingRule
from resilin.integrations.accelerate_sharded import (
    refuse_kind,
    shard,
    sharded_methods,
)
from resilin.integrations.folders import load_state, read_state, save_state
from resilin.telemetry.extras import load
from resilin.training.bridge.home import Home, refuse_live_framework, refuse_sharded
from resilin.training.bridge.placed_loader import PlacedLoader
from resilin.training.bridge.readout import read_out
from resilin.training.gates.patch import Patch
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy

refuse_live_framework()

__all__ = ["ElasticLoader", "SteppedByClock", "prepare", "read_out"]

_utils: Any = load("accelerate.utils", "hf", "resilin.integrations.accelerate")
_accelerate_optimizer: Any = load("accelerate.optimizer", "hf", "resilin.integrations.accelerate")
_accelerate_scheduler: Any = load("accelerate.scheduler", "hf", "resilin.integrations.accelerate")


def prepare(
    accelerator: Any,
    *things: Any,
    rule: str | ScalingRule = "auto",
    schedule_by: ScheduleBy = "rule",
    **adaptive: Any,
) -> tuple[Any, ...]:
    """Prepare the parts of an elastic training loop, as `accelerator.prepare` does.

    Give it the model, its optimizer or several that step on one backward pass, the
    `AdaptiveDataLoader` that trains, and a scheduler of each optimizer if there is one, in any
    order; other objects, such as loaders for evaluation, go to `accelerator.prepare`. The loop
    stays as it is. `accelerator.save_state` and `load_state` then also carry clocks, cursor and
    noise, so that a loop over `resilin.remaining_epochs_until` resumes in the middle of an epoch,
    at another number of processes.

    A scheduler is written per step of the reference batch. Its clock steps it; `scheduler.step()`
    may stay in the body of the loop and does nothing. Outside the loop over the data it is an
    error: a scheduler of epochs needs `schedule_by="user"`.

    Args:
        accelerator: The Accelerator.
        *things: Objects to prepare.
        rule: As in `AdaptiveDataParallel`.
        schedule_by: Who steps the scheduler: `rule`, a clock, or `user` for your loop.
        **adaptive: More arguments of `AdaptiveDataParallel`, such as `stats_every`.

    Returns:
        The prepared things, in the order given.

    Raises:
        ValueError: A part is missing or given twice, or the accelerator has a setting that
            resilin does not support.
    """
    refuse(accelerator)
    model = _only("model", nn.Module, things)
    optimizers = [thing for thing in things if isinstance(thing, Optimizer)]
    if len(optimizers) > 1:
        _refuse_several(accelerator)
    loader = _only("AdaptiveDataLoader", AdaptiveDataLoader, things)
    schedulers = [thing for thing in things if isinstance(thing, LRScheduler)]
    if any(isinstance(each, _accelerate_scheduler.AcceleratedScheduler) for each in things):
        raise ValueError(
            "the scheduler is an AcceleratedScheduler already, which steps once per process: pass "
            "the scheduler that accelerator.prepare() was given"
        )
    by_loop = schedulers and not accelerator.step_scheduler_with_optimizer
    if by_loop and schedule_by != "user":
        raise ValueError(
            "step_scheduler_with_optimizer (False) leaves the scheduler to the loop: schedule_by "
            f"({schedule_by!r}) must be 'user'"
        )
    wrapped, stepped, shown = wrap(
        accelerator,
        model,
        optimizers,
        schedulers,
        rule=rule,
        schedule_by=schedule_by,
        **adaptive,
    )
    accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: save_state(directory, write=_writes(accelerator))
    )
    accelerator.register_load_state_pre_hook(
        lambda models, directory: load_state(read_state(directory))
    )
    ours: dict[int, Any] = {id(model): wrapped, id(loader): ElasticLoader(loader, accelerator)}
    for scheduler, seen in zip(schedulers, shown, strict=True):
        accelerate_names.add_scheduler(accelerator, seen)
        ours[id(scheduler)] = seen
    for optimizer, own in zip(optimizers, stepped, strict=True):
        ours[id(optimizer)] = accelerator.prepare_optimizer(own)
    return tuple(
        ours[id(thing)] if id(thing) in ours else accelerator.prepare(thing) for thing in things
    )


def _only(what: str, kind: type[Any], things: tuple[Any, ...]) -> Any:
    found = [thing for thing in things if isinstance(thing, kind)]
    if len(found) != 1:
        raise ValueError(f"prepare() takes exactly one {what}, and was given {len(found)}")
    return found[0]


def _refuse_several(accelerator: Any) -> None:
    """Reject settings with which several optimizers cannot make one step."""
    if accelerator.scaler is not None:
        raise ValueError(
            f"mixed_precision ({accelerator.mixed_precision}) must be 'no' or 'bf16' with several "
            "optimizers: each step of an AcceleratedOptimizer updates the scaler, before the "
            "others have used it"
        )
    if accelerate_names.uses_fsdp2(accelerator):
        raise ValueError("FSDP2 by Accelerate must have one optimizer")


def refuse(accelerator: Any) -> None:
    """Reject settings of the accelerator that resilin does not support.

    Raises:
        ValueError: Names the setting, its value and the value that it must have.
        MissingNameError: This version of Accelerate lacks a name that resilin needs.
    """
    accelerate_names.check(accelerator)
    refuse_kind(accelerator)
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps ({accelerator.gradient_accumulation_steps}) must be 1: "
            "the AdaptiveDataLoader accumulates, as its batch_size and max_local_bsz say"
        )
    if accelerator.dispatch_batches:
        raise ValueError(
            f"dispatch_batches ({accelerator.dispatch_batches}) must not be set: each process "
            "reads its own samples"
        )
    hook = str(getattr(accelerator.ddp_handler, "comm_hook", "no"))
    if hook != "no":
        raise ValueError(
            f"comm_hook ({hook}) must be 'no': the weighted sum of gradients is a hook itself"
        )


def wrap(
    accelerator: Any,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    **adaptive: Any,
) -> tuple[AdaptiveDataParallel, list[Any], list[Any]]:
    """Wrap a model that the accelerator has not seen, and connect the accelerator to its step.

    With FSDP2, the accelerator shards the model before.

    Args:
        accelerator: The Accelerator.
        model: The model; goes to the device and gets mixed precision from the accelerator.
        optimizers: Its optimizers, bare or prepared.
        schedulers: Their schedulers, if any.
        **adaptive: Arguments of `AdaptiveDataParallel`.

    Returns:
        The model, the optimizers (which the accelerator has prepared if it shards), and the
        schedulers as the loop should see them.

    Raises:
        ValueError: The model is wrapped already.
    """
    if accelerator.unwrap_model(model) is not model:
        raise ValueError(
            f"the model is a {type(model).__name__} already: it must be the bare model, which "
            "becomes an AdaptiveDataParallel"
        )
    handler = accelerator.ddp_handler
    ddp = {} if handler is None else handler.to_kwargs()
    if accelerate_names.uses_fsdp2(accelerator):
        (optimizer,) = optimizers
        prepared, sharded = shard(accelerator, model, optimizer)
        stepped = [sharded]
    else:
        refuse_sharded(model, "let Accelerate shard it, with fsdp_version=2 in its FSDP plugin")
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        accelerate_names.mark_prepared(prepared)
        stepped = list(map(bare_optimizer, optimizers))
    if not schedulers:
        adaptive["schedule_by"] = "user"
    wrapped = AdaptiveDataParallel(
        prepared,
        list(map(bare_optimizer, optimizers)),
        schedulers,
        scaler=accelerator.scaler,
        **{**ddp, **adaptive},
    )
    wrapped.add_gate(_connect(accelerator, wrapped))
    # accelerator.accumulate() calls it, and need not be left out.
    wrapped.add_gate(Patch(wrapped, {"no_sync": nullcontext}))
    if adaptive["schedule_by"] == "user":
        return wrapped, stepped, list(schedulers)
    return wrapped, stepped, list(map(SteppedByClock, schedulers))


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer without the wrapper of Accelerate."""
    while isinstance(optimizer, _accelerate_optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _connect(accelerator: Any, trained: AdaptiveDataParallel) -> Patch:
    """Connect the accelerator to the steps of the job, and to the module inside the model."""
    kind = type(accelerator)

    def is_trained(parameters: list[Any]) -> bool:
        return Home().job.model is trained and _all_in(parameters, trained)

    def unwrap_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        inner = model.module if isinstance(model, AdaptiveDataParallel) else model
        return kind.unwrap_model(accelerator, inner, *args, **kwargs)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        listed = list(parameters)
        if not is_trained(listed):
            return kind.clip_grad_norm_(accelerator, listed, max_norm, norm_type)
        if not completes_step():
            return None
        if math.isinf(max_norm):
            # The caller wants the norm alone.
            with trained.change_gradient():
                if accelerate_names.uses_fsdp2(accelerator):
                    return Home().clip(max_norm, norm_type)
                return kind.clip_grad_norm_(accelerator, listed, max_norm, norm_type)
        accelerator.unscale_gradients()
        return trained.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        listed = list(parameters)
        if not is_trained(listed):
            kind.clip_grad_value_(accelerator, listed, clip_value)
        elif completes_step():
            with trained.change_gradient():
                kind.clip_grad_value_(accelerator, listed, clip_value)

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if num_batches and isinstance(dataloader, ElasticLoader | AdaptiveDataLoader):
            raise ValueError(
                f"num_batches ({num_batches}) must be 0 for an AdaptiveDataLoader: it resumes at "
                "its cursor, which load_state() restores"
            )
        return (
            dataloader
            if not num_batches
            else kind.skip_first_batches(accelerator, dataloader, num_batches)
        )

    return Patch(
        accelerator,
        {
            "unwrap_model": unwrap_model,
            "clip_grad_norm_": clip_grad_norm_,
            "clip_grad_value_": clip_grad_value_,
            "skip_first_batches": skip_first_batches,
            **(
                sharded_methods(accelerator, trained)
                if accelerate_names.uses_fsdp2(accelerator)
                else {}
            ),
            accelerate_names.SYNC: lambda: update_sync(accelerator),
        },
    )


def _all_in(parameters: list[Any], model: nn.Module) -> bool:
    """Whether there are any parameters, and all of them are the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return bool(parameters) and all(id(parameter) in own for parameter in parameters)


def completes_step() -> bool:
    """Whether the current micro-batch is the last one of its step on this replica."""
    micro_batch = Home().micro_batch
    return micro_batch is None or micro_batch.last


def update_sync(accelerator: Any) -> None:
    """Set in the accelerator whether the current micro-batch completes a step."""
    accelerate_names.set_completes(accelerator, completes_step())


class ElasticLoader(PlacedLoader):
    """An `AdaptiveDataLoader` whose batches are on the accelerator's device.

    Everything but iterating is that of the loader itself, such as `set_batch_size`.
    """

    def __init__(self, loader: AdaptiveDataLoader, accelerator: Any) -> None:
        def place(batch: Any) -> Any:
            update_sync(accelerator)
            if not accelerator.device_placement:
                return batch
            return _utils.send_to_device(
                batch, accelerator.device, non_blocking=accelerator.non_blocking
            )

        super().__init__(loader, place)
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        finally:
            accelerate_names.set_completes(self._accelerator, True)


class SteppedByClock:
    """A scheduler that a clock of the job steps, for a loop that would step it itself."""

    def __init__(self, scheduler: LRScheduler | ReduceLROnPlateau) -> None:
        self.scheduler = scheduler

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing: the clock has stepped the scheduler together with the optimizer.

        Raises:
            RuntimeError: The call is outside the loop over the data, as for a scheduler of epochs.
        """
        if Home().job.loader is None:
            raise RuntimeError(
                "scheduler.step() was called outside the loop over the AdaptiveDataLoader, but a "
                "clock steps this scheduler, once per reference step; a scheduler of epochs needs "
                "schedule_by='user'"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


def _writes(accelerator: Any) -> bool:
    """Whether this process writes the state that is the same on all processes."""
    if accelerator.project_configuration.save_on_each_node:
        return bool(accelerator.is_local_main_process)
    return bool(accelerator.is_main_process)
