"""Keras with the torch backend, elastic: exact weights, exact data, schedules in samples.

Beside each promise stands what Keras does without resilin, as an assertion: the day it fails,
upstream has repaired the fault, and the guide has to say so.
"""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import resilin
from resilin.core.stream import SampleStream
from resilin.engine.group import LAUNCHER_ENV

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras")
from keras.src.trainers.data_adapters.data_adapter_utils import (  # noqa: E402
    class_weight_to_sample_weights,
)

from resilin.integrations.keras.data import sample_weights  # noqa: E402
from resilin.integrations.keras.variables import Agreement  # noqa: E402
from resilin.keras import Model, ReadOut, accumulate  # noqa: E402
from tests.replicas import assert_identical, gathered  # noqa: E402
from tests.training.data.numbered import Numbered  # noqa: E402

# What Keras does to numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NUM = 103
REFERENCE = 10
SIZES = (10, 7, 24, 10, 31, 5)


@pytest.fixture(autouse=True)
def doubles():
    """What is compared to one process has to be exact."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


def make_data():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(NUM, 6))
    return x, x[:, :3].argmax(axis=1), generator.uniform(0.5, 2, size=NUM)


def make_net(*layers, optimizer=None, **compiled):
    """A model with the same weights each time it is made."""
    keras.utils.set_random_seed(2)
    net = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(10, activation="tanh", kernel_regularizer="l2"),
            *layers,
            keras.layers.Dense(3),
        ]
    )
    net.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        **{
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            **compiled,
        },
    )
    return net


def sizes_of(clock):
    return SIZES[clock.steps % len(SIZES)]


class Notes(keras.callbacks.Callback):
    """Notes what each step was: its size, its learning rate, and its logs."""

    def __init__(self, stop=None):
        super().__init__()
        self.sizes, self.lrs, self.logs, self.steps = [], [], [], []
        self.stop = stop

    def on_train_batch_begin(self, batch, logs=None):
        job = resilin.current_job()
        if self.stop == job.clock.steps + 1:
            job.engine.stop.request("the machine goes away")
        self.lrs.append(float(keras.ops.convert_to_tensor(self.model.optimizer.learning_rate)))

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(batch)
        self.sizes.append(resilin.current_job().micro_batch.samples)
        self.logs.append(dict(logs))


class Samples(TensorDataset):
    """Notes which samples are asked for."""

    def __init__(self):
        super().__init__(*map(torch.from_numpy, make_data()[:2]))
        self.seen = []

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def train_whole(sizes, net=None, **weights):
    """Stock Keras, one process that trains on each whole batch; and its metrics."""
    net = net or make_net()
    x, y, w = make_data()
    stream, cursor, logs = SampleStream(NUM, seed=0), 0, []
    for size in sizes:
        span = stream.batch(cursor, size)
        assert len(span) == size
        rows = stream.indices(span)
        weight = {"sample_weight": w[rows]} if weights else {}
        logs.append(net.train_on_batch(x[rows], y[rows], return_dict=True, **weight))
        cursor = span.stop
    means = {
        name: float(np.average([float(log[name]) for log in logs], weights=sizes))
        for name in logs[0]
    }
    return net, means


def flat(net):
    return torch.cat([v.value.detach().double().reshape(-1) for v in net.variables])


def assert_same(net, whole, tolerance=1e-6):
    # Keras takes means in float32, whatever the model.
    assert float((flat(net) - flat(whole)).norm() / flat(whole).norm()) < tolerance


# Weights and schedules -----------------------------------------------------------------------


@keras.saving.register_keras_serializable()
class Factor(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return x * self.w


def make_weigher(optimizer):
    """Each sample's gradient is 1: a step moves by its learning rate times its weight."""
    net = keras.Sequential([keras.Input((1,)), Factor()])
    net.compile(optimizer, loss=lambda y, outputs: -keras.ops.mean(outputs, axis=-1))
    return net


class Weights(Notes):
    """Notes by how much each step has moved."""

    def __init__(self):
        super().__init__()
        self.moves, self.last = [], 0.0

    def on_train_batch_end(self, batch, logs=None):
        now = float(self.model.get_weights()[0][0])
        self.moves.append((now - self.last) / self.lrs[-1])
        self.last = now


