"""Lightning and torchmetrics: loops, logged values and checkpoints of a Trainer, and metrics.

Imports Lightning, so import this only where Lightning is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from inspect import signature
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from resilin.compat.names import Package

LIGHTNING = Package("lightning", tested=("2.5.0", "2.6.6"))
"""Lightning, and the names of it that resilin uses."""
TORCHMETRICS = Package("torchmetrics", tested=("1.9.0",))
"""torchmetrics, and the names of it that resilin uses."""

_PYTORCH = "lightning.pytorch"
_LOOPS = f"{_PYTORCH}.loops"
_CONNECTORS = f"{_PYTORCH}.trainer.connectors"
_RESULT = f"{_CONNECTORS}.logger_connector.result"

# Logged values -----------------------------------------------------------------------------------

Metadata: Any = LIGHTNING.name(f"{_RESULT}:_Metadata", "resumes logged values").find()
"""Class of the record of the options that a value was logged with."""
Sync: Any = LIGHTNING.name(f"{_RESULT}:_Sync", "resumes logged values").find()
"""Class of the record of the synchronisation of a logged value."""
ResultMetric: Any = LIGHTNING.name(f"{_RESULT}:_ResultMetric", "averages logged values").find()
"""A logged value and its mean."""
ResultCollection: Any = LIGHTNING.name(
    f"{_RESULT}:_ResultCollection", "averages logged values"
).find()
"""All logged values of a loop."""

_RESULTS = LIGHTNING.name(
    f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop._results",
    "averages logged values exactly",
    instance=True,
)
_LOGGER = LIGHTNING.name(
    f"{_PYTORCH}:Trainer._logger_connector", "resumes the values shown last", instance=True
)
_SHOWN = tuple(
    LIGHTNING.name(
        f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector.{name}",
        "resumes the values shown last",
        instance=True,
    )
    for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
)


def make_sync(*, should: bool, function: Callable[..., Any], rank_zero_only: bool) -> Any:
    """Make the record of the synchronisation of a logged value."""
    return Sync(_should=should, fn=function, rank_zero_only=rank_zero_only)


def replace_results(loop: Any, results: Any) -> None:
    """Replace the collection of logged values of a loop."""
    _RESULTS.set(loop, results)


def results_of(trainer: Trainer) -> Any:
    """The values logged by the loop that is running; None if none is."""
    return _RESULTS.of(trainer)


def shown_values(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The values that callbacks, loggers and the progress bar have seen last, to be changed."""
    connector = _LOGGER.of(trainer)
    return {name.attribute: name.of(connector) for name in _SHOWN}


def begin_micro_batch(trainer: Trainer, batch: Any) -> None:
    """Report the start of a batch to `self.log`, which reads the batch size from it."""
    _LOGGER.of(trainer).on_batch_start(batch)


# Loops -------------------------------------------------------------------------------------------

_RESTARTING = LIGHTNING.name(
    f"{_LOOPS}.loop:_Loop._restarting", "resumes in the middle of an epoch", instance=True
)
_LOADED = LIGHTNING.name(
    f"{_LOOPS}.loop:_Loop._loaded_from_state_dict",
    "resumes in the middle of an epoch",
    instance=True,
)
_FIT_STAGE = LIGHTNING.name(
    f"{_LOOPS}.fit_loop:_FitLoop._restart_stage", "resumes in the middle of an epoch", instance=True
)
_FIT_STAGES = LIGHTNING.name(
    f"{_LOOPS}.fit_loop:RestartStage.RESTARTED_MID_EPOCH", "resumes in the middle of an epoch"
)
_EVALUATION_STAGE = LIGHTNING.name(
    f"{_LOOPS}.evaluation_loop:_EvaluationLoop._restart_stage",
    "resumes before a validation",
    instance=True,
)
_EVALUATION_STAGES = LIGHTNING.name(
    f"{_LOOPS}.evaluation_loop:RestartStage.RESTARTED_MID_EVALUATION", "resumes before a validation"
)
_HAS_RUN = LIGHTNING.name(
    f"{_LOOPS}.evaluation_loop:_EvaluationLoop._has_run",
    "resumes before a validation",
    instance=True,
)
_SHOULD_VALIDATE = LIGHTNING.name(
    f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx",
    "resumes before a validation",
)
_FETCHER = LIGHTNING.name(
    f"{_LOOPS}.fit_loop:_FitLoop._data_fetcher", "lets the loader end the epoch", instance=True
)


def set_restarting(loop: Any, restarting: bool) -> None:
    """Set whether a loop counts as restarted."""
    _RESTARTING.set(loop, restarting)


def end_restart(fit_loop: Any) -> None:
    """Make all loops of a fit continue as if they had never stopped."""
    epoch_loop = fit_loop.epoch_loop
    for loop in (
        fit_loop,
        epoch_loop,
        epoch_loop.val_loop,
        epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization,
    ):
        _RESTARTING.set(loop, False)
        _LOADED.set(loop, False)
    for loop in (fit_loop, epoch_loop, epoch_loop.val_loop):
        loop.reset_restart_stage()


