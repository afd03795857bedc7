"""Reducers: who is attached to whom, whose parameters win, and the exact mean."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from resilin.core.noise import from_sums
from resilin.core.step import Part, Step
from resilin.training.gradient.ddp import DdpReducer
from resilin.training.gradient.local import LocalReducer
from resilin.training.gradient.reducer import agree_on_source
from resilin.training.gradient.reducer_choice import choose
from tests.replicas import (
    assert_identical,
    both_reducers,
    gathered,
    num_replicas,
    on_replicas,
    replica,
)
from tests.training.gradient.driven import Driven, model_of

D = torch.float64
START = Step(measure=True, seconds=1.0, steps=3)


class Members:
    """As much of an engine as the gradient asks for: its group changes when the test says so."""

    def __init__(self, group=None):
        self.group = group

    def gradient_group(self):
        return self.group

    def host_group(self):
        return self.group

    def wait(self, work):
        work.wait()

    def all_took_part(self, here):
        return here

    def refused(self, error):
        return error

    live = False


def network(fill=None, width=3):
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2)).to(D)
    if fill is not None:
        for tensor in [*net.parameters(), net[1].running_mean]:
            nn.init.constant_(tensor, fill)
    return net


def gradient_of(net, engine, **options):
    return Driven(net, engine, options)


def flat(net):
    return torch.cat([t.detach().reshape(-1).to(D) for t in net.parameters()])


def part(weight, *, last=True, total=None):
    return Part(weight=weight, samples=round(weight), last=last, total=total)


def test_the_reducer_is_chosen_by_who_is_there():
    model = model_of(network())
    assert isinstance(choose(model, None), LocalReducer)
    assert not DdpReducer.fits(model, None)


@pytest.mark.world_size(2)
def test_several_replicas_get_ddp():
    model = model_of(network())
    assert isinstance(choose(model, dist.group.WORLD), DdpReducer)
    assert not LocalReducer.fits(model, dist.group.WORLD)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("joined", "source"), [((), 0), ((0, 1, 2), 0), ((1, 2), 1), ((2,), 2), ((0, 2), 0)]
)
def test_parameters_come_from_the_first_replica_that_was_in_the_job(joined, source):
    found = agree_on_source(model_of(network()), dist.group.WORLD, joined=replica() in joined)
    assert found == source


@pytest.mark.world_size(2)
def test_replicas_with_different_models_are_refused():
    model = model_of(network(width=3 + replica()))
    with pytest.raises(ValueError, match="replicas have different models"):
        agree_on_source(model, dist.group.WORLD, joined=False)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("source", [0, 1, None])
@both_reducers
def test_attaching_copies_from_the_source_and_from_nobody_else(source):
    net = network(fill=float(replica() + 1))
    # Not contiguous, complex and empty ones, too.
    net.register_buffer("turned", torch.full((2, 3), replica() + 1.0).t())
    net.register_buffer("complex", torch.full((2,), complex(replica(), 1)))
    net.register_buffer("none", torch.zeros(0))
    reducer = choose(model_of(net), dist.group.WORLD)
    if source == 0 and torch.__version__ < "2.10" and isinstance(reducer, DdpReducer):
        told = r"gloo of torch 2\.8\S* cannot .* complex \(torch\.complex64\); torch 2\.10 can"
        with pytest.raises(RuntimeError, match=told):
            reducer.attach(dist.group.WORLD, source=source)
        return
    reducer.attach(dist.group.WORLD, source=source)
    expected = replica() if source is None else source
    assert set(flat(net).tolist()) == {expected + 1.0}
    assert set(net[1].running_mean.tolist()) == {expected + 1.0}
    assert set(net.turned.reshape(-1).tolist()) == {expected + 1.0}
    assert net.complex.tolist() == [complex(expected, 1)] * 2
    assert reducer.group is dist.group.WORLD
    reducer.detach()
    assert reducer.group is None


@pytest.mark.world_size(2)
@pytest.mark.parametrize("survivor", [0, 1])
@both_reducers
def test_a_replica_that_joins_does_not_overwrite_those_that_were_there(survivor):
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=D), torch.randn(6, 2, dtype=D)
    # A BatchNorm would couple the samples of a batch, which is not what this is about.
    net = nn.Linear(4, 2).to(D)
    plain = nn.Linear(4, 2).to(D)
    if replica() == survivor:
        engine = Members()
        gradient = gradient_of(net, engine)
        gradient.begin(part(6.0), START)
        F.mse_loss(gradient.call(x), y).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        gradient.end()
        trained = flat(net)
        engine.group = dist.group.WORLD
    else:
        nn.init.constant_(net.weight, 7.0)
        gradient, trained = gradient_of(net, Members(dist.group.WORLD)), None
    mine = slice(0, 2) if replica() == 0 else slice(2, 6)
    weight = float(mine.stop - mine.start)
    gradient.begin(part(weight, total=6.0), START)
    F.mse_loss(gradient.call(x[mine]), y[mine]).backward()
    (trained,) = [known for known in gathered([trained]) if known is not None]
    assert torch.equal(flat(net), trained)
    plain.load_state_dict(net.state_dict())
    F.mse_loss(plain(x), y).backward()
    assert gradient.step.result.weight == 6.0
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=0)


@pytest.mark.world_size(2)
@both_reducers
def test_other_trained_parameters_attach_anew_without_copying(monkeypatch, reducer):
    net = network()
    gradient = gradient_of(net, Members(dist.group.WORLD))
    sources = []
    attach = reducer.attach

    def spied(self, group, *, source):
        sources.append(source)
        attach(self, group, source=source)

    monkeypatch.setattr(reducer, "attach", spied)
    x = torch.randn(3, 4, dtype=D)
    for frozen in (False, False, True, True):
        net[0].weight.requires_grad_(not frozen)
        gradient.begin(part(3.0, total=3.0 * num_replicas()), START)
        gradient.call(x).sum().backward()
        gradient.end()
        net.zero_grad()
    assert sources == [None]
    assert_identical(flat(net))


@on_replicas(1, 2, buckets=(2, 3))
@pytest.mark.parametrize("measure", [False, True])
def test_two_backward_passes_of_a_micro_batch_count_by_its_weight(world, measure):
    # Those of weight 0 must not count at all, and those of a tiny weight by as much.
    torch.manual_seed(1)
    net, plain = nn.Linear(4, 1).to(D), nn.Linear(4, 1).to(D)
    plain.load_state_dict(net.state_dict())
    weights = [2.0, 0.0, 1e-6, 3.0]
    xs = torch.randn(len(weights), 5, 4, dtype=D)
    total = sum(weights)
    loss = sum(
        w / total * (plain(x).square().mean() + plain(x).mean())
        for w, x in zip(weights, xs, strict=True)
    )
    loss.backward()
    gradient = gradient_of(net, Members(dist.group.WORLD if world > 1 else None))
    start = Step(measure=measure, seconds=1.0, steps=0)
    for index, (weight, x) in enumerate(zip(weights, xs, strict=True)):
        last = index == len(weights) - 1
        gradient.begin(part(weight, last=last, total=world * total), None if index else start)
        out = gradient.call(x)
        if last:
            (out.square().mean() + out.mean()).backward()
        else:
            out.square().mean().backward(retain_graph=True)
            out.mean().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


@on_replicas(1, 2, buckets=(2, 3))
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("weights", [(0.0, 2.0), (0.0, 0.0, 3.0), (2.0, 0.0)])
def test_a_gradient_that_is_zeroed_after_the_call_does_not_come_back(world, weights, set_to_none):
    # The first micro-batch of a replica that has fewer than the others has no weight.
    net, total = nn.Linear(4, 1).to(D), sum(weights)
    gradient = gradient_of(net, Members(dist.group.WORLD if world > 1 else None))
    start = Step(seconds=1.0)
    gradient.begin(part(5.0, total=5.0 * world), start)
    gradient.call(torch.full((5, 4), 100.0, dtype=D)).sum().backward()
    gradient.end()
    for index, weight in enumerate(weights):
        last = index == len(weights) - 1
        part_of = part(weight, last=last, total=world * total)
        gradient.begin(part_of, None if index else start)
        out = gradient.call(torch.full((5, 4), weight + 1, dtype=D)).mean()
        if not index:
            net.zero_grad(set_to_none=set_to_none)
        out.backward()
    expected = sum(w * (w + 1) for w in weights) / total
    assert torch.allclose(net.weight.grad, torch.full((1, 4), expected, dtype=D), rtol=1e-12)


class Sometimes(nn.Module):
    """Uses its second layer for some inputs only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 1).to(D), nn.Linear(4, 1, bias=False).to(D)

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x.max() > 2 else 0)


