"""Replicas decide by the same bits, and a step is made by all of them or by none."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import resilin
from resilin.core.stream import SampleStream
from resilin.training.gradient import buckets, ddp
from resilin.training.gradient.norms import total
from tests.replicas import (
    assert_identical,
    both_reducers,
    gathered,
    num_replicas,
    on_replicas,
    replica,
)

D = torch.float64
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}

worlds = on_replicas(2, 3)


def data(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=D)
    return TensorDataset(x, torch.randn(n, 1, generator=generator, dtype=D), torch.arange(n))


def deep(layers=4, dtype=D):
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(9, 9), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, 9), *inner, nn.Linear(9, 1)).to(dtype)


def make(net=None, lr=0.1, **kwargs):
    net = deep() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    kwargs = {"rule": "linear", **SMALL_BUCKETS, **kwargs}
    return net, optimizer, resilin.AdaptiveDataParallel(net, optimizer, **kwargs)


def loader(n=96, **kwargs):
    kwargs = {"batch_size": 12, "max_local_bsz": 2, "shuffle": True, "seed": 5, **kwargs}
    return resilin.AdaptiveDataLoader(data(n), **kwargs)


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


class Whole:
    """One process with the same global batches, without the samples that were left out."""

    def __init__(self, net, n=96, lr=0.1, batch_size=12):
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        self.data, self.stream = data(n), SampleStream(n, seed=5, shuffle=True)
        self.batch_size, self.cursor = batch_size, 0

    def step(self, without=(), made=True):
        span = self.stream.batch(self.cursor, self.batch_size)
        self.cursor = span.stop
        indices = [i for i in self.stream.indices(span).tolist() if i not in without]
        x, y, _ = self.data[indices]
        if not made or not indices:
            return
        self.optimizer.zero_grad()
        F.mse_loss(self.net(x), y).backward()
        # Fewer samples are a smaller batch, and the rule is linear.
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * len(indices) / self.batch_size
        self.optimizer.step()

    def assert_same(self, net):
        assert torch.allclose(flat(net), flat(self.net), rtol=1e-10, atol=1e-14)


# The same bits -----------------------------------------------------------------------------


@worlds
def test_norms_noise_and_gain_are_the_same_bits_with_any_number_of_buckets(world, monkeypatch):
    # Each machine may add up in its own way: here replicas differ in the last bits on purpose.
    def slightly_off(norms):
        return total(norms) * (1 + 2**-40 * replica())

    for module in (ddp, buckets):
        monkeypatch.setattr(module, "total", slightly_off)
    found = {}
    for cap in (1000.0, 0.0005):
        resilin.reset_job()
        _, optimizer, model = make(rule="adascale", stats_every=1, lr=0.0, bucket_cap_mb=cap)
        batches = loader(960)
        batches.set_batch_size(36)
        for x, y, _ in batches:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps == 12:
                break
        found[cap] = (model.noise.sqr_norm, model.noise.trace, model.gain, model.progress)
        assert_identical(torch.tensor(found[cap], dtype=D))
    assert found[1000.0] == pytest.approx(found[0.0005], rel=1e-9)


@worlds
def test_a_default_run_in_many_buckets_ends_with_the_same_bits_everywhere(world):
    net, optimizer, model = make(deep(12, torch.float32), rule="adascale", stats_every=1)
    batches = loader(120, batch_size=8)
    batches.set_batch_size(24)
    lengths = []
    for _ in resilin.remaining_epochs_until(3):
        before = model.clock.steps
        for x, y, _ in batches:
            F.mse_loss(model(x.float()), y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        lengths.append(model.clock.steps - before)
    assert_identical(flat(net))
    decisions = (model.gain, model.progress, *lengths, *(f.lr for f in model.factors))
    assert_identical(torch.tensor(decisions, dtype=D))


# Left out ----------------------------------------------------------------------------------


def run(skip, *, how="after forward", **kwargs):
    """Trains; `skip(step, micro)` says what this replica leaves out."""
    net, optimizer, model = make(**kwargs)
    begun = -1
    for x, y, _ in loader():
        micro = resilin.current_job().micro_batch
        begun += micro.index == 0
        left_out = skip(begun, micro)
        if left_out and how == "before forward":
            continue
        loss = F.mse_loss(model(x), y)
        if left_out and how == "after forward":
            continue
        if not left_out:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, model


@worlds
@pytest.mark.parametrize("how", ["before forward", "after forward", "but step"])
@pytest.mark.parametrize("measured", [False, True])
def test_a_micro_batch_that_one_replica_leaves_out_is_not_in_the_mean(world, how, measured):
    dropped = []

    def skip(step, micro):
        if step == 2 and micro.index == 0 and replica() == 1:
            dropped.append(micro.count)
            return True
        return False

    net, model = run(skip, how=how, **({"stats_every": 1} if measured else {}))
    lost = sum(gathered(dropped))
    assert lost == 2
    assert (model.clock.steps, model.clock.samples) == (8, 96 - lost)
    assert_identical(flat(net))
    assert_identical(torch.tensor([model.progress, model.scale], dtype=D))


@worlds
def test_the_mean_is_that_of_the_samples_that_were_trained(world):
    net, optimizer, model = make()
    whole = Whole(deep())
    left, step = [], 0
    for x, y, indices in loader():
        micro = resilin.current_job().micro_batch
        if step == 1 and micro.index == 0 and replica() == 1:
            left += indices.tolist()
            continue
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if micro.last:
            whole.step(without=gathered(left))
            whole.assert_same(net)
            step, left = step + 1, []
    assert step == 8


@worlds
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("how", ["before forward", "after forward"])
def test_a_step_whose_last_micro_batch_one_replica_leaves_is_made_by_none(world, how, find_unused):
    def skip(step, micro):
        return step in (0, 1, 4, 7) and micro.last and replica() == 1

    kwargs = {"find_unused_parameters": find_unused}
    with pytest.warns(UserWarning, match="no replica makes this step"):
        net, model = run(skip, how=how, stats_every=2, **kwargs)
    whole = Whole(deep())
    for step in range(8):
        whole.step(made=step not in (0, 1, 4, 7))
    whole.assert_same(net)
    assert_identical(flat(net))
    assert (model.clock.steps, model.clock.samples) == (4, 48)


@worlds
def test_a_step_of_one_micro_batch_with_buffers_is_left_by_all(world):
    # DDP sends buffers in the forward pass, which the replica that leaves does not run.
    plain = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)).double()
    net, optimizer, model = make(plain)

    def train():
        for step, (x, y, _) in enumerate(loader(max_local_bsz=12)):
            if step in (1, 2) and replica() == 1:
                continue
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="no replica makes this step"):
        train()
    assert model.clock.steps == 6
    assert_identical(flat(net))


@worlds
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_loop_that_steps_without_the_last_backward_pass_steps(world, find_unused):
    def skip(step, micro):
        return step in (0, 3) and micro.last and replica() == 1

    net, model = run(skip, how="but step", stats_every=2, find_unused_parameters=find_unused)
    assert model.clock.steps == 8
    assert model.clock.samples < 96
    assert_identical(flat(net))


def test_alone_a_step_without_its_last_micro_batch_is_left():
    with pytest.warns(UserWarning, match="replica 0 of 1 left the last micro-batch"):
        _, model = run(lambda step, micro: step == 3 and micro.last)
    assert (model.clock.steps, model.clock.samples) == (7, 84)


@pytest.mark.world_size(2)
@both_reducers
def test_replicas_that_make_different_steps_are_told():
    _, optimizer, model = make()

    def train():
        for step, (x, y, _) in enumerate(loader(max_local_bsz=12)):
            F.mse_loss(model(x), y).backward()
            if step == 1 and replica() == 1:
                optimizer.zero_grad()  # a decision of one replica alone
                continue
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="replicas are not in the same step: this one has made"):
        train()
    assert model.clock.steps == 2 - replica()


@pytest.mark.world_size(2)
@both_reducers
def test_weights_on_one_replica_only_are_refused():
    _, _, model = make()
    batches = iter(loader(max_local_bsz=12))
    x, y, _ = next(batches)
    if replica() == 0:
        output = model(x)
    else:
        with model.weight(100.0):
            output = model(x)
    with pytest.raises(RuntimeError, match="divide by different total weights"):
        F.mse_loss(output, y).backward()


@pytest.mark.world_size(2)
@both_reducers
def test_token_weights_in_half_precision():
    net = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    # Few tokens after many, and many after few.
    tokens = torch.tensor([4000.0] * 7 + [1.0] * 8 + [4000.0] * 9)
    batches = resilin.AdaptiveDataLoader(
        TensorDataset(torch.full((24, 1), 20.0).half(), tokens),
        8,
        max_local_bsz=1,
        batch_weight=lambda batch: batch[1].sum(),
    )
    steps = 0
    for x, _ in batches:
        model(x).mean().backward()
        optimizer.step()
        if model.clock.steps > steps:
            steps = model.clock.steps
            assert net.weight.grad.item() == pytest.approx(20, rel=0.02)
        optimizer.zero_grad()
    assert steps == 3


# Freezing ----------------------------------------------------------------------------------


@worlds
@pytest.mark.parametrize("measured", [False, True])
def test_freezing_and_unfreezing_in_the_middle_of_an_epoch(world, measured):
    plain, net = deep(), deep()
    changes = {1: (3, True), 3: (0, False), 4: (0, True), 6: (5, False)}
    net[3].requires_grad_(False)
    plain[3].requires_grad_(False)
    every = {"stats_every": 1} if measured else {}
    net, optimizer, model = make(net, **every)
    whole, step = Whole(plain), 0
    for x, y, _ in loader():
        micro = resilin.current_job().micro_batch
        if micro.index == 0 and step in changes:
            layer, trained = changes[step]
            for part in (net, plain):
                part[layer].requires_grad_(trained)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if micro.last:
            step += 1
            whole.step()
            whole.assert_same(net)
    assert step == model.clock.steps == 8
    assert_identical(flat(net))


@worlds
@pytest.mark.parametrize("trained", [True, False])
def test_replicas_that_freeze_differently_are_told(world, trained):
    net = deep()
    net[3].requires_grad_(not trained)
    _, optimizer, model = make(net)

    def train():
        for x, y, _ in loader():
            micro = resilin.current_job().micro_batch
            if micro.index == 0 and model.clock.steps == 2 and replica() == 1:
                net[3].requires_grad_(trained)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=rf"1 of {world} have frozen or unfrozen"):
        train()
    assert model.clock.steps == 2


# Other people's models ---------------------------------------------------------------------


class Tangled(nn.Module):
    """Shared weights, a layer that only some inputs use, and checkpointed activations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.shared, self.sometimes = nn.Linear(7, 7), nn.Linear(7, 7)
        self.double()

    def forward(self, x):
        h = checkpoint(lambda t: torch.tanh(self.shared(t)), self.first(x), use_reentrant=False)
        chosen = x[:, :1] > 1.0
        if chosen.any():
            h = h + chosen * self.sometimes(h)
        return self.last(torch.tanh(self.shared(h)))


