"""Layers that the loop freezes or unfreezes once, and a restart after that."""

from __future__ import annotations

import logging

import torch
from torch.utils.data import TensorDataset

import resilin


def train(directory, epochs, *, frozen_at_start=True):
    """A loop that unfreezes the first layer in epoch 1 and freezes the last one in epoch 2."""
    resilin.reset_job()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    net[0].requires_grad_(not frozen_at_start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    x = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loader = resilin.AdaptiveDataLoader(TensorDataset(x), batch_size=4)
    resilin.checkpoint_to(directory, every=None)
    for epoch in resilin.remaining_epochs_until(epochs):
        if epoch == 1:
            net[0].requires_grad_(True)
        if epoch == 2:
            net[1].requires_grad_(False)
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return net


def test_what_the_loop_has_frozen_and_unfrozen_survives(tmp_path):
    undisturbed = train(tmp_path / "a", 5)
    for epochs in (1, 2, 3, 4, 5):
        resumed = train(tmp_path / "b", epochs)
    for name, parameter in undisturbed.named_parameters():
        other = resumed.get_parameter(name)
        assert other.requires_grad == parameter.requires_grad
        torch.testing.assert_close(other, parameter, rtol=0, atol=0)


def test_a_script_that_begins_otherwise_is_taken_at_its_word(tmp_path, caplog):
    train(tmp_path, 3)
    with caplog.at_level(logging.INFO, logger="resilin"):
        net = train(tmp_path, 4, frozen_at_start=False)
    assert "freezes 0 parameters at its start, and froze 2 when" in caplog.text
    assert all(parameter.requires_grad for parameter in net.parameters())
