"""`Elastic`: the callback that connects the hooks, logs and files of a Trainer to the job."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from resilin.compat import lightning_names
from resilin.integrations.lightning.refusals import refuse_strategy
from resilin.integrations.lightning.resume import (
    EPOCH_END,
    FITS,
    LOOPS,
    STEPS,
    SUMS,
    TRAIN_END,
    VALIDATION,
)
from resilin.integrations.lightning.steps import InSteps
from resilin.telemetry.tensorboard import PREFIX
from resilin.training.bridge.carried import CarriedState
from resilin.training.bridge.home import Home
from resilin.training.bridge.readout import read_out
from resilin.training.script.epochs import begin_epoch
from resilin.training.start import start
from resilin.training.state import replica_parts

_LOGGED = f"{replica_parts.SUMS}{SUMS}"


class Elastic(Callback):
    """Logs the metrics of each step, and adds the state of the job to the checkpoints.

    `ElasticStrategy` adds one automatically; make one only to change its settings. Each step logs
    the metrics of `resilin.training.bridge.readout.read_out`: gain, scale, global batch size,
    progress, the noise scale once it was measured, and more.

    Args:
        log: Whether to log.
        prefix: Prefix of the names of the metrics.
    """

    def __init__(self, *, log: bool = True, prefix: str = PREFIX) -> None:
        self._log = log
        self._prefix = prefix
        self._carried = CarriedState(LOOPS, FITS)
        self._last: dict[str, Any] | None = None

    # The start and the end -----------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject other strategies."""
        if stage == "fit":
            _strategy(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin training, or resume from the newest state of the job."""
        strategy = _strategy(trainer)
        assert strategy.steps is not None
        assert strategy.fit is not None
        home = Home()
        # How many steps an epoch takes depends on their batch sizes: the loader says when it ends.
        trainer.fit_loop.max_batches = math.inf
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = math.inf
        strategy.fit.train_start()
        home.set_total_epochs(None if trainer.max_epochs == -1 else trainer.max_epochs)
        if start(home.job).active:
            # The handlers of the Trainer communicate, whatever the replica is doing.
            lightning_names.release_signals(trainer)
        strategy.steps.loader.take_part()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that all epochs are done; the hooks of other callbacks are to come."""
        fit = _strategy(trainer).fit
        assert fit is not None
        fit.phase = TRAIN_END
        begin_epoch(trainer.current_epoch)
        self._last = self.state_dict()

    # Epochs --------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that a step is next."""
        fit = _strategy(trainer).fit
        assert fit is not None
        fit.phase = STEPS

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the steps of the epoch, and switch the model to evaluation."""
        strategy = _strategy(trainer)
        self._end_steps(strategy, VALIDATION)
        if strategy.fit is not None and not trainer.sanity_checking:
            strategy.fit.validation_start()
        if strategy.parallel is not None:
            strategy.parallel.training = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch the model back to training."""
        if (model := _strategy(trainer).parallel) is not None:
            model.training = True
        # Schedulers wait for metrics in a resumed epoch, and now there are some.
        lightning_names.set_restarting(trainer.fit_loop, False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the steps of the epoch, if no validation has."""
        self._end_steps(_strategy(trainer), EPOCH_END)

    def _end_steps(self, strategy: InSteps, phase: str) -> None:
        """End the epoch of the loader, if its steps are done, and keep a state."""
        if strategy.steps is not None and strategy.steps.loader.ends_epoch:
            assert strategy.fit is not None
            strategy.fit.phase = phase
            strategy.steps.finish()

    # Logs and files ------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step."""
        if self._log:
            # None of these is a mean over samples.
            pl_module.log_dict(read_out(self._prefix), on_step=True, on_epoch=False, batch_size=1)

    def state_dict(self) -> dict[str, Any]:
        """The state of the job without what the Trainer saves itself. Collective."""
        if Home().job.model is None and self._last is not None:
            return self._last
        state = self._carried.state_dict()
        # A checkpoint of Lightning resumes where its loops say, which may be the next epoch.
        state["tree"] = {n: part for n, part in state["tree"].items() if not n.startswith(_LOGGED)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._carried.load_state_dict(state_dict)


def _strategy(trainer: Trainer) -> InSteps:
    if not isinstance(trainer.strategy, InSteps):
        refuse_strategy(trainer.strategy, "an ElasticStrategy or an ElasticShardedStrategy")
    return trainer.strategy
