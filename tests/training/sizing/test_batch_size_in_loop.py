"""A batch size that the loop itself sets, as in `if epoch == 1`, and a restart after that."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import resilin

NUM = 24


def train(directory, set_sizes, epochs, *, within=False):
    """Trains until this epoch; returns (epoch, samples) of each step of this life of the job."""
    resilin.reset_job()
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    data = TensorDataset(torch.ones(NUM, 1))
    loader = None if within else resilin.AdaptiveDataLoader(data, batch_size=4)
    resilin.checkpoint_to(directory, every=None)
    steps = []
    for epoch in resilin.remaining_epochs_until(epochs):
        if within:
            loader = resilin.AdaptiveDataLoader(data, batch_size=4)
        set_sizes(loader, epoch)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((epoch, len(x)))
    return steps


def once(value):
    """What a loop does that sets the batch size when its second epoch begins."""

    def set_sizes(loader, epoch):
        if epoch == 1:
            loader.set_batch_size(value)

    return set_sizes


def test_a_number_that_the_loop_has_set_survives(tmp_path):
    assert train(tmp_path, once(12), 2) == [(0, 4)] * 6 + [(1, 12)] * 2
    assert train(tmp_path, once(12), 3) == [(2, 12)] * 2
    # And once more: a state that was taken over is kept as well.
    assert train(tmp_path, once(12), 4) == [(3, 12)] * 2


def test_what_is_no_number_has_to_be_set_again(tmp_path):
    assert train(tmp_path, once(lambda clock: 12), 2)[-1] == (1, 12)
    with pytest.raises(RuntimeError, match="set the batch size to a function of the clock"):
        train(tmp_path, once(lambda clock: 12), 3)


def test_so_does_the_autoscaler(tmp_path):
    def autoscale(loader, epoch):
        if epoch == 1:
            loader.autoscale_batch_size(8)

    train(tmp_path, autoscale, 2)
    with pytest.raises(RuntimeError, match=r"autoscale_batch_size\(\) after the job had started"):
        train(tmp_path, autoscale, 3)


def test_a_loop_that_sets_it_in_every_epoch_is_taken_at_its_word(tmp_path):
    def every_epoch(loader, epoch):
        loader.set_batch_size(lambda clock: (4, 12, 8)[epoch])

    train(tmp_path, every_epoch, 2)
    assert train(tmp_path, every_epoch, 3) == [(2, 8)] * 3


def test_a_loader_made_in_the_epoch_begins_as_it_was_made(tmp_path):
    assert train(tmp_path, once(12), 2, within=True)[-1] == (1, 12)
    assert train(tmp_path, once(12), 3, within=True) == [(2, 4)] * 6


def test_a_function_of_the_clock_is_not_asked_for_a_step_after_the_last_one(tmp_path):
    def by_step(loader, epoch):
        loader.set_batch_size(lambda clock: [4, 12, 8][clock.steps])

    assert train(tmp_path, by_step, 1) == [(0, 4), (0, 12), (0, 8)]
