"""Transformers: methods of the Trainer that resilin wraps, and its counters.

Loads no Transformers: `TrainerHooks` is mixed into the Trainer of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resilin.compat.names import Package

TRANSFORMERS = Package("transformers", tested=("5.19.0", "5.22.2"))
"""Transformers, and the names of it that resilin uses."""

_TRAINER = "transformers:Trainer"
_METHODS = tuple(
    TRANSFORMERS.name(f"{_TRAINER}.{method}", use)
    for method, use in {
        "_get_learning_rate": "logs the learning rate of the step, not of the next one",
        "_get_grad_norm": "logs the gradient norm of an epoch that is resumed at its end",
        "_run_epoch": "lets the loader end an epoch",
        "_init_training_state": "resumes in the middle of an epoch",
        "_prepare_for_training": "keeps a newer state than that of the checkpoint",
        "_save_optimizer_and_scheduler": "adds the state of the job to a checkpoint folder",
        "_finalize_training": "saves the last state of the job",
        "_maybe_log_save_evaluate": "resumes at the end of an epoch",
        "_load_from_checkpoint": "loads the weights of a checkpoint that is newer than the job",
        "_load_optimizer_and_scheduler": "loads the optimizer of a sharded model",
        "_get_num_items_in_batch": "weighs micro-batches by what their loss is a mean over",
        "get_batch_samples": "takes one micro-batch, and leaves the others to the step",
    }.items()
)
_LOSS = TRANSFORMERS.name(
    f"{_TRAINER}._tr_loss", "keeps the losses since the last log", instance=True
)
_LOGGED = TRANSFORMERS.name(
    f"{_TRAINER}._globalstep_last_logged", "keeps the losses since the last log", instance=True
)
_CREATED = TRANSFORMERS.name(
    f"{_TRAINER}._created_lr_scheduler", "keeps a scheduler for all calls of train", instance=True
)
_COUNTERS = (
    TRANSFORMERS.name(f"{_TRAINER}._total_loss_scalar", "keeps the total loss", instance=True),
    _LOGGED,
    TRANSFORMERS.name(f"{_TRAINER}._initial_global_step", "keeps the speed", instance=True),
)
_FLOS = TRANSFORMERS.name(
    f"{_TRAINER}.current_flos", "counts the operations of all micro-batches", instance=True
)
_REFERENCES = TRANSFORMERS.name(
    "transformers:TrainerState.init_training_references", "resumes with the length of the run"
)


def check() -> None:
    """Check that the installed Trainer has all methods that are wrapped.

    The hook of a missing method would never be called, and the run would silently be wrong.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (*_METHODS, _REFERENCES):
        name.find()


class TrainerHooks:
    """Wraps private methods of a Trainer by public ones; mix it in before the Trainer.

    Each `around_` method is given the method of the Trainer as its first argument, and by default
    calls it.
    """

    def around_learning_rate(self, stock: Callable[..., Any]) -> Any:
        """The learning rate to log."""
        return stock()

    def around_grad_norm(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The gradient norm to log."""
        return stock(*args, **kwargs)

    def around_epoch(self, stock: Callable[..., Any], **kwargs: Any) -> Any:
        """Run one epoch."""
        return stock(**kwargs)

    def around_beginning(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the state of a run; return the first epoch and the batches to skip in it."""
        return stock(*args, **kwargs)

    def around_preparation(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Prepare model, optimizer and scheduler, and load a checkpoint into them."""
        return stock(*args, **kwargs)

    def around_saving(self, stock: Callable[..., Any], output_dir: str) -> Any:
        """Save optimizer and scheduler in a checkpoint folder."""
        return stock(output_dir)

    def around_end(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End a run."""
        return stock(*args, **kwargs)

    # What the Trainer calls ----------------------------------------------------------------

    def _get_learning_rate(self) -> Any:
        return self.around_learning_rate(self.stock_learning_rate)

    def stock_learning_rate(self) -> float:
        """The learning rate that the Trainer would log."""
        lr: float = super()._get_learning_rate()  # type: ignore[misc]
        return lr

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return self.around_grad_norm(super()._get_grad_norm, *args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, **kwargs: Any) -> Any:
        return self.around_epoch(super()._run_epoch, **kwargs)  # type: ignore[misc]

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.around_beginning(super()._init_training_state, *args, **kwargs)  # type: ignore[misc]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        return self.around_preparation(super()._prepare_for_training, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> Any:
        stock = super()._save_optimizer_and_scheduler  # type: ignore[misc]
        return self.around_saving(stock, output_dir)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        return self.around_end(super()._finalize_training, *args, **kwargs)  # type: ignore[misc]


# What resilin calls ------------------------------------------------------------------------------


def items_in(trainer: Any, batch: Any, device: Any) -> Any:
    """Items that the Trainer counts in a batch; None if its loss is a mean over samples."""
    return trainer._get_num_items_in_batch([batch], device)


def load_weights(trainer: Any, folder: str) -> None:
    """Load the weights of a checkpoint folder into the model."""
    trainer._load_from_checkpoint(folder)


def load_optimizer(trainer: Any, folder: str) -> None:
    """Load the optimizer and the scheduler of a checkpoint folder."""
    trainer._load_optimizer_and_scheduler(folder)


def end_epoch(trainer: Any, *args: Any, grad_norm: Any, learning_rate: Any) -> None:
    """Logs, saves and evaluates, as the Trainer does after the last step of an epoch.

    Args:
        trainer: The Trainer.
        args: Model, trial, epoch, keys to ignore in the evaluation, and the time of the start.
        grad_norm: The gradient norm to log.
        learning_rate: The learning rate to log.
    """
    loss = _LOSS.of(trainer)
    trainer._maybe_log_save_evaluate(loss, grad_norm, *args, learning_rate=learning_rate)


def keep_scheduler(trainer: Any) -> None:
    """Make the Trainer keep its scheduler when it prepares the run."""
    _CREATED.set(trainer, False)


def counters(trainer: Any) -> dict[str, Any]:
    """Counters of a Trainer in this run, apart from its state."""
    return {name.attribute: name.of(trainer) for name in _COUNTERS}


def set_counters(trainer: Any, values: Mapping[str, Any]) -> None:
    """Set the counters that `counters` returned."""
    for name in _COUNTERS:
        name.set(trainer, values[name.attribute])


def add_operations(trainer: Any, number: float) -> None:
    """Count operations that the loop of the Trainer does not see."""
    _FLOS.set(trainer, _FLOS.of(trainer) + number)


def summed_loss(trainer: Any) -> Any:
    """Sum of the losses since the last log; None before the first run."""
    return getattr(trainer, _LOSS.attribute, None)


def set_sums(trainer: Any, loss: Any, operations: float) -> None:
    """Set the sum of the losses and the number of operations since the last log."""
    _LOSS.set(trainer, loss)
    _FLOS.set(trainer, operations)


def restart_log(trainer: Any) -> None:
    """Make the next log cover the steps from now on."""
    _LOGGED.set(trainer, trainer.state.global_step)
