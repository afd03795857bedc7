"""`check_split` tells losses that couple samples from means, and leaves no trace."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import num_replicas
from tests.training.losses import info_nce, weighted

D = torch.float64


class Net(nn.Module):
    def __init__(self, *, norm=False, drop=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.probability = drop

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        return self.last(F.dropout(x, self.probability, self.training))


def make(**kwargs):
    torch.manual_seed(0)
    net = Net(**kwargs).to(D)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, resilin.AdaptiveDataParallel(net, optimizer, rule="linear")


def batch(n=21):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 6, generator=generator, dtype=D)
    return x, torch.randint(3, (n,), generator=generator)


def mean(model, x, y):
    return F.cross_entropy(model(x), y)


WORLDS = [pytest.param(1), pytest.param(2, marks=pytest.mark.world_size(2))]


@pytest.mark.parametrize("world", WORLDS)
def test_it_tells_means_from_losses_that_couple_samples(world):
    _, _, model = make()
    for pieces in (2, 5):
        found = resilin.check_split(lambda b: mean(model, *b), batch(), pieces=pieces)
        assert found.same
        assert found.difference < 1e-12
        assert sum(found.sizes) == 21
        assert len(found.sizes) == pieces
        assert "is that of the whole batch" in str(found)
    for loss in (info_nce, weighted):
        found = resilin.check_split(lambda b, loss=loss: loss(model, *b), batch())
        assert not found.same
        assert found.difference > 0.01
        assert found.randomness == 0
        assert "couples the samples" in str(found)
    found = resilin.check_split(lambda b: mean(model, *b).mul(len(b[0])), batch())
    assert not found.same  # a sum is no mean
    resilin.reset_job()
    _, _, model = make(norm=True)
    assert not resilin.check_split(lambda b: mean(model, *b), batch()).same


def test_class_weights_are_exact_as_weights_of_the_micro_batches():
    _, _, model = make()

    def loss(b):
        with model.weight(float(torch.tensor([1.0, 5.0, 20.0])[b[1]].sum())):
            return weighted(model, *b)

    assert resilin.check_split(loss, batch()).difference < 1e-12


def test_a_random_loss_is_told_apart():
    _, _, model = make(drop=0.5)
    found = resilin.check_split(lambda b: mean(model, *b), batch())
    assert not found.same
    assert found.randomness > 0.1
    assert "the loss is random" in str(found)


@pytest.mark.parametrize("way", ["samples", "model", "argument"])
def test_pieces_count_by_their_weight(way):
    _, _, model = make()
    x, y = batch(12)
    y[[0, 1, 2, 7]] = -100

    def tokens(b):
        return (b["y"] != -100).sum()

    def loss(b):
        if way == "model":
            with model.weight(float(tokens(b))):
                output = model(b["x"])
        else:
            output = model(b["x"])
        return F.cross_entropy(output, b["y"])

    given = tokens if way == "argument" else None
    found = resilin.check_split(loss, {"x": x, "y": y, "name": ["n"] * 12}, weight=given)
    assert found.same == (way != "samples")


@pytest.mark.parametrize("world", WORLDS)
def test_the_run_is_not_disturbed(world):
    def run(check):
        resilin.reset_job()
        net, optimizer, model = make(norm=True, drop=0.1)
        loader = resilin.AdaptiveDataLoader(
            TensorDataset(*batch(48)), batch_size=12, max_local_bsz=3, shuffle=True
        )
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        drawn = []
        for number, (x, y) in enumerate(loader):
            if check and number in (0, 1):  # before a step, and within one
                resilin.check_split(lambda b: mean(model, *b), batch())
            mean(model, x, y).backward()
            if check and number == 5:
                before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
                resilin.check_split(lambda b: weighted(model, *b), batch())
                after = [p.grad for p in net.parameters()]
                assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
            optimizer.step()
            optimizer.zero_grad()
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        return copy.deepcopy(net.state_dict()), drawn, model.clock

    (plain, numbers, clock), (checked, others, other) = run(False), run(True)
    assert numbers == others
    assert clock == other
    assert all(torch.equal(plain[name], checked[name]) for name in plain)
    assert num_replicas() == world


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(RuntimeError, match="AdaptiveDataParallel"):
        resilin.check_split(lambda b: b, batch())
    _, _, model = make()
    with pytest.raises(ValueError, match="1 samples cannot be split into 2"):
        resilin.check_split(lambda b: mean(model, *b), batch(1))
    with pytest.raises(ValueError, match="told apart"):
        resilin.check_split(lambda b: b, (batch()[0], object()))
    with pytest.raises(ValueError, match="add up to 0"):
        resilin.check_split(lambda b: mean(model, *b), batch(), weight=lambda b: 0)
    model.eval()
    with pytest.raises(RuntimeError, match="training mode"):
        resilin.check_split(lambda b: mean(model, *b), batch())
    model.train()
    with pytest.raises(ZeroDivisionError):
        resilin.check_split(lambda b: 1 / 0, batch())
    assert not {"forward", "weight"} & set(vars(model))
