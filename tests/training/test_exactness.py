"""The gradient equals the one-process gradient of the same global batch, for every split.

Each test trains 50 steps on 1 to 4 real processes, with batch sizes that divide nothing, and
compares gradients and parameters with one process that sees each whole batch. Float64 leaves no
room in which rounding could hide a wrong weight.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.stream import SampleStream
from tests.replicas import both_reducers, on_replicas

SIZES = (24, 7, 12, 5, 31, 3, 16, 9, 2, 40)
STEPS = 50
REFERENCE = 12

worlds = on_replicas(1, 2, 3, 4)


class Net(nn.Module):
    """A frozen layer, a shared layer, and one that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 10)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(10, 10)
        self.sometimes = nn.Linear(10, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        h = torch.tanh(self.frozen(x))
        h = torch.tanh(self.shared(torch.tanh(self.shared(h))))
        chosen = x[:, :1] > 1.2
        if chosen.any():
            h = h + chosen * self.sometimes(h)
        return self.head(h)


def make_data(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(203, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (203,), generator=generator)
    # Tokens per sample, some without any.
    tokens = torch.randint(0, 5, (203,), generator=generator)
    return TensorDataset(x, y, tokens)


def make_model(dtype):
    torch.manual_seed(2)
    model = Net().to(dtype)
    first = [*model.shared.parameters()]
    rest = [*model.sometimes.parameters(), *model.head.parameters()]
    groups = [{"params": first}, {"params": rest, "lr": 0.03}]
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)


def batch_size(clock):
    return SIZES[clock.steps % len(SIZES)]


def relative_error(a, b):
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


class Whole:
    """One process that trains on each whole batch."""

    def __init__(self, dtype, data, loss, clip=None, set_to_none=True):
        self.model, self.optimizer = make_model(dtype)
        self.data, self.loss, self.clip, self.set_to_none = data, loss, clip, set_to_none
        self.stream, self.cursor, self.steps = SampleStream(len(data), seed=5), 0, 0

    def step(self):
        span = self.stream.batch(self.cursor, SIZES[self.steps % len(SIZES)])
        x, y, tokens = self.data[torch.from_numpy(self.stream.indices(span))]
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        self.loss(self.model(x), y, tokens).backward()
        grads = [p.grad.clone() if p.grad is not None else None for p in self.model.parameters()]
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.cursor, self.steps = span.stop, self.steps + 1
        return grads


def mean_loss(output, y, tokens):
    return F.cross_entropy(output, y)


def token_loss(output, y, tokens):
    each = F.cross_entropy(output, y, reduction="none")
    return (each * tokens).sum() / tokens.sum()


def compare(
    dtype, loss, tolerance, *, clip=None, weigh=None, set_to_none=True, workers=0, **kwargs
):
    data = make_data(dtype)
    whole = Whole(dtype, data, loss, clip, set_to_none)
    model, optimizer = make_model(dtype)
    model = resilin.AdaptiveDataParallel(
        model, optimizer, rule="constant", stats_every=2, find_unused_parameters=True, **kwargs
    )
    loader = resilin.AdaptiveDataLoader(
        data,
        batch_size=REFERENCE,
        shuffle=True,
        seed=5,
        max_local_bsz=5,
        num_workers=workers,
        batch_weight=None if weigh != "loader" else lambda batch: batch[2].sum(),
    )
    loader.set_batch_size(batch_size)
    most_micro_batches = 0
    while model.clock.steps < STEPS:
        micro_batches = 0
        for x, y, tokens in loader:
            before = model.clock.steps
            micro_batches += 1
            if weigh == "block":
                with model.weight(float(tokens.sum())):
                    output = model(x)
            else:
                output = model(x)
            loss(output, y, tokens).backward()
            # Of the step's own micro-batches only the last one may show a gradient to compare.
            last = resilin.current_job().micro_batch.last
            grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            if clip is not None:
                model.clip_grad_norm_(clip, policy="fixed")
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert (model.clock.steps > before) == last
            if not last:
                continue
            most_micro_batches = max(most_micro_batches, micro_batches)
            micro_batches = 0
            for grad, expected in zip(grads, whole.step(), strict=True):
                if expected is not None:
                    assert relative_error(grad, expected) < tolerance
                elif set_to_none:
                    assert grad is None
            pairs = zip(model.module.parameters(), whole.model.parameters(), strict=True)
            for parameter, expected in pairs:
                assert relative_error(parameter, expected) < tolerance
            if model.clock.steps >= STEPS:
                break
    assert most_micro_batches > 1
    assert whole.steps == STEPS
    assert model.clock.samples == whole.cursor


@worlds
def test_mean_losses_float64(world):
    compare(torch.float64, mean_loss, 1e-11)


@worlds
def test_mean_losses_float32(world):
    compare(torch.float32, mean_loss, 1e-5)


@worlds
@pytest.mark.parametrize("weigh", ["loader", "block"])
def test_token_losses(world, weigh):
    # Some micro-batches have no token at all, and their loss is not a number.
    compare(torch.float64, token_loss, 1e-11, weigh=weigh)


@worlds
def test_clipping(world):
    compare(torch.float64, mean_loss, 1e-11, clip=0.05)


@worlds
def test_gradients_that_are_zeroed_in_place(world):
    compare(torch.float64, mean_loss, 1e-11, set_to_none=False)


@pytest.mark.world_size(2)
@both_reducers
def test_worker_processes():
    compare(torch.float64, mean_loss, 1e-11, workers=2)


@worlds
def test_loss_scaling(world):
    dtype, data = torch.float64, make_data(torch.float64)
    whole = Whole(dtype, data, mean_loss, clip=0.05)
    model, optimizer = make_model(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    model = resilin.AdaptiveDataParallel(
        model, optimizer, rule="constant", scaler=scaler, find_unused_parameters=True
    )
    loader = resilin.AdaptiveDataLoader(data, REFERENCE, shuffle=True, seed=5, max_local_bsz=5)
    loader.set_batch_size(batch_size)
    while model.clock.steps < STEPS:
        for x, y, tokens in loader:
            scaler.scale(mean_loss(model(x), y, tokens)).backward()
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.05, policy="fixed")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if model.clock.steps == whole.steps:
                continue
            whole.step()
            pairs = zip(model.module.parameters(), whole.model.parameters(), strict=True)
            for parameter, expected in pairs:
                assert relative_error(parameter, expected) < 1e-11
            if model.clock.steps >= STEPS:
                break
    # It grew, once per so many steps and not per so many micro-batches.
    assert scaler.get_scale() == 1024.0 * 2 ** (STEPS // 7)


@pytest.mark.world_size(2)
@both_reducers
def test_a_regulariser_outside_the_model_counts_once():
    # Its gradient does not pass through the model's output.
    data = make_data(torch.float64)

    def loss(model, output, y):
        return F.cross_entropy(output, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = copy.deepcopy(plain)
    model = resilin.AdaptiveDataParallel(plain, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data, batch_size=23, shuffle=True, seed=5, max_local_bsz=5)
    for x, y, _ in loader:
        loss(model.module, model(x), y).backward()
        if resilin.current_job().micro_batch.last:
            break
        optimizer.step()
    x, y, _ = data[torch.from_numpy(SampleStream(203, seed=5).indices(range(23)))]
    loss(expected, expected(x), y).backward()
    for a, b in zip(plain.parameters(), expected.parameters(), strict=True):
        if b.grad is not None:
            assert relative_error(a.grad, b.grad) < 1e-11


@pytest.mark.world_size(3)
@both_reducers
def test_fewer_samples_than_replicas():
    data = make_data(torch.float64)
    model, optimizer = make_model(torch.float64)
    model = resilin.AdaptiveDataParallel(
        model, optimizer, rule="constant", find_unused_parameters=True, stats_every=1
    )
    # 203 samples: the last batch of an epoch has 3, and the one before a rotated share.
    loader = resilin.AdaptiveDataLoader(data, batch_size=2, shuffle=True, seed=5)
    seen = []
    for x, y, _ in loader:
        loss = F.cross_entropy(model(x), y)
        if loader.current_samples == 0:
            loss = loss * float("inf")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loader.current_samples)
    stats = resilin.Accumulator()
    stats["samples"] += sum(seen)
    with stats.synchronized():
        assert stats["samples"] == 203
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert len(seen) == 102
