"""Keras with a backend that compiles its step: `KERAS_BACKEND=jax python keras_compiled_job.py`.

Prints what was measured, as JSON.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

from resilin import PowerRule, Schedule
from resilin.keras import Model

NUM, EPOCHS = 64, 2
GENERATOR = np.random.default_rng(1)
X = GENERATOR.normal(size=(NUM, 6)).astype("float32")
Y = X[:, :3].argmax(axis=1)


def make(rate=0.1, **settings):
    keras.utils.set_random_seed(2)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    net = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(rate, **settings), loss, metrics=["accuracy"])
    return net


def decay():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.8)


def stock(net, batch_size, **settings):
    net.fit(X, Y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0, **settings)
    return net


def ours(net, batch_size, max_local_bsz, other=None, rule="auto", validation=None):
    model = Model(net, batch_size, max_local_bsz, rule=rule)
    if other is not None:
        model.set_batch_size(other)
    model.fit(X, Y, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=validation)
    return model


def apart(one, other):
    return max(
        float(np.abs(a - b).max())
        for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


def refused(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return "not refused"


class Change(keras.callbacks.Callback):
    """Changes the accumulation in the middle of an epoch, and notes which batches made a step."""

    def __init__(self):
        super().__init__()
        self.stepped, self.last = [], None

    def on_train_batch_begin(self, batch, logs=None):
        self.last = self.model.get_weights()[0]
        if batch == 4:
            self.model.optimizer.gradient_accumulation_steps = 4

    def on_train_batch_end(self, batch, logs=None):
        self.stepped.append(bool((self.model.get_weights()[0] != self.last).any()))


def main() -> None:
    told = {}
    trained = model = ours(make(decay()), 32, 8, validation=(X, Y))
    told["plan"] = [model.plan.steps, model.plan.batch_size, model.plan.global_batch_size]
    told["logs"] = sorted(model.history.history)
    whole = stock(make(decay()), 32)
    told["accumulated"] = apart(model, whole)
    # The schedule that the reference run had at as many samples, and its rate times 2.
    twice = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.8**2)
    model = ours(make(decay()), 16, 8, other=32, rule="linear")
    told["scaled"] = apart(model, stock(make(twice), 32))
    told["rates"] = [float(net.optimizer.learning_rate) for net in (model, save(model))]
    model = ours(make(0.1), 8, 8, other=32, rule="sqrt")
    model.fit(X, Y, epochs=2, initial_epoch=1, verbose=0, validation_split=0.5)
    told["rates"].append(float(model.optimizer.learning_rate))

    # Upstream: schedules count batches, also where several of them are one step.
    wrong = stock(make(decay(), gradient_accumulation_steps=4), 8)
    told["upstream_scheduled"] = apart(wrong, whole)
    change = Change()
    net = make(gradient_accumulation_steps=2)
    net.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[change])
    told["upstream_stepped"] = change.stepped

    model = Model(make(), 32, 8)
    told["refused"] = [
        refused(function)
        for function in (
            lambda: model.autoscale_batch_size(64),
            lambda: model.set_batch_size(Schedule(lambda epoch: 8, unit="epochs")),
            lambda: trained.set_batch_size(64),
            lambda: ours(make(), 32, 8, other=64),
            lambda: ours(make(), 32, 8, other=64, rule="adascale"),
            lambda: ours(make(weight_decay=0.1), 32, 8, other=64, rule="sqrt"),
            lambda: ours(make(), 32, 8, other=64, rule=PowerRule(0.5, betas=True)),
            lambda: ours(make(), 32, 7),
            lambda: ours(make(), 24, 8),
            lambda: ours(make(), 32, "auto"),
            lambda: Model(make(), 32, stats_every=1),
            lambda: model.fit(iter(X)),
            launch_two,
            lambda: Model(make(), 32, find_unused_parameters=True),
        )
    ]
    print(json.dumps(told))


def launch_two():
    os.environ["WORLD_SIZE"] = "2"
    try:
        Model(make(), 32)
    finally:
        del os.environ["WORLD_SIZE"]


def save(model):
    path = Path(sys.argv[1]) / "net.keras"
    model.save(path)
    return keras.models.load_model(path)


if __name__ == "__main__":
    main()
