"""Keras: its training loop, the learning rate of its optimizers, and state of its callbacks.

Loads no Keras: a name is looked up on the given model or optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilin.compat.names import Package

KERAS = Package("keras", tested=("3.15.1",))
"""Keras, and the names of it that resilin uses."""

_BUILD = KERAS.name("keras:Model._symbolic_build", "builds a model from one batch")
_LOSS = KERAS.name("keras:Model._compute_loss", "computes the loss as the loop of Keras does")
_VALIDATES = KERAS.name(
    "keras:Model._should_eval", "validates at the interval that `fit` was given"
)
_LAYERS = KERAS.name("keras:Model._flatten_layers", "distinguishes statistics from frozen weights")
_TRACKER = KERAS.name("keras:Model._loss_tracker", "logs the mean loss", instance=True)
_TRAINING = KERAS.name(
    "keras:Model._call_has_training_arg", "calls a model in training mode", instance=True
)
_WEIGHTS = KERAS.name(
    "keras:Layer._trainable_variables",
    "distinguishes statistics from frozen weights",
    instance=True,
)
_RATE = KERAS.name(
    "keras:optimizers.Optimizer._learning_rate", "finds a learning-rate schedule", instance=True
)
_CURRENT_RATE = KERAS.name(
    "keras:optimizers.Optimizer._get_current_learning_rate", "scales the learning rate of a step"
)
_COMPARE = KERAS.name(
    "keras:callbacks.EarlyStopping._set_monitor_op", "restores callbacks that monitor a value"
)
_MASK = "_keras_mask"
"""Attribute of a tensor with a mask."""
SEED = "seed_generator_state"
"""Name of the variable of a seed generator."""
SET_BY_FIT = ("params", "_model", "model")
"""Attributes of a callback that `fit` sets."""
REMADE = (
    "csv_file",
    "writer",
    "append",
    "append_header",
    "progbar",
    "monitor_op",
    "_writers",
    "_batch_trace_context",
    "_summary_module",
)
"""Attributes that callbacks of Keras create again when training begins."""


def check(model: Any) -> None:
    """Check that a model has all names that the functions below use.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (_BUILD, _LOSS, _VALIDATES, _LAYERS, _TRACKER, _TRAINING, _WEIGHTS):
        name.of(model)


# Models ------------------------------------------------------------------------------------------


def build(model: Any, batch: Any) -> None:
    """Build a model, its optimizer and its metrics from one batch."""
    _BUILD.of(model)(data_batch=batch)


def call_in_training(model: Any, x: Any) -> Any:
    """Call a model as its training step does."""
    return model(x, training=True) if _TRAINING.of(model) else model(x)


def loss_of(model: Any, x: Any, y: Any, outputs: Any, sample_weight: Any) -> Any:
    """The loss of a batch, with what layers add to it."""
    return _LOSS.of(model)(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)


def track_loss(model: Any, loss: Any, weight: float) -> None:
    """Add a loss to the mean that is logged."""
    _TRACKER.of(model).update_state(loss, sample_weight=weight)


def validates(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether `fit` validates after this epoch."""
    return bool(_VALIDATES.of(model)(epoch, frequency))


def weights_of(model: Any) -> list[Any]:
    """All variables that were made as trainable, also those of frozen layers."""
    return [weight for layer in _LAYERS.of(model)() for weight in _WEIGHTS.of(layer)]


def has_mask(tensor: Any) -> bool:
    """Whether a tensor has a mask."""
    return getattr(tensor, _MASK, None) is not None


# Optimizers --------------------------------------------------------------------------------------


def rate_of(optimizer: Any) -> Any:
    """The learning rate as the optimizer holds it: a variable, a schedule or a function."""
    return _RATE.of(optimizer)


def own_rate(optimizer: Any) -> Callable[[], Any]:
    """The optimizer's own method for the learning rate, without resilin's replacement."""
    vars(optimizer).pop(_CURRENT_RATE.attribute, None)
    method: Callable[[], Any] = _CURRENT_RATE.of(optimizer)
    return method


def replace_rate(optimizer: Any, rate: Callable[[], Any]) -> None:
    """Replace the method that returns the learning rate of an optimizer."""
    vars(optimizer)[_CURRENT_RATE.attribute] = rate


def restore_rate(optimizer: Any) -> None:
    """Undo `replace_rate`."""
    vars(optimizer).pop(_CURRENT_RATE.attribute, None)


# Callbacks ---------------------------------------------------------------------------------------


def choose_comparison(callback: Any) -> None:
    """Make a callback that monitors a value choose its comparison and the sign of its delta."""
    _COMPARE.of(callback)()
