"""The loop of `fit` with the torch backend: the loop of Keras, over steps instead of batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.compat.keras_names import validates
from resilin.integrations.keras.callback import ReadOut
from resilin.integrations.keras.data import is_array
from resilin.integrations.keras.progress import Progress
from resilin.integrations.keras.refusals import is_writer
from resilin.integrations.keras.steps import Steps
from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.script.epochs import begin_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of `fit`."""

    number: int
    """Number of earlier calls."""
    first: int
    """Epochs of earlier calls: number of its first epoch in the job."""
    epochs: range
    """Its epochs, as the user counts them."""

    def left(self, done: int) -> list[tuple[int, int]]:
        """Epochs that are not over, as the job and as the user count them.

        Args:
            done: Epochs of the job that are over.
        """
        numbered = enumerate(self.epochs, self.first)
        return [(number, epoch) for number, epoch in numbered if number >= done]


def list_callbacks(given: Any) -> list[Any]:
    """The callbacks of all replicas, in the same order everywhere."""
    callbacks: list[Any] = keras.tree.flatten(given or [])
    if not any(isinstance(callback, ReadOut) for callback in callbacks):
        callbacks.insert(0, ReadOut())
    if not any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
        callbacks.append(keras.callbacks.History())
    return callbacks


def make_callbacks(
    model: Any, callbacks: list[Any], *, verbose: Any, epochs: int, steps: int | None
) -> keras.callbacks.CallbackList:
    """The callbacks of this replica: replica 0 writes and prints, all replicas decide."""
    if Home().engine.membership.replica != 0:
        callbacks = [callback for callback in callbacks if not is_writer(callback)]
        verbose = 0
    return keras.callbacks.CallbackList(
        callbacks,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def evaluation(held: Any, batch_size: int, steps: int | None) -> dict[str, Any] | None:
    """Arguments of `evaluate` for the validation data; None if there are none."""
    if held is None:
        return None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(held)
    arguments = {"x": x, "y": y, "sample_weight": sample_weight, "steps": steps, "verbose": 0}
    return {**arguments, "batch_size": batch_size} if is_array(x) else arguments


def run(
    model: Any,
    steps: Steps,
    progress: Progress,
    loader: AdaptiveDataLoader,
    callbacks: keras.callbacks.CallbackList,
    call: Call,
    validation: Mapping[str, Any] | None,
    validation_freq: Any,
) -> Any:
    """Train, or resume where the job was.

    Args:
        model: The Keras model.
        steps: Trains it.
        progress: Progress of the calls of `fit`.
        loader: The data.
        callbacks: The callbacks.
        call: Which call of `fit` it is.
        validation: Arguments of `evaluate`; None validates nothing.
        validation_freq: As in Keras.

    Returns:
        The History.
    """
    home, history = progress.home, model.history
    total = call.first + len(call.epochs)
    home.set_total_epochs(total)
    left = call.left(home.job.epoch)
    model.stop_training = False
    with progress.beginning(call.number, history):
        callbacks.on_train_begin()
        if progress.in_epoch:
            callbacks.on_epoch_begin(left[0][1])
    logs: dict[str, Any] = {name: values[-1] for name, values in history.history.items()}
    for number, epoch in left:
        begin_epoch(number)
        if not progress.in_epoch:
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            progress.in_epoch = True
        steps.check()
        model.train()
        with closing(steps.epoch(loader, callbacks.on_train_batch_begin)) as numbers:
            for step in numbers:
                callbacks.on_train_batch_end(step, model.get_metrics_result())
                if model.stop_training:
                    break
        model.eval()
        logs = dict(model.get_metrics_result())
        if validation is not None and validates(model, epoch, validation_freq):
            validated = model.evaluate(**validation, callbacks=callbacks, return_dict=True)
            logs.update({f"val_{name}": value for name, value in validated.items()})
        callbacks.on_epoch_end(epoch, logs)
        progress.step, progress.in_epoch = 0, False
        progress.share()
        if model.stop_training:
            break
    # The state kept here is from before the end of the call: a script that is started again ends
    # the call again, and one with more epochs continues to train.
    begin_epoch(total)
    home.end_training()
    if len(call.epochs):
        model.optimizer.finalize_variable_values(model.trainable_variables)
    callbacks.on_train_end(logs)
    progress.ended()
    return history
