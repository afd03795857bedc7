"""Buckets are reduced while the backward pass still runs, in measured steps as in others.

The backward pass is stopped at the first layer until the gradient of the last layer is the mean
over all replicas. If nothing were reduced before the end of the pass, that would never happen. The
order of events decides, so it does not matter how fast the machine is.
"""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import both_reducers, num_replicas

D = torch.float64
STEPS, SECONDS = 6, 60.0


class Stopped(nn.Module):
    """A network whose backward pass waits at its first layer for what is to be seen there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=D) for _ in range(6))
        self.until = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 0 and self.until is not None:
                # Called with the gradient of what the first layer returns: its own is to come.
                x.register_hook(lambda _: self.until())
        return x


def direction(tensor):
    flat = tensor.detach().reshape(-1).clone()
    return flat / flat.norm()


def last_layer_gradient(module, x, y):
    """Direction of the gradient of the last layer, for these samples."""
    weight = module.layers[-1].weight
    (gradient,) = torch.autograd.grad(F.mse_loss(module(x), y), weight)
    return direction(gradient)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bucket_cap_mb", [0.0005, 25])
@both_reducers
def test_the_last_layer_is_reduced_while_the_backward_pass_is_at_the_first(bucket_cap_mb):
    several = bucket_cap_mb < 1
    net = Stopped()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, rule="constant", stats_every=2, bucket_cap_mb=bucket_cap_mb
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * 4, 8, generator=generator, dtype=D)
    y = torch.randn(STEPS * 4, 8, generator=generator, dtype=D)
    loader = resilin.AdaptiveDataLoader(TensorDataset(x, y, torch.arange(len(x))), batch_size=4)
    seen = []
    for step, (own_x, own_y, own) in enumerate(loader):
        whole = range(4 * step, 4 * step + 4)
        assert len(own) == 2
        assert set(own.tolist()) < set(whole)
        net.until = None
        mean = last_layer_gradient(net, x[whole], y[whole])
        alone = last_layer_gradient(net, own_x, own_y)
        # What this replica has alone cannot be taken for the mean.
        assert alone @ mean < 0.9999
        reduced = []

        def until(mean=mean, reduced=reduced):
            # In the first step DDP has other buckets, of which the last layer may be the last.
            deadline = time.monotonic() + (SECONDS if several and seen else 0.5)
            while time.monotonic() < deadline:
                gradient = net.layers[-1].weight.grad
                if gradient is not None and float(direction(gradient) @ mean) > 1 - 1e-12:
                    reduced.append(True)
                    return
                time.sleep(0.001)

        net.until = until
        measured = model.measures_next()
        F.mse_loss(model(own_x), own_y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((measured, bool(reduced)))
    assert (len(seen), num_replicas()) == (STEPS, 2)
    # With one bucket there is nothing to overlap, which shows that the hook can tell.
    assert seen[1:] == [(measured, several) for measured, _ in seen[1:]]
    assert {measured for measured, _ in seen[1:]} == {True, False}
