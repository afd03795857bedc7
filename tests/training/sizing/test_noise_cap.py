"""Batches no larger than the noise allows: under whatever offers them, and after a restart."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.core.noise_cap import NoiseCap
from resilin.core.rules import PowerRule, WeakEvidenceWarning
from tests.replicas import gathered, num_replicas
from tests.training.sizing.noisy_data import noisy_data

NUM = 4000
REFERENCE = 8
LINEAR = PowerRule(1, momentum=True)


class Live:
    """One life of a job: linear classification with wrong labels, at a low learning rate."""

    def __init__(self, offered, *, kept=False, make=torch.optim.SGD, rule=LINEAR, **loader):
        resilin.reset_job()
        torch.manual_seed(0)
        net = torch.nn.Linear(10, 4)
        self.optimizer = make(net.parameters(), lr=0.001)
        self.model = resilin.AdaptiveDataParallel(net, self.optimizer, rule=rule, stats_every=1)
        self.loader = resilin.AdaptiveDataLoader(
            noisy_data(NUM), batch_size=REFERENCE, shuffle=True, noise_cap=True, **loader
        )
        if offered is not None:
            self.loader.set_batch_size(offered)
        if kept:
            resilin.checkpoint_to(None, memory_every=1)
        self.sizes = []
        self.phis = []

    def run(self, steps):
        """Trains until this many steps were made; returns the sizes of those made here."""
        for _ in resilin.remaining_epochs_until(2):
            for x, y in self.loader:
                before = self.model.clock
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.model.clock.steps > before.steps:
                    self.sizes.append(self.model.clock.samples - before.samples)
                    self.phis.append(self.model.noise.phi)
                if self.model.clock.steps >= steps:
                    return self.sizes
        return self.sizes


def check(live, offered):
    """From the reference batch up to what the noise allows, which is less than what is offered."""
    sizes = live.sizes
    assert sizes[:8] == [REFERENCE] * 8
    assert all(size % REFERENCE == 0 for size in sizes)
    # The noise that is followed is that of some steps before, and at most 25% off.
    allowed = [NoiseCap(REFERENCE, phi).limit(offered) for phi in live.phis[-20:]]
    assert min(allowed) - REFERENCE <= sizes[-1] <= max(allowed) + REFERENCE
    assert REFERENCE < sizes[-1] < offered
    # It does not flicker.
    changes = sum(a != b for a, b in itertools.pairwise(sizes[50:]))
    assert changes <= 5


def test_one_replica_takes_what_the_noise_allows_of_a_number():
    live = Live(64)
    live.run(150)
    check(live, 64)
    # The learning rate and the samples are those of the linear rule.
    assert live.model.factors[0].lr == live.sizes[-1] / REFERENCE
    assert live.model.clock.samples == sum(live.sizes)


@pytest.mark.world_size(2)
def test_two_replicas_take_the_same():
    live = Live(64)
    sizes = live.run(150)
    check(live, 64)
    assert gathered([sizes]) == [sizes] * num_replicas()


@pytest.mark.world_size(2)
def test_the_cap_survives(shared_path, monkeypatch):
    whole = Live(64).run(60)
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path))
    first = Live(64, kept=True).run(40)
    assert first + Live(64, kept=True).run(60) == whole
    assert whole[39] > REFERENCE


def test_what_is_offered_may_be_a_trace_or_a_schedule():
    for offered in (
        resilin.BatchTrace((0, 100, 110), (64, 4, 16)),
        resilin.BatchSchedule.parse("0:64", unit="samples"),
    ):
        live = Live(offered)
        sizes = live.run(115)
        assert REFERENCE < sizes[99] < 64
        assert max(sizes) < 64
        if isinstance(offered, resilin.BatchTrace):
            # Nothing is capped below the reference batch.
            assert sizes[100:110] == [4] * 10
            assert set(sizes[110:]) <= {8, 16}


def test_a_trace_from_outside_is_capped(tmp_path, monkeypatch):
    path = tmp_path / "trace.csv"
    path.write_text("step,batchsize\n0,64\n")
    monkeypatch.setenv("RESILIN_BATCH_TRACE", str(path))
    sizes = Live(16).run(100)
    assert REFERENCE < sizes[-1] < 64


def test_the_bounds_of_an_autoscaler_go_before_the_cap():
    live = Live(None)
    live.loader.autoscale_batch_size(256, local_bsz_bounds=(24, 64))
    sizes = live.run(60)
    assert min(sizes) == 24
    assert all(size == 24 or size % REFERENCE == 0 for size in sizes)
    assert max(sizes) < 64


def test_an_optimizer_without_evidence_is_warned_about_once():
    live = Live(64, make=torch.optim.AdamW, rule="sqrt")
    with pytest.warns(WeakEvidenceWarning, match="noise_cap=True with AdamW"):
        live.run(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.run(600)


def test_a_cap_that_nothing_measures_for_is_refused():
    resilin.reset_job()
    data = TensorDataset(torch.ones(8, 1))
    loader = resilin.AdaptiveDataLoader(data, batch_size=2, noise_cap=True)
    with pytest.raises(RuntimeError, match="noise_cap=True needs the noise of the gradient"):
        list(loader)
