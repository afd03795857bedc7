"""Batch sizes by the tokens or samples that were used: at any world size, and after a restart."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import resilin

NUM = 96
TOKENS = 5
SIZES = [4] * 5 + [8] * 4 + [24, 20]
"""The global batch of each step: it changes at 20 and at 52 samples, and the epoch ends at 96."""


def train(*, schedule, epochs=1, kept=False, stop_after=None, rule="sqrt", **loader_kwargs):
    """Trains; returns the global batch size of each step of this life of the job."""
    resilin.reset_job()
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule)
    loader_kwargs = {"batch_weight": lambda batch: TOKENS * len(batch[0]), **loader_kwargs}
    data = TensorDataset(torch.ones(NUM, 1))
    loader = resilin.AdaptiveDataLoader(data, batch_size=4, shuffle=True, **loader_kwargs)
    loader.set_batch_size(schedule)
    if kept:
        resilin.checkpoint_to(None, memory_every=1)
    sizes = []
    for _ in resilin.remaining_epochs_until(epochs):
        for (x,) in loader:
            before = model.clock
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > before.steps:
                sizes.append(model.clock.samples - before.samples)
            if stop_after is not None and model.clock.steps == stop_after:
                return sizes
    return sizes


def in_tokens():
    # 100 tokens are 20 samples; no step begins at 250 tokens, the next one begins at 260.
    return resilin.BatchSchedule.parse("0:4 0.1K:8 250:24")


def test_the_size_changes_at_the_first_step_at_or_after_the_position():
    assert train(schedule=in_tokens()) == SIZES


@pytest.mark.world_size(2)
def test_two_replicas_have_the_same_sizes():
    assert train(schedule=in_tokens()) == SIZES


@pytest.mark.world_size(3)
def test_so_have_three():
    assert train(schedule=in_tokens(), max_local_bsz=3) == SIZES


@pytest.mark.world_size(2)
def test_a_restart_in_the_middle_changes_no_size(shared_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path))
    first = train(schedule=in_tokens(), kept=True, stop_after=8)
    second = train(schedule=in_tokens(), kept=True)
    assert (len(first), first + second) == (8, SIZES)


def test_positions_in_samples_are_those_that_were_used():
    # The first epoch ends with a short step: 96 samples are 13 steps of 7, and 5 of them.
    schedule = resilin.BatchSchedule.parse("0:7 97:48", unit="samples")
    sizes = train(schedule=schedule, epochs=2, batch_weight=None)
    assert sizes == [7] * 13 + [5] + [7] + [48, 41]


def test_tokens_that_nothing_counts_are_refused():
    with pytest.raises(ValueError, match=r"batch_weight= of the AdaptiveDataLoader is None"):
        train(schedule=in_tokens(), batch_weight=None)


def test_tokens_that_the_model_was_promised_and_never_got_are_refused():
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="sqrt", tokens_per_step=20)
    loader = resilin.AdaptiveDataLoader(TensorDataset(torch.ones(NUM, 1)), batch_size=4)
    loader.set_batch_size(in_tokens())
    with pytest.raises(ValueError, match="the clock has 4 tokens after 4 samples"):  # noqa: PT012
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.clock.steps == 1


def test_a_loader_without_a_model_counts_no_tokens():
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(torch.ones(NUM, 1)), batch_size=4, batch_weight=lambda batch: 5.0
    )
    loader.set_batch_size(in_tokens())
    with pytest.raises(ValueError, match="the clock has 0 tokens after 4 samples"):
        list(loader)
