"""The loop of `fit` with the torch backend: that of Keras, over steps in place of batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.integrations.keras.callback import ReadOut
from resilin.integrations.keras.data import is_array
from resilin.integrations.keras.refusals import is_writer
from resilin.integrations.keras.steps import Steps
from resilin.training.boundaries import end_training, start
from resilin.training.epochs import begin_epoch
from resilin.training.job import current_job
from resilin.training.loader import AdaptiveDataLoader


def make_callbacks(
    model: Any, given: Any, *, verbose: Any, epochs: int, steps: int | None
) -> keras.callbacks.CallbackList:
    """The callbacks of this replica: one of them writes and prints, all of them decide."""
    callbacks = keras.tree.flatten(given or [])
    if not any(isinstance(callback, ReadOut) for callback in callbacks):
        callbacks.insert(0, ReadOut())
    if current_job().engine.replica != 0:
        callbacks = [callback for callback in callbacks if not is_writer(callback)]
        verbose = 0
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
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
    told = {"x": x, "y": y, "sample_weight": sample_weight, "steps": steps, "verbose": 0}
    return {**told, "batch_size": batch_size} if is_array(x) else told


def run(
    model: Any,
    steps: Steps,
    loader: AdaptiveDataLoader,
    callbacks: keras.callbacks.CallbackList,
    epochs: range,
    first: int,
    validation: Mapping[str, Any] | None,
    validation_freq: Any,
) -> Any:
    """Trains, and goes on where the job was.

    Args:
        model: The Keras model.
        steps: What trains it.
        loader: The data.
        callbacks: The callbacks.
        epochs: The epochs, as the user counts them.
        first: Epochs of the job before these: those of earlier calls of `fit`.
        validation: Arguments of `evaluate`; None validates nothing.
        validation_freq: As in Keras.

    Returns:
        The History.
    """
    job = current_job()
    job.total_epochs = first + len(epochs)
    steps.callbacks = list(callbacks.callbacks)
    start(job)
    loader.take_part()
    model.stop_training = False
    logs: dict[str, Any] = {}
    callbacks.on_train_begin()
    steps.remind()
    for number, epoch in enumerate(epochs, first):
        if number < job.epoch:
            continue
        begin_epoch(number)
        if not steps.step:
            # Else the job goes on within an epoch, with what its metrics were.
            model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        model.train()
        with closing(steps.epoch(loader, callbacks.on_train_batch_begin)) as numbers:
            for step in numbers:
                callbacks.on_train_batch_end(step, model.get_metrics_result())
                if model.stop_training:
                    break
        model.eval()
        logs = dict(model.get_metrics_result())
        if validation is not None and model._should_eval(epoch, validation_freq):
            validated = model.evaluate(**validation, callbacks=callbacks, return_dict=True)
            logs.update({f"val_{name}": value for name, value in validated.items()})
        callbacks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    if job.epoch < job.total_epochs:
        begin_epoch(job.total_epochs)
        end_training(job)
    if len(epochs):
        model.optimizer.finalize_variable_values(model.trainable_variables)
    callbacks.on_train_end(logs)
    return model.history
