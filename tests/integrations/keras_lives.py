"""Keras programs that are killed: each comes to what it comes to undisturbed."""

from __future__ import annotations

import collections
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import resilin
import resilin.integrations.keras.model  # loaded before lives are forked
from resilin.keras import Model
from tests.integrations.lives import Life

NUM = 44
BATCH = 8
STEPS = 6
"""Steps of an epoch."""


def make_data():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(NUM, 5))
    return x, (x[:, :3] + generator.normal(size=(NUM, 3))).argmax(axis=1)


X, Y = make_data()
HELD = (X[::3], Y[::3])


def make_net(*layers, optimizer=None, rate=0.2):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    first = keras.layers.Dense(7, activation="tanh", name="first")
    net = keras.Sequential([keras.Input((5,)), first, *layers, keras.layers.Dense(3)])
    compile_net(net, optimizer or keras.optimizers.SGD(rate, momentum=0.9))
    return net


def compile_net(net, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, metrics=["accuracy"])


def make_model(net, **settings):
    resilin.checkpoint_to(None, memory_every=1)
    return Model(net, BATCH, 5, **{"rule": "constant", **settings})


class Kill(keras.callbacks.Callback):
    """Kills the process at places such as `step 9`, `test 1`, `begin 2`, `end 2` or `over`.

    Steps are counted over all calls of `fit`; `2nd` in front is the second time in one life.
    """

    def __init__(self, life: Life, *places: str) -> None:
        super().__init__()
        self._come = life.die
        self._names = places
        self._epoch = 0

    def _at(self, place: str) -> None:
        for name in self._names:
            if name.partition("#")[0] == place:
                self._come(name)

    def on_train_batch_begin(self, batch, logs=None):
        self._at(f"step {resilin.current_job().clock.steps}")

    def on_train_batch_end(self, batch, logs=None):
        self._at(f"stepped {resilin.current_job().clock.steps}")

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._at(f"begin {epoch}")

    def on_test_batch_end(self, batch, logs=None):
        self._at(f"test {self._epoch}")

    def on_epoch_end(self, epoch, logs=None):
        self._at(f"end {epoch}")

    def on_train_end(self, logs=None):
        self._at("over")


def told(model, *histories, **more) -> dict[str, Any]:
    optimizer = model.optimizer
    return {
        "weights": [w.ravel().tolist() for w in model.get_weights()],
        "optimizer": [keras.ops.convert_to_numpy(v).ravel().tolist() for v in optimizer.variables],
        "steps": resilin.current_job().clock.steps,
        "samples": resilin.current_job().clock.samples,
        "histories": [{"epoch": h.epoch, **h.history} for h in histories],
        **more,
    }


def best_weights(life):
    model = make_model(make_net(rate=0.8))

    def stop():
        return keras.callbacks.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, start_from_epoch=1
        )

    kill = Kill(life, "stepped 14", "test 2", "over", "step 20", "stepped 33", "end 6", "end 6#2")
    settings = {"validation_data": HELD, "verbose": 0}
    one = model.fit(X, Y, epochs=4, callbacks=[stop(), kill], **settings)
    two = model.fit(X, Y, epochs=9, initial_epoch=4, callbacks=[stop(), kill], **settings)
    return told(model, one, two)


def ema(life):
    rate = keras.optimizers.schedules.CosineDecay(0.1, 18)
    model = make_model(make_net(optimizer=keras.optimizers.Adam(rate, use_ema=True)))
    kill = Kill(life, "stepped 3", "step 12", "step 12#2", "stepped 15")
    one = model.fit(X, Y, epochs=2, callbacks=[kill], verbose=0)
    two = model.fit(X, Y, epochs=1, callbacks=[kill], verbose=0)
    three = model.fit(X, Y, epochs=1, callbacks=[kill, keras.callbacks.SwapEMAWeights()], verbose=0)
    return told(model, one, two, three)


class Stop(keras.callbacks.EarlyStopping):
    pass


class Reduce(keras.callbacks.ReduceLROnPlateau):
    """Of the user, and with a memory of its own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.seen.append(float(self.model.optimizer.learning_rate))


class Tally:
    """A helper of a callback."""

    def __init__(self):
        self.num, self.sums = 0, collections.defaultdict(float)


class Own(keras.callbacks.Callback):
    """All kinds of memory."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(5)
        self.metric = keras.metrics.Mean(dtype="float64")
        self.tally = Tally()
        self.average = np.zeros(3)
        self.losses = []
        self.recent = collections.deque(maxlen=3)
        self.patience = 3
        self.begun = 0

    def on_train_begin(self, logs=None):
        self.begun += 1
        self.made = Tally()
        self.model.optimizer.learning_rate = 0.15

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = rate * (0.9 + 0.01 * self.generator.random())

    def on_train_batch_end(self, batch, logs=None):
        self.metric.update_state(logs["loss"])
        self.tally.num += 1
        self.made.num += 1
        self.tally.sums[batch % 2] += logs["loss"]
        self.average *= 0.5
        self.average += logs["loss"]
        self.recent.append(logs["loss"])
        self.losses += [logs["loss"]] * 20  # many of them are packed

    @property
    def memory(self):
        return {
            "random": self.generator.random(),
            "metric": float(self.metric.result()),
            "num": [self.tally.num, self.made.num, self.begun],
            "sums": [self.tally.sums[0], self.tally.sums[1], self.tally.sums[7]],
            "average": self.average.tolist(),
            "recent": [*self.recent, self.recent.maxlen],
            "losses": [len(self.losses), sum(self.losses)],
        }