def restart_in_epoch(fit_loop: Any) -> None:
    """Make a fit continue its epoch, without the hooks at the start of an epoch."""
    _FIT_STAGE.set(fit_loop, _FIT_STAGES.find())


def restart_before_validation(epoch_loop: Any) -> None:
    """Make an epoch continue with its validation."""
    _RESTARTING.set(epoch_loop, True)
    _HAS_RUN.set(epoch_loop.val_loop, False)
    _EVALUATION_STAGE.set(epoch_loop.val_loop, _EVALUATION_STAGES.find())
    _SHOULD_VALIDATE.of(epoch_loop)
    vars(epoch_loop)[_SHOULD_VALIDATE.attribute] = lambda fetcher: True


def validation_begun(epoch_loop: Any) -> None:
    """Undo `restart_before_validation` for the validations after this one."""
    vars(epoch_loop).pop(_SHOULD_VALIDATE.attribute, None)


def continue_epoch(fit_loop: Any) -> None:
    """Make a fit expect more batches, however many its data fetcher has counted."""
    fetcher = _FETCHER.of(fit_loop)
    assert fetcher is not None
    fetcher.done = fit_loop.epoch_loop.batch_progress.is_last_batch = False


# Trainer, module and callbacks -------------------------------------------------------------------

_CHECKPOINTS = LIGHTNING.name(
    f"{_PYTORCH}:Trainer._checkpoint_connector", "resumes without a file", instance=True
)
_LOADED_CHECKPOINT = LIGHTNING.name(
    f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector._loaded_checkpoint",
    "resumes without a file",
    instance=True,
)
_SIGNALS = LIGHTNING.name(
    f"{_PYTORCH}:Trainer._signal_connector", "handles signals between two steps", instance=True
)
_HOOK = LIGHTNING.name(
    f"{_PYTORCH}.trainer.call:_call_lightning_module_hook", "asks a module for its state"
)
_TRANSFER = LIGHTNING.name(
    f"{_PYTORCH}:LightningModule._on_before_batch_transfer", "moves micro-batches to the device"
)
_HPARAMS = LIGHTNING.name(
    f"{_PYTORCH}:LightningModule._hparams_initial", "keeps changed hyperparameters", instance=True
)
_FILES = LIGHTNING.name(
    f"{_PYTORCH}.callbacks:ModelCheckpoint._fs", "finds files of a lost process", instance=True
)
_AVERAGING = LIGHTNING.name(
    f"{_PYTORCH}.callbacks:StochasticWeightAveraging._scheduler_state",
    "resumes weight averaging in the middle of an epoch",
    instance=True,
)
UNSAVED = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
    "_latest_update_epoch",
)
"""State of callbacks of Lightning that is not in their `state_dict`.

They need it between the last step of an epoch and its end, where Lightning itself never resumes. A
callback that has another attribute in a later version resumes without it.
"""


def check_trainer(trainer: Trainer) -> None:
    """Check that a Trainer and its loops have all names that the functions above use.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (_FIT_STAGES, _EVALUATION_STAGES, _HOOK, _TRANSFER):
        name.find()
    shown_values(trainer)
    _LOADED_CHECKPOINT.of(_CHECKPOINTS.of(trainer))
    fit_loop = trainer.fit_loop
    epoch_loop, val_loop = fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop
    for owner, names in (
        (trainer, (_SIGNALS,)),
        (fit_loop, (_RESTARTING, _LOADED, _FIT_STAGE, _FETCHER)),
        (epoch_loop, (_RESTARTING, _LOADED, _RESULTS, _SHOULD_VALIDATE)),
        (val_loop, (_RESTARTING, _LOADED, _RESULTS, _EVALUATION_STAGE, _HAS_RUN)),
    ):
        for name in names:
            name.of(owner)


def resume_from(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Make a Trainer restore this, as if it had read it from a file."""
    _LOADED_CHECKPOINT.set(_CHECKPOINTS.of(trainer), checkpoint)


def release_signals(trainer: Trainer) -> None:
    """Remove the signal handlers of a Trainer."""
    _SIGNALS.of(trainer).teardown()


def call_module_hook(trainer: Trainer, hook: str, *args: Any) -> None:
    """Call a hook of the module as the Trainer does."""
    _HOOK.find()(trainer, hook, *args)


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """Run the hook of a module that changes a batch before it is moved to the device."""
    return _TRANSFER.of(module)(batch, dataloader_idx=0)


def first_hyperparameters(owner: Any) -> Mapping[str, Any]:
    """Hyperparameters of a module or datamodule as they were saved first."""
    return getattr(owner, _HPARAMS.attribute, {})


