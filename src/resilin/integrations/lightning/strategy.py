"""`ElasticStrategy`: a DDP strategy whose model follows the batch size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat import lightning_names
from resilin.core.rules import ScalingRule
from resilin.engine.group import DEFAULT_TIMEOUT, init_process_group
from resilin.integrations.lightning.callback import Elastic
from resilin.integrations.lightning.means import counts, untouched
from resilin.integrations.lightning.refusals import (
    check_accumulation,
    check_strategy,
    check_synced_logs,
    check_trainer,
)
from resilin.integrations.lightning.resume import Fit
from resilin.integrations.lightning.steps import InSteps, Steps
from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy

NEVER = sys.maxsize
"""A frequency at which the Trainer does not step a scheduler: a clock does that."""


class ElasticStrategy(InSteps, DDPStrategy):
    """Trains with `AdaptiveDataParallel` on any number of processes.

    Give it to a Trainer, and an `AdaptiveDataLoader` as the train dataloader. A batch of the
    Trainer is then one optimizer step: `training_step` runs once per micro-batch, while
    `global_step`, `batch_idx`, schedulers, clipping, callbacks and loggers count steps.

    A scheduler with `interval="step"` is stepped by a clock, once per reference step, so that
    `trainer.estimated_stepping_batches` and any schedule written for the reference batch stay
    right. Those with `interval="epoch"`, and `ReduceLROnPlateau`, stay with the Trainer.

    Args:
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer.
        schedule_by: The clock that steps a scheduler with `interval="step"`; `rule` takes that of
            the rule, `user` leaves it to the Trainer, which steps it once per optimizer step.
        stats_every: Measure the noise every so many steps; `auto` as often as `stats_budget`
            allows, where the rule or the autoscaler needs it.
        stats_budget: Time for measuring, as a fraction of the step, under `auto`; None takes 0.01.
        tokens_per_step: Tokens in one reference step, for the `tokens` clock.
        **kwargs: Those of `DDPStrategy`, such as `find_unused_parameters` or `timeout`.

    Raises:
        ValueError: A setting is not supported; `fit` checks those of the Trainer.
    """

    def __init__(
        self,
        *,
        rule: str | ScalingRule = "auto",
        schedule_by: ScheduleBy = "rule",
        stats_every: int | Literal["auto"] = "auto",
        stats_budget: float | None = None,
        tokens_per_step: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_strategy(kwargs)
        super().__init__(**kwargs)
        lightning_names.check_strategy(self)
        self._schedule_by: ScheduleBy = schedule_by
        self._elastic: dict[str, Any] = {
            "rule": rule,
            "stats_every": stats_every,
            "stats_budget": stats_budget,
            "tokens_per_step": tokens_per_step,
        }

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # The start and the end -----------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Check the settings of the Trainer, and add the state of the job to its checkpoints."""
        super().connect(model)
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_trainer(trainer, model)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        own = [callback for callback in callbacks if isinstance(callback, Elastic)] or [Elastic()]
        # First, so that a state is kept before any other callback runs the same hook.
        callbacks[:] = own + [callback for callback in callbacks if callback not in own]

    def setup_distributed(self) -> None:
        """Join the other processes, under a group name that is new on this store."""
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            backend, timeout = lightning_names.process_group_of(self)
            init_process_group(backend, timeout=timeout or DEFAULT_TIMEOUT)
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Join the other processes, and resume if there is a state."""
        super().setup_environment()
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self.fit = Fit(trainer, Elastic)
        if self.fit.resumes:
            # In place of a checkpoint that the Trainer reads from a file.
            lightning_names.resume_from(trainer, self.fit.checkpoint())

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, unless the state of the job is newer: then return that."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn != TrainerFn.FITTING or self.fit is None or not self.fit.resumes:
            return checkpoint
        if checkpoint.get("global_step", 0) <= Home().clock.steps:
            return self.fit.checkpoint()
        self.fit.drop_state()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the checkpoint, or the newest ones of the job."""
        if self.fit is not None and self.fit.resumes:
            assert self.lightning_module is not None
            self.fit.load_weights(self.lightning_module)
        else:
            super().load_model_state_dict(checkpoint, strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores the optimizer; else the job has done it."""
        return self.fit is None or not self.fit.resumes

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others; at the start of a fit, restore the rest of its state."""
        super().barrier(*args, **kwargs)
        if self.fit is not None and (*args, *kwargs.values()) == ("run-stage",):
            self.fit.before_stage()

    def configure_ddp(self) -> None:
        """Do nothing: the model is wrapped together with its optimizer."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers and schedulers, and wrap the model."""
        super().setup_optimizers(trainer)
        assert self.fit is not None
        if self.fit.passed is not None:
            assert self.lightning_module is not None
            self.fit.load_weights(self.lightning_module)
            return
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers() of {type(self.lightning_module).__name__} returned "
                f"{len(self.optimizers)} optimizers; resilin trains with 1"
            )
        scheduler, schedule_by = self._take_scheduler()
        arguments = lightning_names.ddp_arguments(self)
        if (device_ids := self.determine_ddp_device_ids()) is not None:
            arguments["device_ids"] = device_ids
        assert self.lightning_module is not None
        self.parallel = AdaptiveDataParallel(
            self.lightning_module,
            self.optimizers[0],
            scheduler,
            schedule_by=schedule_by,
            scaler=getattr(self.precision_plugin, "scaler", None),
            **self._elastic,
            **arguments,
        )
        self.model = self.parallel

    def _take_scheduler(self) -> tuple[Any, ScheduleBy]:
        """The scheduler that a clock steps, if any; the Trainer no longer steps it."""
        if self._schedule_by == "user":
            return None, "user"
        clocked = [
            config
            for config in self.lr_scheduler_configs
            if config.interval == "step" and not config.reduce_on_plateau
        ]
        if not clocked:
            return None, "user"
        if len(clocked) > 1:
            raise ValueError(
                f"{len(clocked)} schedulers have interval='step', and schedule_by "
                f"({self._schedule_by!r}) can step 1: chain them (SequentialLR, ChainedScheduler), "
                "or pass schedule_by='user'"
            )
        (config,) = clocked
        if config.frequency != 1:
            raise ValueError(
                f"frequency ({config.frequency}) of a scheduler must be 1 where schedule_by "
                f"({self._schedule_by!r}) steps it, once per reference step"
            )
        if is_overridden("lr_scheduler_step", self.lightning_module):
            raise ValueError(
                f"lr_scheduler_step() of {type(self.lightning_module).__name__} would not be "
                f"called where schedule_by ({self._schedule_by!r}) steps the scheduler: remove "
                "it, or pass schedule_by='user'"
            )
        config.frequency = NEVER
        return config.scheduler, self._schedule_by

    def on_train_end(self) -> None:
        """End the fit, after all hooks."""
        super().on_train_end()
        assert self.fit is not None
        self.fit.end()

    def teardown(self) -> None:
        """Restore the methods of the optimizer."""
        if self.fit is not None and not self._trainer.interrupted:
            # If there was nothing to train, `on_train_end` was not called.
            self.fit.end()
        self.fit = None
        if self.parallel is not None:
            if self.steps is not None:
                self.steps.close()
            self.parallel.release()
            self.parallel = self.steps = None
            self.model = self.lightning_module
        super().teardown()

    # The data ------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap the train dataloader; others are returned unchanged."""
        trainer = self._trainer
        if not trainer.training or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if not isinstance(dataloader, AdaptiveDataLoader):
            raise ValueError(
                f"the train dataloader is a {type(dataloader).__qualname__} and must be a "
                "resilin.AdaptiveDataLoader, whose batch_size is the global one"
            )
        if self.steps is not None and self.steps.loader is not dataloader:
            raise ValueError("there are 2 train dataloaders, and resilin trains with 1")
        self.steps = Steps(dataloader, trainer)
        return self.steps

    def _place(self, batch: Any) -> Any:
        """Convert a micro-batch and move it to the device, as the Trainer does."""
        trainer, model = self._trainer, self.lightning_module
        assert model is not None
        batch = self.precision_plugin.convert_input(batch)
        batch = lightning_names.before_transfer(model, batch)
        batch = self.batch_to_device(batch, dataloader_idx=0)
        # `self.log` reads the number of samples from it.
        lightning_names.begin_micro_batch(trainer, batch)
        return batch

    # The step ------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a step. Whether it is the last of the epoch is known when it is committed."""
        check_accumulation(self._trainer)
        # The loop has counted the reference steps of an epoch, of which there may be more or fewer.
        lightning_names.continue_epoch(self._trainer.fit_loop)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `training_step` on each micro-batch; the Trainer runs the last backward pass."""
        assert self.steps is not None
        output = self._part(*args, **kwargs)
        if not self.steps.step_is_whole:
            check_synced_logs(self._trainer)
            # The Trainer does it before the last backward pass, the only one that it runs.
            self.optimizers[0].zero_grad()
        while not self.steps.step_is_whole:
            self.backward(_loss(output), self.optimizers[0])
            batch = self._place(self.steps.next_part())
            output = self._part(batch, *args[1:], **kwargs)
        return output

    def _part(self, *args: Any, **kwargs: Any) -> Any:
        if counts():
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with untouched(self.lightning_module):
            return super().training_step(*args, **kwargs)

    # Files ---------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of Lightning, and note its path."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.fit is not None:
            self.fit.files.wrote(filepath)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of Lightning, and its path from the notes."""
        super().remove_checkpoint(filepath)
        if self.fit is not None:
            self.fit.files.removed(filepath)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make the step, and set in the Trainer whether the epoch ends with it."""
        assert self.steps is not None
        assert self.parallel is not None
        # The Trainer clips, and calls `on_before_optimizer_step`, once the gradient is complete.
        with self.parallel.change_gradient():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.is_last_batch = self.steps.loader.ends_epoch
        return output


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else (output or {}).get("loss")
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step() returned {output!r} for a micro-batch in the middle of a step; it "
            "must return a loss for each of them"
        )
    return loss
