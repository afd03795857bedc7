"""The noise and the gain that a run reports, against those of explicit per-sample gradients."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import resilin
from resilin.core.noise import Noise
from resilin.training.gradient.norms import GroupNorms
from tests.replicas import both_reducers, on_replicas, replica

REFERENCE = 8


def make(optimizer, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    # Too small a rate to move anything: the truth stays what it was.
    return resilin.AdaptiveDataParallel(model, optimizer(groups, lr=1e-12), **kwargs)


def make_data(n=4096):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (n,), generator=generator)
    return TensorDataset(
        x, (x[:, :3].argmax(1) + y * (torch.rand(n, generator=generator) < 0.3)) % 3
    )


def truth(model, data):
    """Noise per parameter group from the gradient of every single sample."""
    module = model.module
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters, x, y):
        output = functional_call(module, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(output, y.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *data[:])
    groups = []
    for prefix in ("0.", "2."):
        rows = torch.cat([g.flatten(1) for n, g in each.items() if n.startswith(prefix)], dim=1)
        groups.append(
            Noise(float(rows.mean(0).square().sum()), float(rows.var(0, correction=1).sum()))
        )
    return groups


def run(model, loader, steps):
    optimizer = model.optimizer
    while model.clock.steps < steps:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps >= steps:
                break


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@on_replicas(1, 2, buckets=(2,))
def test_the_gain_agrees_with_per_sample_gradients(world, optimizer):
    data = make_data()
    model = make(optimizer, stats_every=1)
    expected = truth(model, data)
    whole = expected[0] + expected[1]
    loader = resilin.AdaptiveDataLoader(data, REFERENCE, shuffle=True, max_local_bsz=9, seed=2)
    # Before and after the scale changes, with sizes that do not divide.
    for batch_size, steps in ((27, 400), (101, 600)):
        loader.set_batch_size(batch_size)
        run(model, loader, steps)
        assert model.gain == pytest.approx(whole.gain(batch_size, REFERENCE), rel=0.1)
        for group, right in zip(model.group_noise, expected, strict=True):
            assert group.trace == pytest.approx(right.trace, rel=0.1)
            assert group.gain(batch_size, REFERENCE) == pytest.approx(
                right.gain(batch_size, REFERENCE), rel=0.15
            )
        power = 1.0 if optimizer is torch.optim.SGD else 0.5
        # A step is scaled by what was measured before it: its own noise counts from the next on.
        before = model.group_noise
        run(model, loader, steps + 1)
        assert model.group_noise != before
        for factors, noise in zip(model.factors, before, strict=True):
            assert factors.lr == pytest.approx(noise.gain(batch_size, REFERENCE) ** power)
    assert model.predict_gain(50.0) == pytest.approx(whole.gain(400, REFERENCE), rel=0.15)


def test_the_first_measurement_counts_in_its_own_step():
    model = make(torch.optim.SGD, stats_every=1)
    loader = resilin.AdaptiveDataLoader(make_data(), REFERENCE, shuffle=True, max_local_bsz=9)
    loader.set_batch_size(27)
    run(model, loader, 1)
    for factors, noise in zip(model.factors, model.group_noise, strict=True):
        assert factors.lr == pytest.approx(noise.gain(27, REFERENCE))
    assert model.factors[0].lr > 1


def test_one_replica_without_accumulation_runs_an_occasional_step_in_halves():
    data = make_data()
    model = make(torch.optim.SGD, stats_every=4)
    expected = truth(model, data)
    loader = resilin.AdaptiveDataLoader(data, batch_size=32, shuffle=True)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    assert sizes[:6] == [16, 16, 32, 32, 32, 16]
    assert model.clock.steps == 128
    assert model.noise.trace == pytest.approx((expected[0] + expected[1]).trace, rel=0.4)
    assert model.gain == 1


@pytest.mark.world_size(3)
@both_reducers
def test_replicas_of_unequal_pace_agree_on_which_steps_to_measure():
    # If they did not, their collectives would not match: an abort or a hang.
    data = make_data(2048)
    model = make(torch.optim.SGD, stats_budget=1e-4)
    loader = resilin.AdaptiveDataLoader(data, batch_size=24, shuffle=True)
    measured = []
    for x, y in loader:
        time.sleep(0.001 * replica())
        measured.append(model.measures_next())
        F.cross_entropy(model(x), y).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    everyone = [None] * 3
    dist.all_gather_object(everyone, measured)
    assert everyone[0] == everyone[1] == everyone[2]
    assert 8 <= sum(measured) < len(measured)


def test_static_rules_measure_nothing_unless_asked():
    data = make_data(256)
    for every, known in (("auto", False), (1, True)):
        resilin.reset_job()
        model = make(torch.optim.SGD, rule="linear", stats_every=every)
        loader = resilin.AdaptiveDataLoader(data, batch_size=32, max_local_bsz=16)
        run(model, loader, 8)
        assert (model.noise is not None) == known


@pytest.mark.world_size(2)
@both_reducers
def test_loss_scaling_does_not_reach_the_noise():
    data, noises = make_data(512), []
    for scale in (1.0, 2.0**12):
        resilin.reset_job()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        model = make(torch.optim.SGD, stats_every=1, scaler=scaler)
        loader = resilin.AdaptiveDataLoader(data, batch_size=32, max_local_bsz=16)
        for x, y in loader:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(model.optimizer)
            scaler.update()
            model.optimizer.zero_grad()
        noises.append(model.noise)
    assert noises[0].trace == pytest.approx(noises[1].trace, rel=1e-6)
    assert noises[0].sqr_norm == pytest.approx(noises[1].sqr_norm, rel=1e-6)


def test_parameters_outside_the_optimizer_do_not_count():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    norms = GroupNorms(optimizer.param_groups, model.parameters())
    parameters = list(model.parameters())
    grads = [torch.full_like(p, 2.0) for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    assert norms.of(parameters, grads, flat).tolist() == [4.0 * 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_norms_do_not_overflow(dtype):
    parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    norms = GroupNorms(optimizer.param_groups, [parameter])
    grad = torch.full_like(parameter, 16.0)
    assert norms.of([parameter], [grad], grad).tolist() == [256.0 * 4096]
