"""`Elastic`: what the Trainer tells resilin, and what resilin has to say in its logs and files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from resilin.integrations.lightning.steps import InSteps
from resilin.telemetry.tensorboard import PREFIX
from resilin.training.boundaries import end_training, start
from resilin.training.carried import CarriedState
from resilin.training.epochs import begin_epoch
from resilin.training.job import current_job
from resilin.training.readout import read_out

LOOPS = "lightning"
"""The name of the Trainer's own state in that of the job."""
SAVED = ("model", "optimizer", "scheduler", "scaler")
"""What checkpoints of Lightning hold anyway."""


class Elastic(Callback):
    """Logs what resilin knows of each step, and puts the job's state into the checkpoints.

    `ElasticStrategy` adds one by itself; make it only to change its settings. Logged are, with each
    step, what `resilin.training.readout.read_out` says: gain, scale, global batch size, progress,
    the noise scale as soon as it was measured, and more.

    Args:
        log: Whether to log.
        prefix: What the names of the metrics begin with.
    """

    def __init__(self, *, log: bool = True, prefix: str = PREFIX) -> None:
        self._log = log
        self._prefix = prefix
        self._carried = CarriedState(without=(*SAVED, LOOPS))
        self._last: dict[str, Any] | None = None

    # The start and the end -----------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the job: goes on from the newest state that resilin itself keeps, if any."""
        strategy = _strategy(trainer)
        assert strategy.steps is not None
        job = current_job()
        # How many steps an epoch takes depends on their batch sizes: the loader says when it ends.
        trainer.fit_loop.max_batches = math.inf
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = math.inf
        job.total_epochs = None if trainer.max_epochs == -1 else trainer.max_epochs
        if job.engine.restartable:
            # The Trainer's handlers communicate in the middle of whatever a replica is doing.
            trainer._signal_connector.teardown()
        job.registry.add(LOOPS, TrainerState(trainer))
        start(job)
        strategy.steps.loader.take_part()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last state of the job, where resilin itself keeps it."""
        job = current_job()
        begin_epoch(trainer.current_epoch)
        end_training(job)
        self._last = self._carried.state_dict()
        job.registry.remove(LOOPS)

    # Epochs --------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No part of a step: what is run now is not trained on."""
        self.on_train_epoch_end(trainer, pl_module)
        if (model := _strategy(trainer).parallel) is not None:
            model.training = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        if (model := _strategy(trainer).parallel) is not None:
            model.training = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loader learns that the epoch is over, if it is."""
        steps = _strategy(trainer).steps
        if steps is not None and steps.loader.ends_epoch:
            steps.finish()

    # Logs and files ------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the step."""
        if self._log:
            # None of these is a mean over samples.
            pl_module.log_dict(read_out(self._prefix), on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The state of the job without what the Trainer saves itself. Collective."""
        if current_job().model is None and self._last is not None:
            return self._last
        return self._carried.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self._carried.load_state_dict(state_dict)


class TrainerState:
    """How far the Trainer's loops and callbacks are, for state that resilin itself keeps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Counters of the loops, and what callbacks remember."""
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return {
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "callbacks": {
                callback.state_key: callback.state_dict()
                for callback in callbacks
                if not isinstance(callback, Elastic)
            },
            "schedulers": [
                config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; the loops begin anew from there."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        for config, scheduler in zip(
            trainer.lr_scheduler_configs, state["schedulers"], strict=True
        ):
            config.scheduler.load_state_dict(scheduler)
        loop.load_state_dict(dict(state["fit_loop"]))
        loop.reset()
        if trainer.max_steps == -1:
            current = loop.epoch_progress.current
            current.completed = current.processed  # type: ignore[attr-defined]


def _strategy(trainer: Trainer) -> InSteps:
    if not isinstance(trainer.strategy, InSteps):
        raise ValueError(
            f"strategy ({type(trainer.strategy).__name__}) must be an ElasticStrategy where the "
            "callback Elastic is used"
        )
    return trainer.strategy