@pytest.mark.world_size(2)
@both_reducers
def test_a_parameter_may_be_used_by_a_micro_batch_without_weight_alone():
    # As on a replica that has fewer samples than others, and works on one of theirs instead.
    net = Sometimes()
    options = {"find_unused_parameters": True}
    gradient = gradient_of(net, Members(dist.group.WORLD), **options)
    for _ in range(2):
        weights = (0.0, 1.0) if replica() else (3.0, 1.0)
        for index, (weight, value) in enumerate(zip(weights, (3.0, 1.0), strict=True)):
            start = None if index else Step(seconds=1.0)
            gradient.begin(part(weight, last=bool(index), total=5.0), start)
            gradient.call(torch.full((1, 4), value, dtype=D)).sum().backward()
        assert torch.allclose(net.sometimes.weight.grad, torch.full((1, 4), 9 / 5, dtype=D))
        assert torch.allclose(net.always.weight.grad, torch.full((1, 4), 11 / 5, dtype=D))
        gradient.end()
        net.zero_grad()


@pytest.mark.world_size(2)
@both_reducers
def test_the_noise_does_not_depend_on_a_guess_of_the_weight_nor_on_an_idle_replica():
    # Nobody knows the total weight: that of the step before is the guess.
    net = nn.Linear(4, 1, bias=False).to(D)
    gradient = gradient_of(net, Members(dist.group.WORLD))
    generator = torch.Generator().manual_seed(replica())
    for weights in ((1.0, 3.0), (7.0, 2.0), (5.0, 0.0)):
        gradient.begin(part(weights[replica()]), START)
        x = torch.randn(3, 4, generator=generator, dtype=D)
        (own,) = torch.autograd.grad(net(x).square().mean(), net.weight)
        gradient.call(x).square().mean().backward()
        noise = gradient.step.result.noise.read()
        grads = gathered([own])
        gradient.end()
        net.zero_grad()
        if not all(weights):
            assert noise is None  # one gradient has nothing to be compared with
            continue
        total = sum(weights)
        mean = sum(w / total * g for w, g in zip(weights, grads, strict=True))
        squares = [float(g.square().sum()) for g in (*grads, mean)]
        expected = from_sums(
            batch_size=total,
            num_micro_batches=2,
            weighted_sqr_norm=sum(w / total * s for w, s in zip(weights, squares[:2], strict=True)),
            mean_sqr_norm=squares[2],
        )
        assert noise[0].sqr_norm == pytest.approx(expected.sqr_norm, rel=1e-10)
        assert noise[0].trace == pytest.approx(expected.trace, rel=1e-10)


def test_alone_voters_are_told_of_a_step_that_is_left():
    told = []

    class Clerk:
        def votes(self):
            return (2.0,)

        def counted(self, votes):
            told.append(votes)

    net = nn.Linear(4, 1)
    gradient = Driven(net, Members(), voters=[Clerk()])
    gradient.begin(part(3.0), START)
    gradient.leave()
    assert gradient.step.result.skipped
    gradient.ballot.count()
    gradient.end()
    gradient.ballot.count()
    assert told == [(2.0,)]