class Asked(keras.callbacks.Callback):
    """Has methods for its state."""

    def __init__(self):
        super().__init__()
        self.hidden = (n for n in range(1000))
        self.num = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num = next(self.hidden)

    def state_dict(self):
        return {"num": self.num}

    def load_state_dict(self, state):
        while self.num < state["num"]:
            self.num = next(self.hidden)


def memories(life):
    model = make_model(make_net())
    own, asked = Own(), Asked()
    watched = {"monitor": "val_loss", "patience": 1, "min_delta": 0.05}
    stop, reduce = Stop(**{**watched, "patience": 4}), Reduce(factor=0.5, **watched)
    kill = Kill(life, "stepped 4", "step 4", "stepped 9", "test 2", "test 2#2", "end 3", "begin 4")
    given = [reduce, own, stop, asked, kill]
    one = model.fit(X, Y, epochs=9, callbacks=given, validation_data=HELD, verbose=0)
    kept = {"seen": reduce.seen, "own": own.memory, "asked": asked.num, "stop": stop.stopped_epoch}
    return told(model, one, **kept)


def files(life):
    """CSVLogger, ModelCheckpoint and History, with rows that are on disk before they are kept."""
    net = make_net(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=4))
    model = make_model(net, rule="adascale", stats_every=2)
    log, best = life.folder / "log.csv", life.folder / "best.weights.h5"
    given = [
        keras.callbacks.CSVLogger(log),
        keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
        keras.callbacks.TerminateOnNaN(),
        Kill(life, "end 0", "test 1", "test 1#2", "end 1", "begin 2", "stepped 19", "end 4"),
    ]
    split = {"validation_split": 0.25, "verbose": 0}
    one = model.fit(X, Y, epochs=3, callbacks=given, **split)
    two = model.fit(X, Y, epochs=6, initial_epoch=3, callbacks=given, **split)
    model.load_weights(best)
    assert [*map(len, one.history.values())].count(3) == len(one.history)
    return told(model, one, two, rows=log.read_text())


def freeze(life):
    keras.utils.set_random_seed(2)
    net = make_net(keras.layers.Dense(7, name="second"))
    net.get_layer("first").trainable = False
    compile_net(net, keras.optimizers.SGD(0.1, momentum=0.9))
    model = make_model(net)
    kill = Kill(life, "stepped 4", "step 12", "stepped 13", "stepped 15", "test 0")
    one = model.fit(X, Y, epochs=2, callbacks=[kill], verbose=0)
    net.get_layer("first").trainable = True
    compile_net(net, keras.optimizers.Adam(0.01))
    two = model.fit(X, Y, epochs=1, callbacks=[kill], validation_data=HELD, verbose=0)
    # Frozen again without compiling anew: the optimizer is the same, and trains less.
    net.get_layer("second").trainable = False
    frozen = net.get_layer("second").get_weights()
    three = model.fit(X, Y, epochs=1, callbacks=[kill], verbose=0)
    assert all(map(np.array_equal, frozen, net.get_layer("second").get_weights()))
    return told(model, one, two, three)


class Ends(keras.callbacks.Callback):
    """Writes down when a call is over: an effect that no state can undo."""

    def __init__(self, path) -> None:
        super().__init__()
        self._path = path

    def on_train_end(self, logs=None):
        with self._path.open("a") as file:
            file.write(f"{resilin.current_job().clock.steps} {sorted(logs)}\n")


def rates(life):
    """Learning rates that callbacks and the script set, in calls that are killed."""
    ends = Ends(life.folder / "ends")
    model = make_model(make_net())
    falls = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)
    weights = np.linspace(0.5, 2, NUM)
    kill = Kill(life, "stepped 2", "begin 1", "stepped 7", "stepped 14", "begin 0", "stepped 20")
    settings = {"sample_weight": weights, "verbose": 0}
    one = model.fit(X, Y, epochs=2, callbacks=[falls, ends, kill], **settings)
    model.optimizer.learning_rate = 0.3
    two = model.fit(X, Y, epochs=4, initial_epoch=2, callbacks=[falls, ends, kill], **settings)
    return told(model, one, two, ends=(life.folder / "ends").read_text())


def two_replicas(life):
    places = [["stepped 4", "test 1", "end 2"], ["step 9", "step 9#2", "stepped 20"]]
    rows, best = life.folder / "log.csv", life.folder / "best.keras"
    given = [
        keras.callbacks.CSVLogger(rows),
        keras.callbacks.ModelCheckpoint(best, "val_loss", save_best_only=True),
        Reduce(monitor="val_loss", factor=0.5, patience=1),
        Kill(life, *places[life.replica]),
    ]
    model = make_model(make_net())
    settings = {"validation_data": HELD, "verbose": 0}
    one = model.fit(X, Y, epochs=2, callbacks=given, **settings)
    two = model.fit(X, Y, epochs=4, initial_epoch=2, callbacks=given, **settings)
    return told(model, one, two, rows=rows.read_text(), best=given[1].best)


two_replicas.replicas = 2

PROGRAMS = {
    function.__name__: function
    for function in (best_weights, ema, memories, files, freeze, rates, two_replicas)
}
KILLS = {
    "best_weights": 7,
    "ema": 4,
    "memories": 7,
    "files": 7,
    "freeze": 5,
    "rates": 6,
    "two_replicas": 6,
}
"""How many of its kills a program comes by."""