class Accumulation(Weights):
    """What users do to change the accumulation in the middle of an epoch."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        self.model.optimizer.gradient_accumulation_steps = self.steps(batch)


@pytest.mark.world_size(2)
def test_accumulation_that_changes_in_mid_epoch_keeps_weights_and_schedule(every_step_told):
    rate = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.9)
    ones = np.ones((16 * 32, 1))
    net = make_weigher(keras.optimizers.SGD(rate))
    model = Model(net, 16, 8, rule="constant")
    model.set_batch_size(lambda clock: 16 if clock.steps < 5 else 64)
    assert (model.plan.steps, model.plan.batch_size) == (1, 8)
    notes, micro_batches = Weights(), []
    resilin.listen(lambda event: micro_batches.append(getattr(event, "accumulation_steps", None)))
    model.fit(ones, ones, callbacks=[notes], verbose=0)
    assert notes.moves == pytest.approx([1.0] * 12, abs=1e-12)
    assert_identical(flat(net))
    if dist.get_rank() == 0:
        told = [number for number in micro_batches if number is not None]
        assert told == [1] * 5 + [4] * 6 + [3]
    # The schedule is that of the reference run: by samples, at 16 to a step.
    samples = [16 * min(step, 5) + 64 * max(0, step - 5) for step in range(12)]
    assert notes.lrs == pytest.approx([0.9 ** (number // 16) for number in samples], rel=1e-6)
    model.release()
    # Keras counts steps of the optimizer, whatever they hold.
    assert float(net.optimizer.learning_rate) == pytest.approx(0.9**12, rel=1e-6)

    # Upstream (3.15): an optimizer without accumulation cannot begin to accumulate.
    plain = make_weigher(keras.optimizers.SGD(1.0))
    with pytest.raises(AttributeError, match="_accumulated_gradients"):
        plain.fit(ones, ones, 8, callbacks=[Accumulation(lambda batch: [None, 4][batch > 5])])
    # One that does counts batches from the start of the run: the first step after the change has
    # as many as are left to a multiple, and is divided by 4 all the same.
    plain = make_weigher(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    notes = Accumulation(lambda batch: 2 if batch < 6 else 4)
    plain.fit(ones, ones, 8, callbacks=[notes], verbose=0)
    steps = [move for move in notes.moves if move]
    assert steps[:5] == pytest.approx([1.0, 1.0, 1.0, 0.5, 1.0])
    # Its schedule counts batches in place of steps.
    plain = make_weigher(keras.optimizers.SGD(rate, gradient_accumulation_steps=4))
    plain.fit(ones[:64], ones[:64], 8, verbose=0)
    assert float(plain.get_weights()[0][0]) == pytest.approx(0.9**3 + 0.9**7, rel=1e-6)


# Exactness -----------------------------------------------------------------------------------


def by_trace(model):
    text = "step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(SIZES))
    model.set_batch_size(resilin.BatchTrace.parse(text))


def by_schedule(model):
    model.set_batch_size(resilin.Schedule(lambda epoch: 10 if epoch < 0.5 else 25, unit="epochs"))


def by_autoscaler(model):
    model.autoscale_batch_size(64)


DROPPED = []


@keras.saving.register_keras_serializable()
class Drop(keras.layers.Dropout):
    """Notes which units it drops."""

    def call(self, inputs, training=False):
        outputs = super().call(inputs, training=training)
        if training:
            DROPPED.append((outputs[0] == 0).tolist())
        return outputs


def check_untrained():
    """What is not trained is the same on all replicas, and which units are dropped is not."""
    resilin.reset_job()
    x, y, _ = make_data()
    frozen = keras.layers.Dense(10, trainable=False)
    net = make_net(frozen, keras.layers.BatchNormalization(momentum=0.5), Drop(0.5, seed=3))
    model = Model(net, REFERENCE, 4, rule="linear")
    # The last batch has one sample: replica 1 takes part without any.
    model.set_batch_size(lambda clock: [17, 17, 17, 17, 34, 1][clock.steps])
    DROPPED.clear()
    notes = Notes()
    model.fit(x, y, callbacks=[notes], verbose=0)
    assert notes.sizes == [17, 17, 17, 17, 34, 1]
    assert_identical(flat(net))
    # What is frozen is not sent around.
    untrained = [
        variable.name for variable in Agreement(net, resilin.current_job().engine)._untrained
    ]
    assert untrained == ["moving_mean", "moving_variance", "seed_generator_state"]
    mean = net.layers[2].moving_mean.value
    assert bool(torch.isfinite(mean).all())
    assert float(mean.abs().sum()) > 0
    drawn = gathered([DROPPED[0]])
    assert drawn[0] != drawn[1]
    # Its own words, in the logs of the epoch, are those of all samples.
    assert gathered([notes.logs]) == [notes.logs] * 2


@pytest.mark.world_size(2)
def test_batch_sizes_that_change_train_like_stock_keras_that_sees_whole_batches():
    x, y, w = make_data()
    for choose, weights in (
        (by_trace, {"sample_weight": w}),
        (by_schedule, {}),
        (by_autoscaler, {}),
    ):
        resilin.reset_job()
        net, notes = make_net(), Notes()
        model = Model(net, REFERENCE, 4, rule="constant", stats_every=1)
        choose(model)
        history = model.fit(
            x, y, epochs=2, callbacks=[notes], verbose=0, validation_data=(x, y), **weights
        ).history
        assert_identical(flat(net))
        assert sum(notes.sizes) == 2 * NUM
        assert len(set(notes.sizes)) > 1
        ends = np.cumsum(notes.sizes).tolist().index(NUM) + 1
        assert notes.steps == [*range(ends), *range(len(notes.sizes) - ends)]
        _, means = train_whole(notes.sizes[:ends], **weights)
        for name, value in means.items():
            assert history[name][0] == pytest.approx(value), name
        assert_same(net, train_whole(notes.sizes, **weights)[0])
        evaluated = net.evaluate(x, y, verbose=0, return_dict=True)
        assert history["val_accuracy"][1] == pytest.approx(evaluated["accuracy"])
        assert gathered([notes.logs]) == [notes.logs] * 2
        check_logs(notes, history)

    check_untrained()

    # Upstream (3.15): with the torch backend, processes know nothing of each other. Each trains a
    # model of its own, on all of the data.
    plain, data = make_net(), Samples()
    torch.manual_seed(dist.get_rank())
    plain.fit(DataLoader(data, batch_size=5, shuffle=True), shuffle=False, verbose=0)
    both = gathered([flat(plain)])
    assert not torch.equal(both[0], both[1])
    assert {*data.seen} == {*range(NUM)}


def check_logs(notes, history):
    logs, sizes = notes.logs, notes.sizes
    assert [log["resilin/batch_size"] for log in logs] == sizes
    progress = np.cumsum([log["resilin/gain"] for log in logs])
    assert progress == pytest.approx([log["resilin/progress"] for log in logs])
    assert sum("resilin/noise_scale" in log for log in logs) > len(logs) / 2
    assert history["resilin/batch_size"][-1] == sizes[-1]
    assert history["resilin/progress"][-1] == pytest.approx(progress[-1])


# Resuming ------------------------------------------------------------------------------------


def join():
    """Two processes."""
    resilin.init_process_group()


def leave():
    """This process is alone from now on."""
    resilin.reset_job()
    dist.destroy_process_group()
    resilin.reset_job()


class Noted(keras.losses.Loss):
    """A loss that notes the samples of a training step, which come with the labels."""

    def __init__(self):
        super().__init__()
        self.samples = []

    def call(self, y_true, y_pred):
        micro_batch = resilin.current_job().micro_batch
        counts = micro_batch is None or micro_batch.weight
        if counts and y_true.device.type != "meta":
            self.samples += y_true[:, 1].long().tolist()
        return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


@contextlib.contextmanager
def ends_at(step):
    """The job ends behind this step, if that is a number, because its machine goes away."""
    if step is None:
        yield
        return
    with pytest.raises(SystemExit):
        yield
    assert resilin.current_job().clock.steps == step


def fit_samples(directory, stop=None, epochs=2):
    """Trains until a step; returns what was trained, and on which samples."""
    resilin.reset_job()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.97)
    noted = Noted()
    net = make_net(optimizer=keras.optimizers.SGD(rate, momentum=0.9), loss=noted, metrics=None)
    model, notes = Model(net, REFERENCE, 4, rule="constant"), Notes(stop)
    if directory is not None:
        resilin.checkpoint_to(directory, every=None)
    model.set_batch_size(sizes_of)
    history, (x, y, _) = None, make_data()
    labels = np.stack([y, np.arange(NUM)], axis=1)
    with ends_at(stop):
        history = model.fit(x, labels, epochs=epochs, callbacks=[notes], verbose=0).history
    return net, notes, gathered(noted.samples), history


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            raise InterruptedError


def check_stock_resuming(directory):
    """Upstream (3.15): what is restored within an epoch begins that epoch anew."""
    samples, (x, y, _) = [], make_data()
    labels = np.stack([y, np.arange(NUM)], axis=1)
    for callbacks in ([Interrupt()], []):
        noted = Noted()
        net = make_net(loss=noted, metrics=None)
        backup = keras.callbacks.BackupAndRestore(directory / "backup", save_freq=6)
        with contextlib.suppress(InterruptedError):
            net.fit(x, labels, 10, verbose=0, callbacks=[backup, *callbacks])
        samples.append(noted.samples)
    assert len(samples[0]) == 60
    assert len({*samples[0]} & {*samples[1]}) == 60


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2, init=False)
def test_a_job_resumes_in_mid_epoch_on_one_process_and_again_on_two(shared_path):
    first = int(os.environ["RANK"]) == 0
    launched = {name: os.environ[name] for name in LAUNCHER_ENV}
    join()
    whole, all_notes, _, expected = fit_samples(None)
    _, notes, samples, _ = fit_samples(shared_path / "kept", stop=3)
    leave()
    if first:
        for name in LAUNCHER_ENV:
            del os.environ[name]
        _, notes, alone, _ = fit_samples(shared_path / "kept", stop=5)
        assert sum(notes.sizes) < NUM
        samples += alone
        resilin.reset_job()
        os.environ.update(launched)
    join()
    net, notes, behind, history = fit_samples(shared_path / "kept")
    assert_identical(flat(net))
    assert_same(net, whole)
    if first:
        # 0 samples repeated, 0 missing.
        assert sorted(samples + behind) == sorted([*range(NUM)] * 2)
        # What the callback has noted survives with the job.
        assert notes.steps == all_notes.steps
        assert notes.sizes == all_notes.sizes
        assert notes.lrs == pytest.approx(all_notes.lrs)
        # As in the reference run, whose 11 steps of an epoch hold as many samples.
        before = [0, *np.cumsum(all_notes.sizes).tolist()][:-1]
        wanted = [0.1 * 0.97 ** (number * 11 // NUM) for number in before]
        assert all_notes.lrs == pytest.approx(wanted, rel=1e-6)
        # Metrics of the epoch that was left twice, too.
        assert history["loss"] == pytest.approx(expected["loss"])
        check_stock_resuming(shared_path / "stock")


# Callbacks, rules and other settings ---------------------------------------------------------


def fit_here(net, callbacks=(), epochs=1, directory=None, stop=None):
    """Trains in this process."""
    resilin.reset_job()
    model, notes = Model(net, REFERENCE, rule="constant"), Notes(stop)
    if directory is not None:
        resilin.checkpoint_to(directory, every=None)
    x, y, _ = make_data()
    with ends_at(stop):
        model.fit(x, y, epochs=epochs, callbacks=[*callbacks, notes], verbose=0)
    return model, notes


@pytest.mark.nightly(part="frameworks")
def test_callbacks_that_set_the_learning_rate_and_stop_go_on_where_they_were(tmp_path):
    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=2, min_delta=100),
            keras.callbacks.EarlyStopping("loss", patience=4, min_delta=100),
        ]

    whole = make_net()
    _, notes = fit_here(whole, callbacks(), epochs=9)
    # Never better than at first: halved behind epochs 3 and 5, and stopped behind epoch 5.
    assert notes.lrs == pytest.approx([0.1] * 33 + [0.05] * 22)
    for stop in (15, 33):
        fit_here(make_net(), callbacks(), 9, tmp_path / f"{stop}", stop)
        net = make_net()
        model, again = fit_here(net, callbacks(), 9, tmp_path / f"{stop}")
        assert again.lrs == pytest.approx(notes.lrs), stop
        assert_same(net, whole)
        assert len(model.history.history["loss"]) == 5


def test_a_second_fit_goes_on_and_a_script_that_is_run_again_finds_its_place(tmp_path):
    x, y, _ = make_data()

    def script(directory, stop=None):
        resilin.reset_job()
        net = make_net()
        model, notes = Model(net, REFERENCE, rule="constant"), Notes(stop)
        resilin.checkpoint_to(directory, every=None)
        with ends_at(stop):
            model.fit(x, y, epochs=1, callbacks=[notes], verbose=0)
            model.fit(x, y, epochs=3, initial_epoch=1, callbacks=[notes], verbose=0)
        return net, notes

    whole, notes = script(tmp_path / "whole")
    assert sum(notes.sizes) == 3 * NUM
    for stop in (4, 16):
        script(tmp_path / f"{stop}", stop)
        net, again = script(tmp_path / f"{stop}")
        assert again.sizes == notes.sizes
        assert_same(net, whole)
    net, again = script(tmp_path / "whole")
    assert again.sizes == notes.sizes
    assert_same(net, whole)


class Applied(keras.optimizers.AdamW):
    """Notes what it is told for the length of a step."""

    def apply(self, grads, trainable_variables=None):
        names = ("learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay", "ema_momentum")
        self.told = {name: float(getattr(self, name)) for name in names}
        super().apply(grads, trainable_variables)


def test_the_momentum_of_keras_is_left_alone_or_refused():
    # Its velocity has the learning rate inside, unlike the buffer of torch.
    x, y, _ = make_data()
    for momentum, rule in ((0.9, "auto"), (0.0, "sgdscale")):
        resilin.reset_job()
        net = make_net(optimizer=keras.optimizers.SGD(0.1, momentum=momentum))
        Model(net, REFERENCE, 4, rule=rule).fit(x[:40], y[:40], verbose=0)
        assert net.optimizer.momentum == momentum
    resilin.reset_job()
    net = make_net(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"how SGD of \S+keras\S+ keeps it is not known"):
        Model(net, REFERENCE, 4, rule="sgdscale").fit(x[:40], y[:40], verbose=0)


def test_rules_reach_what_keras_calls_by_other_names():
    rule = resilin.PowerRule(0.5, betas=True, eps=True, weight_decay=True)
    optimizer = Applied(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.9)
    own = (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon, optimizer.weight_decay)
    x, y, _ = make_data()
    net = make_net(optimizer=optimizer)
    model = Model(net, REFERENCE, 4, rule=rule)
    model.set_batch_size(40)
    model.fit(x[:80], y[:80], verbose=0)
    wanted = {
        "learning_rate": 0.02,
        "beta_1": own[0] ** 4,
        "beta_2": own[1] ** 4,
        "epsilon": own[2] / 2,
        "weight_decay": 0.1 * 4 / 2,
        "ema_momentum": 0.9**4,
    }
    assert optimizer.told == pytest.approx(wanted)
    assert own == (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon, optimizer.weight_decay)
    assert float(optimizer.learning_rate) == pytest.approx(0.01)
    assert optimizer.ema_momentum == 0.9
    # By its name, as any other Adam.
    resilin.reset_job()
    net = make_net(optimizer=keras.optimizers.Adam(0.01, global_clipnorm=1.0))
    model = Model(net, REFERENCE)
    model.fit(x, y, verbose=0)
    assert resilin.current_job().model.rule == resilin.core.rules.get_rule("adamscale")


@pytest.mark.nightly(part="frameworks")
def test_other_data_and_settings_of_fit_are_those_of_keras():
    x, y, w = make_data()
    weights = {0: 0.5, 1: 2.0, 2: 1.0}
    held = {"validation_split": 0.2, "class_weight": weights, "shuffle": False, "verbose": 0}
    plain = make_net(weighted_metrics=["accuracy"])
    expected = plain.fit(x, y, batch_size=10, epochs=2, **held).history
    net = make_net(weighted_metrics=["accuracy"])
    model = Model(net, 10, 3, rule="constant")
    given = {"left": x[:, :3], "right": x[:, 3:]}
    history = model.fit(x, y, epochs=2, **held).history
    assert_same(net, plain)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values), name
    assert model.predict(x, verbose=0).shape == (NUM, 3)
    model.stop_training = True
    assert net.stop_training
    # Compiled anew, it trains with the new optimizer, and the old one is as it was.
    old = net.optimizer
    model.compile(sgd(), "sparse_categorical_crossentropy")
    model.fit(x, y, verbose=0)
    assert int(net.optimizer.iterations) == 11
    assert int(old.iterations) == 18
    assert "_get_current_learning_rate" not in vars(old)
    with pytest.raises(ValueError, match=r"train_on_batch\(\) makes a step of any size"):
        model.train_on_batch(x, y)
    # Several inputs, of tensors, in a dict; and one's own loader.
    inputs = {name: keras.Input((3,), name=name) for name in given}
    joined = keras.layers.Concatenate()([*inputs.values()])
    resilin.reset_job()
    net = keras.Model(inputs, keras.layers.Dense(1)(joined))
    net.compile("rmsprop", "mse")
    model = Model(net, 10, "auto", rule="sqrt", memory_budget=10**6)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    model.fit(tensors, w, sample_weight=w, verbose=0)
    resilin.reset_job()
    loader = resilin.AdaptiveDataLoader(Samples(), batch_size=REFERENCE, drop_last=True)
    model = Model(make_net(), REFERENCE, rule="linear")
    model.fit(loader, verbose=0, callbacks=[ReadOut(("samples",), "my/")])
    assert model.history.history["my/samples"] == [100.0]
    assert "resilin/gain" not in model.history.history


def test_a_file_is_written_by_one_process_and_restored_models_train_on(tmp_path):
    path = str(tmp_path / "net.keras")
    keep = keras.callbacks.ModelCheckpoint(path)
    rate = keras.optimizers.schedules.CosineDecay(0.1, 30)
    net = make_net(optimizer=keras.optimizers.Adam(rate))
    fit_here(net, [keep])
    loaded = keras.models.load_model(path)
    assert_same(loaded, net, 1e-12)
    assert int(loaded.optimizer.iterations) == 11
    fit_here(loaded)


# What is refused -----------------------------------------------------------------------------


def test_a_job_trains_one_model_also_after_it_was_released():
    x, y, _ = make_data()
    net = make_net()
    model = Model(net, REFERENCE, rule="constant")
    model.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match=r"something else for 1 epochs.*resilin\.reset_job"):
        Model(make_net(), REFERENCE).fit(x, y, verbose=0)
    model.release()
    with pytest.raises(ValueError, match=r"something else for 1 epochs.*resilin\.reset_job"):
        Model(make_net(), REFERENCE).fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    assert int(net.optimizer.iterations) == 22


class Freezes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = epoch == 0


def test_layers_that_a_callback_freezes_are_refused_and_between_two_calls_they_are_not_trained():
    x, y, _ = make_data()
    net = make_net()
    model = Model(net, REFERENCE, rule="constant")
    with pytest.raises(ValueError, match=r"began to train 4 variables, and 2 are trainable now"):
        model.fit(x, y, epochs=2, callbacks=[Freezes()], verbose=0)
    before = net.get_weights()
    model.fit(x, y, verbose=0)
    changed = [not np.array_equal(a, b) for a, b in zip(before, net.get_weights(), strict=True)]
    assert changed == [False, False, True, True]


@pytest.mark.nightly(part="frameworks")
def test_class_weights_are_those_of_keras_for_labels_of_any_kind():
    weights = {0: 0.5, 1: 2.0, 2: 3.0}
    for labels in (
        np.array([0.0, 0.6, 1.4, 1.5, 2.5, 1.9999999]),
        np.array([[0.2], [1.7]]),
        np.eye(3)[[0, 2, 1]],
        np.array([True, False]),
        np.array([0, 5, 2]),
    ):
        expected = class_weight_to_sample_weights(labels, weights)
        assert sample_weights(labels, weights).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="y has values that are not finite"):
        sample_weights(np.array([1.0, np.nan]), weights)
    with pytest.raises(ValueError, match="one array of labels, and y is a list of 2"):
        sample_weights([np.zeros(2), np.zeros(2)], weights)


class Custom(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def sgd(**settings):
    return keras.optimizers.SGD(0.1, **settings)


SUM = keras.losses.MeanSquaredError(reduction="sum")
WEIGHTED = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ({"optimizer": sgd(gradient_accumulation_steps=4)}, r"steps \(4\) must be None"),
        ({"optimizer": sgd(loss_scale_factor=8.0)}, r"loss_scale_factor \(8.0\) must be None"),
        (
            {"optimizer": sgd(use_ema=True, ema_overwrite_frequency=3)},
            r"ema_overwrite_frequency \(3\) must be None",
        ),
        (
            {"optimizer": keras.optimizers.LossScaleOptimizer(sgd())},
            r"dtype policy .* needs a LossScaleOptimizer",
        ),
        ({"loss": SUM}, r"reduction \('sum'\) of 'mean_squared_error' must be 'sum_over"),
        ({"loss": WEIGHTED}, r"reduction \('mean_with_sample_weight'\) of .*pass batch_weight="),
        ({"jit_compile": True}, r"jit_compile \(True\) must be False"),
        ({"steps_per_execution": 3}, r"steps_per_execution \(3\) must be 1"),
    ],
    ids=["accumulation", "scale", "ema", "scaler", "sum", "weighted", "jit", "execution"],
)
def test_what_a_model_is_compiled_with_and_cannot_be_honoured_is_refused(compiled, message):
    x, y, _ = make_data()
    with pytest.raises(ValueError, match=message):
        Model(make_net(**compiled), REFERENCE).fit(x, y)


def test_what_fit_cannot_honour_is_refused():
    x, y, _ = make_data()
    data = Samples()
    fits = [
        ({"batch_size": 5}, r"batch_size \(5\) of fit\(\) must be that of the Model \(10\)"),
        ({"steps_per_epoch": 5}, r"steps_per_epoch \(5\) must be None"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("x")]}, "use resilin.checkpoint_to"),
        ({"callbacks": keras.callbacks.CallbackList()}, "callbacks must be a list"),
        ({"x": DataLoader(data), "y": None}, "x is a DataLoader, whose batches are cut already"),
        ({"x": iter([x]), "y": None}, "x is a list_iterator, whose samples cannot be had"),
        ({"x": data}, "y must be None: a Samples brings it with its samples"),
        ({"x": resilin.AdaptiveDataLoader(data, 7), "y": None}, r"batch_size \(7\) of the Adap"),
        ({"sample_weight": x[:, 0], "class_weight": {0: 1.0}}, "cannot be given both"),
        ({"x": data, "y": None, "validation_split": 0.1}, r"validation_split \(0.1\) needs arr"),
    ]
    model = Model(make_net(), REFERENCE)
    for settings, message in fits:
        with pytest.raises(ValueError, match=message):
            model.fit(**{"x": x, "y": y, **settings})
    custom = Custom([keras.Input((6,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="'custom' is not compiled"):
        Model(custom, REFERENCE).fit(x, y)
    custom.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"train_step\(\) of Custom would not be called"):
        Model(custom, REFERENCE).fit(x, y)
    with pytest.raises(ValueError, match=r"must be a keras\.Model"):
        Model(keras.layers.Dense(3), REFERENCE)


@pytest.mark.nightly(part="frameworks")
def test_outputs_with_a_mask_need_a_weight_and_are_exact_with_it():
    generator = np.random.default_rng(3)
    x = generator.integers(1, 20, size=(20, 5))
    x[::2, 3:] = 0  # shorter ones
    y = generator.integers(0, 4, size=(20, 5))

    def make():
        keras.utils.set_random_seed(2)
        net = keras.Sequential(
            [
                keras.Input((5,), dtype="int64"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.Dense(4),
            ]
        )
        net.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return net

    with pytest.raises(ValueError, match=r"the outputs have a mask.*pass batch_weight="):
        Model(make(), 10, 3).fit(x, y)
    resilin.reset_job()
    plain, net = make(), make()
    plain.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    model = Model(net, 10, 3, rule="constant", batch_weight=lambda batch: (batch[0] > 0).sum())
    model.fit(x, y, shuffle=False, verbose=0)
    assert_same(net, plain)


def test_accumulation_of_keras_is_set_before_the_optimizer_is_built():
    optimizer = accumulate("adam", 4)
    assert optimizer.gradient_accumulation_steps == 4
    assert accumulate(optimizer, 4) is optimizer
    assert accumulate(sgd(), 1).gradient_accumulation_steps is None
    optimizer.build(make_net().trainable_variables)
    with pytest.raises(ValueError, match=r"\(4\) cannot become 2 in an optimizer that is built"):
        accumulate(optimizer, 2)


def test_without_keras_one_sentence_says_what_to_install():
    code = "import sys; sys.modules['keras'] = None; import resilin.keras; resilin.keras.Model"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: resilin.keras needs keras: pip install 'resilin[keras]'"
    )


def test_a_stream_is_refused():
    with pytest.raises(ValueError, match=r"Keras counts the steps of an epoch.*stream Numbered"):
        Model(make_net(), REFERENCE).fit(resilin.AdaptiveDataLoader(Numbered(), 4))