@worlds
@pytest.mark.parametrize("compiled", [False, True])
def test_tangled_models_in_many_buckets(world, compiled):
    plain, other = (deep(), deep()) if compiled else (Tangled(), Tangled())
    whole, step = Whole(other), 0
    given = torch.compile(plain, backend="aot_eager") if compiled else plain
    # The compiler of torch cannot cut a graph at buckets that small.
    kwargs = {} if compiled else {"find_unused_parameters": True, **SMALL_BUCKETS}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = resilin.AdaptiveDataParallel(given, optimizer, rule="linear", stats_every=3, **kwargs)
    average = torch.optim.swa_utils.AveragedModel(plain)
    for x, y, _ in loader(max_local_bsz=3):
        before = model.clock.steps
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if model.clock.steps > before:
            average.update_parameters(plain)
            whole.step()
            whole.assert_same(plain)
            step += 1
    assert step == 8 == int(average.n_averaged)
    assert_identical(flat(average))


@worlds
def test_a_scaler_skips_a_step_on_all_replicas(world):
    net = deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, rule="linear", scaler=scaler, stats_every=1, **SMALL_BUCKETS
    )
    whole, begun = Whole(deep()), -1
    for x, y, _ in loader():
        micro = resilin.current_job().micro_batch
        begun += micro.index == 0
        infinite = begun == 2 and micro.index == 0 and replica() == num_replicas() - 1
        loss = F.mse_loss(model(x), y) * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if micro.last:
            whole.step(made=begun != 2)
            whole.assert_same(net)
    assert model.clock.steps == 7
    assert scaler.get_scale() == 2.0
    assert_identical(flat(net))


@pytest.mark.world_size(2)
@both_reducers
def test_a_scaler_counts_no_step_that_was_left():
    net = deep()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear", scaler=scaler)

    def train():
        begun = -1
        for x, y, _ in loader():
            micro = resilin.current_job().micro_batch
            begun += micro.index == 0
            loss = F.mse_loss(model(x), y)
            if begun in (1, 2, 5) and micro.last and replica() == 0:
                continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="no replica makes this step"):
        train()
    assert model.clock.steps == 5
    assert scaler.get_scale() == 4.0 * 2**2
    assert_identical(flat(net))


@worlds
def test_a_copy_of_the_module_trains_by_itself(world):
    net, optimizer, model = make()
    teacher = copy.deepcopy(net)
    for x, y, _ in loader():
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(model(x), target + y).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.zero_grad()
    assert model.clock.steps == 8
    assert not torch.equal(flat(net), flat(teacher))
    assert dist.get_world_size() == world
