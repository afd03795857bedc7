"""Hooks on parameters: they get the gradient of the batch, whatever the split."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import on_replicas

D = torch.float64


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(40, 6, generator=generator, dtype=D),
        torch.randn(40, 2, generator=generator, dtype=D),
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)).to(D)


def clamp(parameter):
    parameter.grad.clamp_(-0.02, 0.02)


def normalize(parameter):
    parameter.grad = parameter.grad / (1 + parameter.grad.norm())


def cut(grad):
    grad.clamp_(-0.02, 0.02)


def keep(seen):
    def hook(grad):
        seen.append(grad)

    return hook


def hang_on(net, seen):
    """A hook of another kind on each parameter, between some that only look."""
    first, second, third, fourth = net.parameters()
    for parameter in net.parameters():
        parameter.register_hook(keep(seen))
    first.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    first.register_hook(lambda grad: grad * 3)
    second.register_hook(lambda grad: cut(grad))
    third.register_post_accumulate_grad_hook(clamp)
    fourth.register_post_accumulate_grad_hook(normalize)
    for parameter in net.parameters():
        parameter.register_hook(keep(seen))


def step(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@on_replicas(1, 2, 3)
def test_a_hook_gets_the_gradient_of_the_batch_once(world, reducer):
    plain, expected = network(), []
    hang_on(plain, expected)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, y in torch.utils.data.DataLoader(data(), 16):
        step(optimizer, (plain(x) - y).square().mean())

    net, seen = network(), []
    hang_on(net, seen)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear", stats_every=2)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=3)
    for x, y in loader:
        step(optimizer, (model(x) - y).square().mean())
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    # In the order of a backward pass, and kept by whoever keeps it.
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def train(net, then=lambda step: None):
    """Three steps of two micro-batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    for x, y in resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8):
        step(optimizer, (model(x) - y).square().mean())
        if model.stepped:
            then(model.clock.steps)
    return model


@pytest.mark.parametrize("how", ["removed the gradient", "changed the value"])
def test_a_step_within_the_backward_pass_is_refused(how):
    net = network()

    @torch.no_grad()
    def make_step(parameter):
        if how == "changed the value":
            parameter.sub_(parameter.grad)
        else:
            parameter.data.sub_(parameter.grad)
            parameter.grad = None

    net[0].weight.register_post_accumulate_grad_hook(make_step)
    with pytest.raises(RuntimeError, match=rf"hook on 0\.weight has {how} in the backward pass"):
        train(net)


def test_hooks_come_and_go_and_are_torchs_own_outside_of_steps():
    net, called = network(), []
    early = net[0].weight.register_hook(lambda grad: called.append("early"))
    late = None

    def then(step):
        nonlocal late
        if step == 1:
            late = net[0].weight.register_hook(lambda grad: called.append("late"))
        elif step == 2:
            early.remove()

    model = train(net, then)
    assert called == ["early", "early", "late", "late"]
    net(torch.ones(1, 6, dtype=D)).sum().backward()
    model.release()
    net(torch.ones(1, 6, dtype=D)).sum().backward()
    assert called[4:] == ["late", "late"]
    late.remove()
    assert not net[0].weight._backward_hooks


def test_hooks_keep_no_model_alive():
    net = network()
    net[0].weight.register_hook(lambda grad: None)
    gone = weakref.ref(train(net))
    resilin.reset_job()
    gc.collect()
    assert gone() is None
