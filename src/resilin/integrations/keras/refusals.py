"""Settings of Keras that resilin does not support: rejected with both values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.compat.keras_names import has_mask

_OPTIMIZER = {
    "gradient_accumulation_steps": "the step accumulates what batch_size needs",
    "loss_scale_factor": "noise is measured in gradients as they are",
}
"""Settings of an optimizer that must be None, and why."""
_MEANS = ("sum_over_batch_size", "mean")
_WEIGHTED_MEAN = "mean_with_sample_weight"
_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")


def check_model(model: Any, *, weighted: bool) -> None:
    """Reject settings that a Keras model was compiled with.

    Args:
        model: The Keras model.
        weighted: Whether the user gives the weight of micro-batches.

    Raises:
        ValueError: Names the setting, its value, the value that it must have, and why.
    """
    if not model.compiled:
        raise ValueError(f"{model.name!r} is not compiled: call compile() before fit()")
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"dtype policy ({model.dtype_policy.name!r}) needs a LossScaleOptimizer, which skips "
            "steps on its own: use 'mixed_bfloat16'"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer ({optimizer!r}) must be an optimizer of Keras")
    for name, reason in _OPTIMIZER.items():
        if (value := getattr(optimizer, name)) is not None:
            raise ValueError(f"{name} ({value}) must be None: {reason}")
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ValueError(
            f"ema_overwrite_frequency ({optimizer.ema_overwrite_frequency}) must be None: it "
            "counts optimizer steps, whose worth changes"
        )
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEANS and not (weighted and reduction == _WEIGHTED_MEAN):
            hint = "; or pass batch_weight=" if reduction == _WEIGHTED_MEAN else ""
            raise ValueError(
                f"reduction ({reduction!r}) of {loss.name!r} must be 'sum_over_batch_size': the "
                f"gradient of a step is the mean over its samples{hint}"
            )


def check_step(model: Any) -> None:
    """Reject what would replace the step of `fit` with torch.

    Raises:
        ValueError: As in `check_model`.
    """
    if model.jit_compile:
        raise ValueError(
            "jit_compile (True) must be False: micro-batches, sizes and factors may change with "
            "each step, which is not compiled"
        )
    if model.steps_per_execution != 1:
        raise ValueError(
            f"steps_per_execution ({model.steps_per_execution}) must be 1: a step is as large as "
            "batch_size says"
        )
    stock = keras.Model.train_step
    if getattr(type(model), "train_step", stock) is not stock:
        raise ValueError(
            f"train_step() of {type(model).__name__} would not be called: override compute_loss() "
            "and compute_metrics(), or write a loop with AdaptiveDataParallel"
        )


def check_fit(batch_size: int, arguments: Mapping[str, Any]) -> None:
    """Reject arguments of `fit`.

    Raises:
        ValueError: As in `check_model`.
    """
    given = arguments["batch_size"]
    if given not in (None, batch_size):
        raise ValueError(
            f"batch_size ({given}) of fit() must be that of the Model ({batch_size}), or left out: "
            "set_batch_size() changes the batch"
        )
    if (steps := arguments["steps_per_epoch"]) is not None:
        raise ValueError(
            f"steps_per_epoch ({steps}) must be None: an epoch is one of the reference run"
        )
    callbacks = arguments["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ValueError("callbacks must be a list of callbacks, and is a CallbackList")
    for callback in keras.tree.flatten(callbacks or []):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore resumes at the start of an epoch, and does not know the data: "
                "use resilin.checkpoint_to()"
            )


def is_writer(callback: Any) -> bool:
    """Whether a callback of Keras writes files, so that only one replica may run it."""
    return any(base.__name__ in _WRITERS for base in type(callback).__mro__)


def check_mask(outputs: Any) -> None:
    """Reject outputs with a mask where micro-batches are weighted by samples.

    Raises:
        ValueError: The outputs have a mask.
    """
    if any(has_mask(leaf) for leaf in keras.tree.flatten(outputs)):
        raise ValueError(
            "the outputs have a mask, so the loss is a mean over the entries that it keeps, but "
            "micro-batches are weighted by samples: pass batch_weight=, such as the number of "
            "tokens"
        )
