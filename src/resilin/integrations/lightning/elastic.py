"""The parts of a strategy for the Trainer that DDP and sharded models have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat import lightning_names
from resilin.core.rules import ScalingRule
from resilin.integrations.lightning.callback import Elastic
from resilin.integrations.lightning.means import counts, untouched
from resilin.integrations.lightning.refusals import (
    check_accumulation,
    check_synced_logs,
    check_trainer,
)
from resilin.integrations.lightning.resume import Fit
from resilin.integrations.lightning.steps import InSteps, Steps
from resilin.training.bridge.home import refuse_stream
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy

NEVER = sys.maxsize
"""A frequency at which the Trainer does not step a scheduler: a clock does that."""


class ElasticLoop(InSteps, ParallelStrategy):
    """Makes a strategy train with `AdaptiveDataParallel`; mix it in before the strategy.

    Args:
        rule: As in `ElasticStrategy`.
        schedule_by: As in `ElasticStrategy`.
        stats_every: As in `ElasticStrategy`.
        stats_budget: As in `ElasticStrategy`.
        tokens_per_step: As in `ElasticStrategy`.
        **kwargs: Those of the strategy that it is mixed into.
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
        self._check_arguments(kwargs)
        super().__init__(**kwargs)
        self._schedule_by: ScheduleBy = schedule_by
        self._elastic: dict[str, Any] = {
            "rule": rule,
            "stats_every": stats_every,
            "stats_budget": stats_budget,
            "tokens_per_step": tokens_per_step,
        }

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        """Reject arguments of the strategy that are not supported, and set those that must be."""

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

    def _begin_fit(self) -> None:
        """Note a call of `fit`, and make the Trainer resume if the job has a state of it."""
        trainer = self._trainer
        self.fit = Fit(trainer, Elastic)
        if self.fit.resumes:
            # In place of a checkpoint that the Trainer reads from a file.
            lightning_names.resume_from(trainer, self.fit.checkpoint())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the others; at the start of a fit, restore the rest of its state."""
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]
        if self.fit is not None and (*args, *kwargs.values()) == ("run-stage",):
            self.fit.before_stage()

    def _wrap(self, arguments: dict[str, Any]) -> None:
        """Wrap the model, once it has an optimizer.

        Args:
            arguments: More arguments of `AdaptiveDataParallel`.
        """
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers() of {type(self.lightning_module).__name__} returned "
                f"{len(self.optimizers)} optimizers; the Trainer steps 1: use Fabric, with "
                "resilin.integrations.lightning.setup(), for several"
            )
        scheduler, schedule_by = self._take_scheduler()
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
        refuse_stream(dataloader, "Lightning's Trainer")
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
