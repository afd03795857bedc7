"""The program of the family `keras`, with options."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import resilin
from resilin.keras import Model
from tests.fuzz.hooks import folder, kill_point, save

NUM = 18


class Points(keras.callbacks.Callback):
    """Places where the process may be killed; the last of the callbacks."""

    def on_train_batch_begin(self, batch, logs=None):
        kill_point("batch")

    def on_train_batch_end(self, batch, logs=None):
        kill_point("batch_end")

    def on_epoch_begin(self, epoch, logs=None):
        kill_point("epoch_begin")

    def on_epoch_end(self, epoch, logs=None):
        kill_point("epoch_end")

    def on_test_batch_end(self, batch, logs=None):
        kill_point("validating")

    def on_train_end(self, logs=None):
        kill_point("fit_end")


class Notes(keras.callbacks.Callback):
    """A callback with a memory that reaches back into the training."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = np.random.default_rng(7)
        self.steps, self.epochs = 0, []

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer
        if not isinstance(rate._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            rate.learning_rate = float(rate.learning_rate) * (0.9 + 0.1 * self.dice.random())

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def make_optimizer(kind: str) -> Any:
    if kind == "cosine":
        return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 20))
    if kind in ("adam", "ema"):
        return keras.optimizers.Adam(0.02, use_ema=kind == "ema")
    return keras.optimizers.SGD(0.05, momentum=0.9)


def loss(y: Any, outputs: Any) -> Any:
    return keras.ops.mean((y - outputs) ** 2, axis=-1)


def make_callbacks(options: dict[str, Any], number: int) -> list[Any]:
    monitor = "val_loss" if options.get("validate") else "loss"
    chosen: list[Any] = []
    if early := options.get("early"):
        stop = keras.callbacks.EarlyStopping
        chosen.append(stop(monitor, patience=0, restore_best_weights=early == "best"))
    scheduled = options.get("optimizer") == "cosine"
    if options.get("rates") == "plateau" and not scheduled:
        reduce = keras.callbacks.ReduceLROnPlateau
        chosen.append(reduce(monitor, factor=0.5, patience=1, min_delta=0.1))
    if options.get("rates") == "falls" and not scheduled:
        chosen.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8))
    if options.get("keep"):
        path = folder() / f"best-{number}.weights.h5"
        keeps = keras.callbacks.ModelCheckpoint
        chosen.append(keeps(path, monitor, save_best_only=True, save_weights_only=True))
    if options.get("rows"):
        chosen.append(keras.callbacks.CSVLogger(folder() / f"rows-{number}.csv"))
    return chosen


def change(model: Any, net: Any, options: dict[str, Any]) -> None:
    """What a script does between two calls of `fit`."""
    kind = options.get("between")
    if kind == "rate" and options.get("optimizer") != "cosine":
        model.optimizer.learning_rate = 0.03
    if kind == "freeze":
        net.layers[0].trainable = not net.layers[0].trainable
    if kind in ("compile", "freeze"):
        net.compile(make_optimizer(options.get("optimizer", "sgd")), loss)


def main(options: dict[str, Any]) -> None:
    """Trains, and saves the final state."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    generator = np.random.default_rng(1)
    x, y = generator.normal(size=(NUM, 3)), generator.normal(size=(NUM, 1))
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    net = keras.Sequential([keras.Input((3,)), *layers])
    net.compile(make_optimizer(options.get("optimizer", "sgd")), loss)
    kill_point("setup")
    resilin.checkpoint_to(None, memory_every=1)
    model = Model(net, 4, 1, rule="constant")
    if sizes := options.get("trace"):
        model.set_batch_size(lambda clock: sizes[min(clock.steps // 2, len(sizes) - 1)])
    held = (x[:5], y[:5]) if options.get("validate") else None
    notes = Notes()
    done, histories = 0, []
    for number, epochs in enumerate(options.get("epochs", [2])):
        if number:
            change(model, net, options)
            kill_point("between")
        chosen = make_callbacks(options, number)
        if options.get("notes"):
            chosen.append(notes)
        history = model.fit(
            x,
            y,
            epochs=done + epochs,
            initial_epoch=done,
            callbacks=[*chosen, Points()],
            validation_data=held,
            verbose=0,
        )
        done += epochs
        histories.append({name: len(values) for name, values in history.history.items()})
    kill_point("trained")
    clock = resilin.current_job().clock
    rows = sorted(folder().glob("rows-*.csv"))
    save(
        {
            "parameters": [torch.from_numpy(np.array(w)) for w in model.get_weights()],
            "optimizer": [v.value.detach().clone().double() for v in model.optimizer.variables],
            "steps": clock.steps,
            "samples": clock.samples,
            "histories": histories,
            "notes": [notes.steps, notes.epochs, notes.dice.random()],
            "rows": [len(path.read_text().splitlines()) for path in rows],
        }
    )
