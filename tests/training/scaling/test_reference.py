"""At the reference batch nothing changes: one process leaves steps whole unless noise is needed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resilin
from tests.training.losses import info_nce, weighted

D = torch.float64


def data(n=96):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=generator, dtype=D)
    return TensorDataset(x, torch.randint(3, (n,), generator=generator))


def dice(net, x, y):
    p, t = torch.sigmoid(net(x)[:, 0]), (y == 0).double()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def step(model, optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("loss", [info_nce, weighted, dice], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    ("batch_size", "optimizer"),
    [(2, torch.optim.SGD), (3, torch.optim.AdamW), (40, torch.optim.SGD)],
)
def test_the_run_is_the_plain_one_bit_for_bit(loss, batch_size, optimizer):
    # BatchNorm and losses that couple samples tell any split, dropout any other random number.
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))
    first = first.to(D)
    plain, net = copy.deepcopy(first), copy.deepcopy(first)
    expected = optimizer(plain.parameters(), lr=0.05)
    torch.manual_seed(1)
    sizes = []
    # A DataLoader draws the seed of its workers from the global generator, unless it has another
    # one; an AdaptiveDataLoader draws nothing from it.
    for x, y in DataLoader(data(), batch_size=batch_size, generator=torch.Generator()):
        sizes.append(len(x))
        step(plain, expected, loss(plain, x, y))
    random_state = torch.get_rng_state()
    opt = optimizer(net.parameters(), lr=0.05)
    model = resilin.AdaptiveDataParallel(net, opt)
    torch.manual_seed(1)
    seen = []
    for x, y in resilin.AdaptiveDataLoader(data(), batch_size=batch_size):
        seen.append(len(x))
        step(model, opt, loss(model, x, y))
    assert seen == sizes
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in net.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert model.noise is None
    assert model.gain == model.scale == 1


def sizes_of(batch_size, then=None, *, samples=96, autoscale=False, **kwargs):
    """Micro-batches of an epoch at `batch_size`, and of further ones at the sizes of `then`."""
    net = nn.Linear(6, 3, dtype=D)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer, **kwargs)
    loader = resilin.AdaptiveDataLoader(data(samples), batch_size=batch_size)
    if autoscale:
        loader.autoscale_batch_size(batch_size)
    epochs = []
    for size in (None, *(then or ())):
        if size is not None:
            loader.set_batch_size(size)
        epochs.append([])
        for x, y in loader:
            epochs[-1].append(len(x))
            loss = F.cross_entropy(model(x), y)
            step(model, optimizer, loss)
    return model, epochs


def test_a_larger_batch_is_split_and_measured_before_its_first_step():
    model, (reference, first) = sizes_of(8, [32], rule="linear", stats_every="auto")
    assert reference == [8] * 12
    assert first == [32] * 3
    resilin.reset_job()
    gains = []
    net = nn.Linear(6, 3, dtype=D)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(data(136), batch_size=8)
    loader.set_batch_size(lambda clock: 8 if clock.steps < 9 else 32)
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        gains.append((model.clock.steps, model.noise is not None, model.gain))
    # The reference steps have used up none of the first measurements of the schedule.
    assert sizes[:11] == [8] * 9 + [16, 16]
    assert gains[8] == (9, False, 1.0)
    assert gains[10][:2] == (10, True)
    assert 1 <= gains[10][2] <= 4


def test_a_remainder_that_counts_as_one_reference_step_is_left_whole():
    _, (_, larger) = sizes_of(32, [64], samples=70)
    # 70 = 64 + 6: the remainder has the scale of one reference step. The epoch is one of progress.
    assert larger[:3] == [32, 32, 6]


def test_a_smaller_batch_is_left_whole_and_gains_the_least():
    model, (_, smaller) = sizes_of(32, [16])
    assert set(smaller) == {16}
    assert model.noise is None
    assert model.gain == model.scale == 0.5


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("settings", [{"stats_every": 1}, {"autoscale": True}])
def test_no_piece_has_a_single_sample(batch_size, settings):
    model, (sizes,) = sizes_of(batch_size, **settings)
    assert set(sizes) == {batch_size}
    assert model.noise is None


@pytest.mark.parametrize("settings", [{"stats_every": 1}, {"autoscale": True}])
def test_the_reference_batch_is_split_where_somebody_needs_its_noise(settings):
    model, (sizes,) = sizes_of(8, **settings)
    assert sizes[:2] == [4, 4]
    assert model.noise is not None
    assert model.gain == 1


def test_a_reference_batch_of_one_may_be_measured_in_pieces_of_one():
    model, (_, sizes) = sizes_of(1, [2], samples=8)
    assert set(sizes) == {1}
    assert model.noise is not None
