"""A batch that grows with the noise: together on all replicas, never back, also after a restart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.core.events import DecisionEvent
from tests.replicas import gathered, num_replicas, replica
from tests.training.sizing.noisy_data import noisy_data

NUM = 4000
RAMP = (4, 8, 16, 4096)
"""The noise scale of this model is about 40 samples: the last size is never allowed."""


class Live:
    """One life of a job: linear classification with wrong labels, at a low learning rate."""

    def __init__(self, ramp=RAMP, *, rule="sqrt", kept=False, batch_weight=None, stats_every=1):
        resilin.reset_job()
        torch.manual_seed(0)
        net = torch.nn.Linear(10, 4)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        self.model = resilin.AdaptiveDataParallel(
            net, self.optimizer, rule=rule, stats_every=stats_every
        )
        self.loader = resilin.AdaptiveDataLoader(
            noisy_data(NUM), batch_size=8, shuffle=True, batch_weight=batch_weight
        )
        self.loader.set_batch_size(resilin.NoiseRamp(ramp))
        self.events = []
        resilin.listen(self.events.append)
        if kept:
            resilin.checkpoint_to(None, memory_every=1)
        self.sizes = []

    def run(self, steps, epochs=1):
        """Trains until this many steps were made; returns the sizes of those made here."""
        for _ in resilin.remaining_epochs_until(epochs):
            for x, y in self.loader:
                before = self.model.clock
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.model.clock.steps > before.steps:
                    self.sizes.append(self.model.clock.samples - before.samples)
                if self.model.clock.steps >= steps:
                    return self.sizes
        return self.sizes


def check(sizes):
    """It begins with the first size, and goes up to the largest one that the noise allows."""
    assert sizes[0] == 4
    assert sizes == sorted(sizes)
    assert sizes[-1] == 16
    assert set(sizes) == {4, 8, 16}
    # Nothing is concluded from fewer measurements, whatever they say.
    assert sizes[:8] == [4] * 8


def test_the_noise_is_measured_whatever_the_rule():
    # How often is a matter of time, but the first steps always are.
    live = Live(stats_every="auto")
    live.run(10)
    assert live.model.noise is not None


def test_one_replica_grows():
    live = Live()
    check(live.run(120))
    decisions = [event for event in live.events if isinstance(event, DecisionEvent)]
    assert [(each.batch_size_before, each.batch_size) for each in decisions] == [(4, 8), (8, 16)]
    assert "the noise scale is above" in decisions[0].reason
    # The learning rate follows by the rule, as for any other batch size.
    assert live.model.factors[0].lr == pytest.approx(2**0.5)


@pytest.mark.world_size(2)
def test_two_replicas_grow_at_the_same_step():
    live = Live()
    sizes = live.run(120)
    check(sizes)
    assert gathered([sizes]) == [sizes] * num_replicas()
    decisions = [event for event in live.events if isinstance(event, DecisionEvent)]
    assert len(decisions) == (2 if replica() == 0 else 0)


def test_tokens_do_not_change_what_the_noise_allows():
    sizes = Live(batch_weight=lambda batch: 7 * len(batch[0])).run(120)
    # The unit of the noise is the token, that of the sizes the sample.
    check(sizes)


@pytest.mark.world_size(2)
def test_the_size_that_was_reached_survives(shared_path, monkeypatch):
    whole = Live().run(120)
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path))
    until = whole.index(8) + 3
    assert 16 not in whole[:until]
    first = Live(kept=True).run(until)
    second = Live(kept=True).run(120)
    assert first + second == whole
    # A ramp with other sizes does not fall below what was reached.
    assert set(Live((4, 12, 4096), kept=True).run(125)) == {12}


def test_a_ramp_that_is_set_again_in_each_epoch_keeps_its_size():
    live = Live()
    live.run(120)
    live.loader.set_batch_size(resilin.NoiseRamp(RAMP))
    assert live.loader.current_batch_size == 16
    live.loader.set_batch_size(4)
    assert live.loader.current_batch_size == 4


def test_a_ramp_that_nothing_measures_for_is_refused():
    resilin.reset_job()
    loader = resilin.AdaptiveDataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    loader.set_batch_size(resilin.NoiseRamp((2, 4)))
    with pytest.raises(RuntimeError, match="needs the noise of the gradient"):
        list(loader)
