"""Fabric: a strategy, and a `setup` that also moves batches to the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat import lightning_names
from resilin.core.rules import ScalingRule
from resilin.engine.group import DEFAULT_TIMEOUT, init_process_group
from resilin.integrations.lightning.refusals import refuse_strategy
from resilin.training.bridge.carried import CarriedState
from resilin.training.bridge.home import refuse_sharded
from resilin.training.bridge.placed_loader import PlacedLoader
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy


class ElasticFabricStrategy(DDPStrategy):
    """Fabric's DDP strategy with an `AdaptiveDataParallel` in place of DDP.

    Set up with `setup` of this module instead of `fabric.setup`. `fabric.backward`,
    `fabric.clip_gradients`, `fabric.save` and `fabric.load` work as before. Clipping waits for the
    last micro-batch of a step, and returns None until then; its threshold is the one you give, at
    any batch size.

    Args:
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer.
        schedule_by: Who steps the scheduler that was given to `fabric.setup`: `user` is your
            loop, `rule` the clock of the rule; see `AdaptiveDataParallel`.
        stats_every: Measure the noise every so many steps; see `AdaptiveDataParallel`.
        stats_budget: Time for measuring, as a fraction of the step, under `auto`; None takes 0.01.
        tokens_per_step: Tokens in one reference step, for the `tokens` clock.
        **kwargs: Those of `DDPStrategy`, such as `find_unused_parameters` or `timeout`.
    """

    def __init__(
        self,
        *,
        rule: str | ScalingRule = "auto",
        schedule_by: ScheduleBy = "user",
        stats_every: int | Literal["auto"] = "auto",
        stats_budget: float | None = None,
        tokens_per_step: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        lightning_names.check_strategy(self)
        self._elastic: dict[str, Any] = {
            "rule": rule,
            "schedule_by": schedule_by,
            "stats_every": stats_every,
            "stats_budget": stats_budget,
            "tokens_per_step": tokens_per_step,
        }
        self.scheduler: Any = None
        """The scheduler that `setup` was given; Fabric hands one on from 2.6 on only."""
        lightning_names.replace_sync_control(self, _NoControl())

    def setup_environment(self) -> None:
        """Join the other processes, under a group name that is new on this store."""
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            backend, timeout = lightning_names.process_group_of(self)
            init_process_group(backend, timeout=timeout or DEFAULT_TIMEOUT)
        super().setup_environment()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> Any:
        """Wrap the model, and gate its optimizer and scheduler."""
        scheduler = self.scheduler if scheduler is None else scheduler
        self.scheduler = None
        refuse_sharded(
            module, "use the Trainer with an ElasticShardedStrategy, or a loop without Fabric"
        )
        arguments = lightning_names.ddp_arguments(self)
        if (device_ids := lightning_names.device_ids(self)) is not None:
            arguments["device_ids"] = device_ids
        parallel = AdaptiveDataParallel(
            module,
            optimizers,
            scheduler,
            scaler=getattr(self.precision, "scaler", None),
            **self._elastic,
            **arguments,
        )
        return lightning_names.set_up(parallel, optimizers, scheduler)

    def setup_module(self, module: nn.Module) -> NoReturn:
        """Reject a model without its optimizer."""
        raise ValueError(
            "fabric.setup_module() gives a model without its optimizer: use "
            "fabric.setup(model, optimizer)"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any | Tensor]:
        """State of the user's module."""
        return super().get_module_state_dict(_bare(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any | Tensor], strict: bool = True
    ) -> None:
        """Load a state into the user's module."""
        super().load_module_state_dict(_bare(module), dict(state_dict), strict=strict)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradient of the step, once it is complete."""
        if isinstance(module, AdaptiveDataParallel) and module.step_waits():
            return None  # type: ignore[return-value]
        with _changing(module):
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        """Clip the gradient of the step, once it is complete."""
        if not (isinstance(module, AdaptiveDataParallel) and module.step_waits()):
            with _changing(module):
                super().clip_gradients_value(module, optimizer, clip_val)


def _changing(module: nn.Module) -> AbstractContextManager[Any]:
    return module.change_gradient() if isinstance(module, AdaptiveDataParallel) else nullcontext()


def _bare(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, AdaptiveDataParallel) else module


class _NoControl:
    """Takes the place of Fabric's control over the reduction of gradients."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Reject it: the loader decides which micro-batch synchronises."""
        raise ValueError(
            f"fabric.no_backward_sync(enabled={enabled}) is not supported: the loader "
            "accumulates (max_local_bsz=), and only the last micro-batch of a step "
            "synchronises"
        )


def setup(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: AdaptiveDataLoader,
    scheduler: Any = None,
) -> tuple[Any, Any, Any]:
    """Set up a model, its optimizer and its data, as `fabric.setup` and `setup_dataloaders` do.

    Args:
        fabric: Made with an `ElasticFabricStrategy`, and launched.
        model: The module to train.
        optimizer: Its optimizer, or several that step on one backward pass.
        loader: The data to train on.
        scheduler: The scheduler, if a clock steps it or resilin keeps its state; of several
            optimizers, a list.

    Returns:
        Model, optimizer (a list of them, if there are several) and loader, to be used in their
        place.

    Raises:
        ValueError: Fabric has another strategy, or the loader is another one.
    """
    if not isinstance(fabric.strategy, ElasticFabricStrategy):
        refuse_strategy(fabric.strategy, "an ElasticFabricStrategy")
    if not isinstance(loader, AdaptiveDataLoader):
        raise ValueError(
            f"the loader is a {type(loader).__qualname__} and must be a "
            "resilin.AdaptiveDataLoader, whose batch_size is the global one"
        )
    fabric.strategy.scheduler = scheduler
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    model, *wrapped = fabric.setup(model, *optimizers)
    del wrapped[len(optimizers) :]  # a scheduler
    for own, seen in zip(optimizers, wrapped, strict=True):
        # The method that Fabric's wrapper inherits would clear a gradient that is accumulated.
        vars(seen)["zero_grad"] = own.zero_grad
    single = isinstance(optimizer, Optimizer)
    return model, wrapped[0] if single else wrapped, PlacedLoader(loader, fabric.to_device)


class JobState(CarriedState):
    """The rest of the job's state, for `fabric.save` and `fabric.load`: clocks, cursor, noise.

    Put it beside the model, `{"model": model, "optimizer": optimizer, "resilin": JobState()}`, and
    load it before the loop over the data begins.
    """
