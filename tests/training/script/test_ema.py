"""`EMA`: an average of the weights that follows the clock, and `model.stepped`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.recovery import Version
from tests.replicas import assert_identical

NUM, BATCH, DECAY = 48, 8, 0.9


class Crash(Exception):
    """The script fails."""


def data(num=NUM):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net(norm=False, dtype=torch.float64):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 8), middle, nn.Linear(8, 2)).to(dtype)


class Training:
    """A model with an average, and its loop."""

    def __init__(self, decay=DECAY, *, module=None, rule="linear", scaler=None, **kwargs):
        self.module = net() if module is None else module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.model = resilin.AdaptiveDataParallel(
            self.module, self.optimizer, rule=rule, scaler=scaler
        )
        self.ema = resilin.EMA(self.model, decay, **kwargs)
        self.loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=True, max_local_bsz=BATCH)
        self.weights: list[torch.Tensor] = []
        self.worth: list[float] = []

    def run(self, epochs=2, on_step=lambda training: None):
        for _ in resilin.remaining_epochs_until(epochs):
            for x, y in self.loader:
                before = self.model.clock
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.model.stepped:
                    self.weights.append(self.weight())
                    now, by = self.model.clock, self.ema.clock
                    reading = {"samples": "sample_steps", "progress": "progress"}[by]
                    self.worth.append(getattr(now, reading) - getattr(before, reading))
                    on_step(self)
        return self

    def weight(self):
        weight = self.module[0].weight.detach()
        return (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()

    def average(self):
        average = self.ema.state_dict()["averages"]["0.weight"]
        return (average.full_tensor() if isinstance(average, DTensor) else average).clone()


def by_hand(weights, worth, decay=DECAY):
    average = weights[0].clone()
    for weight, k in zip(weights[1:], worth[1:], strict=True):
        average = decay**k * average + (1 - decay**k) * weight
    return average


def test_at_the_reference_batch_it_is_the_average_of_torch():
    averaged = []

    def on_step(training):
        if not averaged:
            averaged.append(
                AveragedModel(training.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            )
        averaged[0].update_parameters(training.module)

    training = Training().run(on_step=on_step)
    assert training.model.clock.steps == 12
    with training.ema.applied():
        for ours, theirs in zip(
            training.module.parameters(), averaged[0].module.parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("clock", ["samples", "progress"])
def test_a_step_that_is_worth_several_decays_as_often(clock):
    training = Training(clock=clock, rule="adascale" if clock == "progress" else "linear")
    training.loader.set_batch_size(lambda clock: (8, 20, 32)[clock.steps % 3])
    training.run(epochs=4)
    assert len({round(k, 6) for k in training.worth}) > 1
    expected = by_hand(training.weights, training.worth)
    assert torch.allclose(training.average(), expected, rtol=1e-12, atol=0)
    wrong = by_hand(training.weights, [1] * len(training.worth))
    assert not torch.allclose(wrong, expected, rtol=1e-3)


def test_micro_batches_are_not_averaged_and_a_step_says_that_it_was_made():
    training = Training()
    training.loader.set_batch_size(24)
    pattern = []
    for x, y in training.loader:
        F.cross_entropy(training.model(x), y).backward()
        assert not training.model.stepped
        before = training.average()
        training.optimizer.step()
        training.optimizer.zero_grad()
        pattern.append(training.model.stepped)
        assert torch.equal(training.average(), before) or training.model.stepped
    assert pattern == [False, False, True] * 2


def test_a_step_that_a_scaler_skips_counts_for_nothing():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training = Training(scaler=scaler)
    made = []
    for number, (x, y) in enumerate(training.loader):
        loss = F.cross_entropy(training.model(x), y)
        loss = loss * float("inf") if number in (2, 3) else loss
        before = training.average()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        made.append(training.model.stepped)
        if made[-1]:
            training.weights.append(training.weight())
        else:
            assert torch.equal(training.average(), before)
    assert made == [True, True, False, False, True, True]
    expected = by_hand(training.weights, [1] * 4)
    assert torch.allclose(training.average(), expected, rtol=1e-13, atol=0)


def test_a_micro_batch_that_the_loop_leaves_out_has_made_no_step():
    training = Training()
    training.loader.set_batch_size(16)
    steps = []
    for number, (x, y) in enumerate(training.loader):
        if number != 2:
            F.cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        steps.append(training.model.stepped)
    assert steps == [False, True, False, True, False, True]
    assert not training.model.stepped


def test_with_a_loader_of_torch_each_batch_is_a_step():
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(module, optimizer, batch_size=8, rule="linear")
    ema = resilin.EMA(model, DECAY)
    assert not model.stepped
    weights = []
    for x, y in torch.utils.data.DataLoader(data(), batch_size=16):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert model.stepped
        weights.append(module[0].weight.detach().clone())
        optimizer.zero_grad()
    expected = by_hand(weights, [2, 2, 2])
    assert torch.allclose(ema.state_dict()["averages"]["0.weight"], expected, rtol=1e-13)


def test_a_decay_may_be_a_function_of_the_clock():
    asked = []

    def decay(steps):
        asked.append(steps)
        return min(0.999, (1 + steps) / (10 + steps))

    training = Training(decay).run(epochs=1)
    assert asked == [1, 2, 3, 4, 5]
    average = training.weights[0]
    for number, weight in enumerate(training.weights[1:], 1):
        d = (1 + number) / (10 + number)
        average = d * average + (1 - d) * weight
    assert torch.allclose(training.average(), average, rtol=1e-13)


# Applied --------------------------------------------------------------------------------------


def test_within_the_block_the_model_has_the_average_and_the_state_does_not():
    training = Training().run(epochs=1)
    registry = training.model.job.registry
    own, average = training.weight(), training.average()
    assert not torch.equal(own, average)
    with training.ema.applied():
        assert torch.equal(training.weight(), average)
        assert torch.equal(training.model.module.state_dict()["0.weight"], average)
        taken = registry.take(Version(0, 6))
        assert torch.equal(taken.tensors["model.0.weight"], own)
        assert torch.equal(training.weight(), average)
    assert torch.equal(training.weight(), own)
    assert torch.equal(taken.tensors["ema.averages.0.weight"], average)
    after = registry.take(Version(0, 6))
    assert after.tree == taken.tree
    assert all(torch.equal(after.tensors[n], taken.tensors[n]) for n in taken.tensors)


def test_state_that_comes_within_the_block_goes_to_its_owners():
    training = Training().run(epochs=1)
    registry = training.model.job.registry
    old = copy.deepcopy(registry.take(Version(0, 6)))
    own, average = training.weight(), training.average()
    training.run(epochs=2)
    with training.ema.applied():
        registry.restore(old, first_replica=True)
        assert torch.equal(training.weight(), average)
    assert torch.equal(training.weight(), own)


def test_the_model_does_not_train_with_averaged_weights():
    training = Training().run(epochs=1)
    own = training.weight()
    x, y = data()[:8]
    with training.ema.applied():
        with pytest.raises(RuntimeError, match=r"Train outside of `with ema.applied\(\):`"):
            training.model(x)
        with pytest.raises(RuntimeError, match="leave that block first"), training.ema.applied():
            pass
        with torch.no_grad():
            training.model(x)
    assert torch.equal(training.weight(), own)
    for x, y in training.loader:
        F.cross_entropy(training.model(x), y).backward()
        with (
            pytest.raises(RuntimeError, match="Train outside"),
            training.ema.applied(),
        ):
            training.optimizer.step()
        training.optimizer.zero_grad()
        break
    assert torch.equal(training.weight(), own)


def test_before_the_first_step_the_average_is_the_model():
    training = Training()
    own = training.weight()
    with torch.no_grad():
        training.module[0].weight.fill_(3.0)  # as weights that are loaded late
    with training.ema.applied():
        assert (training.weight() == 3).all()
    training.run(epochs=1)
    expected = by_hand(training.weights, [1] * 6)
    assert torch.allclose(training.average(), expected, rtol=1e-13)
    assert not torch.allclose(own, expected)


def test_buffers_are_averaged_if_asked():
    training = Training(module=net(norm=True), buffers=True)
    means = []
    training.run(epochs=1, on_step=lambda t: means.append(t.module[1].running_mean.clone()))
    averages = training.ema.state_dict()["averages"]
    assert torch.allclose(averages["1.running_mean"], by_hand(means, [1] * 6), rtol=1e-12)
    assert averages["1.num_batches_tracked"] == 6
    with training.ema.applied():
        assert torch.equal(training.module[1].running_mean, averages["1.running_mean"])
    assert torch.equal(training.module[1].running_mean, means[-1])


def test_without_that_the_buffers_stay_those_of_the_model():
    training = Training(module=net(norm=True)).run(epochs=1)
    own = training.module[1].running_mean.clone()
    with training.ema.applied():
        assert torch.equal(training.module[1].running_mean, own)


def test_weights_of_low_precision_are_averaged_in_float32():
    module = net(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(module, optimizer, rule="linear")
    ema = resilin.EMA(model, 0.999)
    for x, y in resilin.AdaptiveDataLoader(data(), BATCH):
        F.cross_entropy(model(x.bfloat16()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    average = ema.state_dict()["averages"]["0.weight"]
    assert average.dtype == torch.float32
    assert not torch.equal(average, average.bfloat16().float())
    with ema.applied():
        assert torch.equal(module[0].weight, average.bfloat16())


def test_a_compiled_model_has_the_names_of_the_one_within():
    compiled = torch.compile(net(), backend="eager")
    averages = Training(module=compiled).ema.state_dict()["averages"]
    assert list(averages) == [name for name, _ in net().named_parameters()]


def test_two_averages_have_two_names():
    training = Training()
    with pytest.raises(ValueError, match="'ema' is registered already"):
        resilin.EMA(training.model, 0.5)
    slow = resilin.EMA(training.model, 0.99, name="slow")
    training.run(epochs=1)
    assert not torch.equal(slow.state_dict()["averages"]["0.weight"], training.average())
    with (
        pytest.raises(RuntimeError, match="leave that block first"),
        training.ema.applied(),
        slow.applied(),
    ):
        pass


def test_another_model_may_have_another_average():
    training = Training()
    training.model.release()
    with pytest.raises(ValueError, match="was released"):
        resilin.EMA(training.model, DECAY)
    Training().run(epochs=1)


def test_what_cannot_be_averaged_is_refused():
    module = net()
    with pytest.raises(ValueError, match=r"model \(Sequential\) must be an AdaptiveDataParallel"):
        resilin.EMA(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(module, optimizer)
    with pytest.raises(ValueError, match=r"decay \(1.0\) must be below 1"):
        resilin.EMA(model, 1.0)
    with pytest.raises(ValueError, match="decay"):
        resilin.EMA(model, -0.1)
    with pytest.raises(ValueError, match="tokens_per_step"):
        resilin.EMA(model, clock="tokens")
    ema = resilin.EMA(model, buffers=True)
    state = ema.state_dict()
    state["averages"].pop("2.bias")
    with pytest.raises(ValueError, match=r"2\.bias is only in the model"):
        ema.load_state_dict(state)


# Faults ---------------------------------------------------------------------------------------


def resumed(folder, epochs=3, **kwargs):
    """Runs a job to its end, or to a crash: as a new process would, with all objects new."""
    resilin.reset_job()
    resilin.checkpoint_to(folder, every=1)
    training = Training(module=kwargs.pop("module", None))
    training.loader.set_batch_size(lambda clock: (8, 20)[clock.steps % 2])
    try:
        training.run(epochs, **kwargs)
    except Crash:
        pass
    finally:
        resilin.current_job().recovery._saves.checkpoints.wait()
    return training


def crash_at(step, *, applied=False):
    def on_step(training):
        if training.model.clock.steps == step:
            if applied:
                with training.ema.applied():
                    raise Crash
            raise Crash

    return on_step


@pytest.mark.parametrize("applied", [False, True])
def test_a_crash_costs_the_average_nothing(tmp_path, applied):
    expected = resumed(tmp_path / "undisturbed")
    resumed(tmp_path / "crashed", on_step=crash_at(5, applied=applied))
    again = resumed(tmp_path / "crashed")
    assert 0 < len(again.weights) < len(expected.weights)
    assert torch.equal(again.weight(), expected.weight())
    assert torch.equal(again.average(), expected.average())


def test_a_state_without_an_average_begins_one_with_its_weights(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = resilin.AdaptiveDataParallel(module, optimizer, rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=True)
    for _ in resilin.remaining_epochs_until(1):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.warns(UserWarning, match="'ema' is not in the state"):
        training = resumed(tmp_path, epochs=2)
    expected = by_hand(training.weights, training.worth)
    assert torch.allclose(training.average(), expected, rtol=1e-12)


# Several processes ----------------------------------------------------------------------------


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_and_shards_have_the_average_of_one_process(sharded):
    x, _ = data()[:4]

    def make():
        resilin.reset_job()
        module = net()
        if sharded:
            fully_shard(module[0])
            fully_shard(module)
        training = Training(module=module)
        training.loader.set_batch_size(lambda clock: (8, 20)[clock.steps % 2])
        return training

    def evaluate(training):
        plain, averages = net(), training.ema.state_dict()["averages"]
        training.model.eval()
        with training.ema.applied(), torch.no_grad():
            shown = training.model(x)
            for name, parameter in plain.named_parameters():
                parameter.copy_(whole(averages[name]))
            assert torch.allclose(plain(x), shown, rtol=1e-12)
        training.model.train()

    expected = make().run(epochs=3)
    training = make().run(epochs=3, on_step=evaluate)
    # Of a sharded model, a pass leaves whole weights behind: they must not stay the averages.
    assert torch.equal(training.weight(), expected.weight())
    expected = by_hand(training.weights, training.worth)
    assert torch.allclose(training.average(), expected, rtol=1e-12)
    assert_identical(training.average())


@pytest.mark.world_size(2)
def test_an_average_of_shards_resumes_as_one_of_replicas(shared_path):
    folder = shared_path
    expected = resumed(folder / "undisturbed")
    module = net()
    fully_shard(module)
    resumed(folder / "crashed", on_step=crash_at(5), module=module)
    again = resumed(folder / "crashed")
    assert 0 < len(again.weights) < len(expected.weights)
    assert torch.allclose(again.average(), expected.average(), rtol=1e-12)