def list_files(callback: Any) -> list[str]:
    """Paths in the directory of a ModelCheckpoint; none if it does not exist."""
    files = _FILES.of(callback)
    return files.ls(callback.dirpath, detail=False) if files.exists(callback.dirpath) else []


def averages_weights(callback: Any) -> bool:
    """Whether a StochasticWeightAveraging has restored the state of its scheduler."""
    return bool(_AVERAGING.of(callback))


# Strategies --------------------------------------------------------------------------------------

_STRATEGY = f"{_PYTORCH}.strategies:DDPStrategy"
_FABRIC = "lightning.fabric.strategies.ddp:DDPStrategy"
_BACKEND = LIGHTNING.name(f"{_STRATEGY}._get_process_group_backend", "joins the process group")
_TIMEOUT = LIGHTNING.name(f"{_STRATEGY}._timeout", "joins the process group", instance=True)
_ARGUMENTS = LIGHTNING.name(f"{_STRATEGY}._ddp_kwargs", "passes on arguments of DDP", instance=True)
_DATA_PARALLEL = LIGHTNING.name(
    f"{_PYTORCH}.strategies:ModelParallelStrategy._data_parallel_size",
    "makes the mesh of all processes that there are",
    instance=True,
)
_FABRIC_BACKEND = LIGHTNING.name(f"{_FABRIC}._get_process_group_backend", "joins the process group")
_DEVICES = LIGHTNING.name(f"{_FABRIC}._determine_ddp_device_ids", "passes on arguments of DDP")
_SYNC_CONTROL = LIGHTNING.name(
    f"{_FABRIC}._backward_sync_control", "rejects no_backward_sync", instance=True
)


def check_strategy(strategy: Any) -> None:
    """Check that a DDP strategy, of the Trainer or of Fabric, has all names used below.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (_BACKEND, _TIMEOUT, _ARGUMENTS):
        name.of(strategy)


def check_sharded_strategy(strategy: Any) -> None:
    """Check that a ModelParallelStrategy has all names used below.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (_BACKEND, _TIMEOUT, _DATA_PARALLEL):
        name.of(strategy)


def set_data_parallel_size(strategy: Any, size: int) -> None:
    """Set how many processes of a ModelParallelStrategy are data-parallel."""
    _DATA_PARALLEL.set(strategy, size)


def process_group_of(strategy: Any) -> tuple[str, timedelta | None]:
    """Backend and timeout of the process group that a strategy would form."""
    return _BACKEND.of(strategy)(), _TIMEOUT.of(strategy)


def ddp_arguments(strategy: Any) -> dict[str, Any]:
    """Arguments of DDP that a strategy was given."""
    return dict(_ARGUMENTS.of(strategy))


def set_up(module: Any, optimizers: Any, scheduler: Any) -> tuple[Any, ...]:
    """What a strategy returns to `Fabric.setup`, which knows schedulers from 2.6 on."""
    if "scheduler" in signature(Fabric.setup).parameters:
        return module, optimizers, scheduler
    return module, optimizers


def device_ids(strategy: Any) -> list[int] | None:
    """Devices that a strategy of Fabric would give to DDP."""
    ids: list[int] | None = _DEVICES.of(strategy)()
    return ids


def replace_sync_control(strategy: Any, control: Any) -> None:
    """Replace the object that implements `fabric.no_backward_sync`."""
    _SYNC_CONTROL.set(strategy, control)


# torchmetrics ------------------------------------------------------------------------------------

_METRIC = "torchmetrics:Metric"
_UPDATES = TORCHMETRICS.name(
    f"{_METRIC}._update_count", "restores metrics in the middle of an epoch", instance=True
)
_COMPUTED = TORCHMETRICS.name(
    f"{_METRIC}._computed", "restores metrics in the middle of an epoch", instance=True
)
_DEFAULTS = TORCHMETRICS.name(f"{_METRIC}._defaults", "knows the states of a metric", instance=True)
_REDUCTIONS = TORCHMETRICS.name(
    f"{_METRIC}._reductions", "knows which states are sums", instance=True
)
_FORWARD = TORCHMETRICS.name(
    f"{_METRIC}._forward_cache", "logs nothing for filler batches", instance=True
)


def num_updates(metric: Metric) -> int:
    """Number of updates of a metric since its last reset."""
    return int(_UPDATES.of(metric))


def set_num_updates(metric: Metric, number: int) -> None:
    """Set the number of updates of a metric, and drop its last result."""
    _UPDATES.set(metric, number)
    _COMPUTED.set(metric, None)


def states_of(metric: Metric) -> dict[str, tuple[Any, Any]]:
    """The default value and the reduction of each state of a metric."""
    reductions = _REDUCTIONS.of(metric)
    return {name: (value, reductions[name]) for name, value in _DEFAULTS.of(metric).items()}


def show_in_step(metric: Metric, value: Any) -> None:
    """Make a metric report this value for the step."""
    _FORWARD.set(metric, value)
