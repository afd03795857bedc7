"""Buffers with `persistent=False`: constants are the script's, what training changes is kept."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import on_replicas

D = torch.float64


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1, dtype=D)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("factor", torch.tensor([factor], dtype=D), persistent=False)
        self.register_buffer("grows", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.grows = torch.zeros(len(self.grows) + 1)
        return self.linear(x) * self.factor * (1 - 0.9**self.seen)


def train(directory, epochs, factor=2.0):
    resilin.reset_job()
    net = Net(factor)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    x = torch.randn(12, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    loader = resilin.AdaptiveDataLoader(TensorDataset(x), batch_size=6)
    resilin.checkpoint_to(directory, every=1)
    for _ in resilin.remaining_epochs_until(epochs):
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


@on_replicas(1, 2, buckets=[2])
def test_what_training_has_changed_survives_and_constants_are_the_scripts(
    shared_path, reducer, world
):
    undisturbed = train(shared_path / "a", 2)
    train(shared_path / "b", 1)
    resumed = train(shared_path / "b", 2)
    assert resumed.seen == undisturbed.seen == 4
    torch.testing.assert_close(resumed.linear.weight, undisturbed.linear.weight, rtol=0, atol=1e-15)
    assert train(shared_path / "b", 3, factor=3.0).factor == 3.0
