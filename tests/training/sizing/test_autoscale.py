"""Choosing the batch size in a real loop: decisions, bounds, memory, hints."""

import json
import statistics
import time

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.core.events import DecisionEvent, FaultEvent
from resilin.core.plan import BatchBounds, PlanError
from resilin.training.gradient.timing import SyncTimer
from resilin.training.sizing.memory_limit import LocalLimit
from tests.replicas import replica

REFERENCE, MOST = 16, 256


class Clock:
    """Time that passes when a test says so, and a little with each look at it.

    Choices depend on measured times. With these they are the same on every machine.
    """

    TICK = 1e-5

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        self.now += self.TICK
        return self.now

    def advance(self, seconds):
        self.now += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", CLOCK)


class Live:
    """A loop whose steps have a price that the test sets."""

    def __init__(self, *, bounds=(4, 64), rule="adascale", **loader):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3000, 10, generator=generator)
        y = (x @ torch.randn(10, 4, generator=generator)).argmax(1)
        # Some labels are wrong, and the learning rate is low: the noise scale is about twice the
        # reference batch, and stays there. A converged model would have nothing but noise, and
        # then no price makes a smaller batch learn faster.
        wrong = torch.rand(3000, generator=generator) < 0.2
        y[wrong] = torch.randint(4, (int(wrong.sum()),), generator=generator)
        torch.manual_seed(0)
        self.net = torch.nn.Linear(10, 4)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.001)
        self.model = resilin.AdaptiveDataParallel(
            self.net, self.optimizer, rule=rule, stats_every=2
        )
        self.loader = resilin.AdaptiveDataLoader(
            TensorDataset(x, y), batch_size=REFERENCE, shuffle=True, **loader
        )
        if bounds is not None:
            self.loader.autoscale_batch_size(MOST, local_bsz_bounds=bounds)
        self.events = []
        resilin.listen(self.events.append)
        self.sizes = []

    def run(self, steps, per_step=0.0, per_sample=0.0, per_micro_batch=0.0):
        until = self.model.clock.steps + steps
        while self.model.clock.steps < until:
            for x, y in self.loader:
                with self.loader.retry_smaller():
                    F.cross_entropy(self.model(x), y).backward()
                    CLOCK.advance(per_sample * len(x) + per_micro_batch)
                    step = self.model.clock.steps
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if self.model.clock.steps > step:
                        self.sizes.append(self.loader.current_batch_size)
                        CLOCK.advance(per_step)
                if self.model.clock.steps >= until:
                    break


def usual(live):
    """The batch size of the last steps; a single one may be that of a trial."""
    return statistics.median(live.sizes[-50:])


def run_until(live, reached, **prices):
    """A choice takes as long as its measurements do."""
    for _ in range(5):
        live.run(100, **prices)
        if reached(usual(live)):
            return
    raise AssertionError([(live.sizes[-1], d.reason) for d in decisions(live)])


def decisions(live):
    return [event for event in live.events if isinstance(event, DecisionEvent)]


@pytest.mark.world_size(2)
@pytest.mark.timeout(300)
def test_a_price_per_step_raises_the_batch_and_a_price_per_sample_lowers_it():
    live = Live()
    run_until(live, lambda size: size >= 2.5 * REFERENCE, per_step=0.03)
    raised = usual(live)
    run_until(live, lambda size: size <= 0.6 * raised, per_sample=0.004)
    assert all(REFERENCE <= size <= MOST for size in live.sizes)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, live.sizes)
    assert everyone[0] == everyone[1]
    if replica() == 0:
        changes = [d for d in decisions(live) if d.batch_size != d.batch_size_before]
        assert {d.batch_size for d in changes} >= set(live.sizes) - {REFERENCE}
        for decision in decisions(live):
            assert decision.reason
            assert decision.candidates
            assert REFERENCE <= decision.batch_size <= MOST
    else:
        assert decisions(live) == []
    told = json.loads(json.dumps(resilin.hints(max_replicas=16)))
    assert told["version"] == 2
    assert told["placement"] == {"hosts": 1, "replicas": 2, "accelerators_per_replica": 1}
    assert told["batch"]["current"] == live.loader.current_batch_size
    assert told["speedup"]["replicas"] == [1, 2, 4, 8, 16]
    assert told["speedup"]["speedup"][0] == 1
    assert told["throughput"]["compute_start"] > 0


def test_a_single_replica_is_tuned_too():
    live = Live()
    run_until(live, lambda size: size >= 2.5 * REFERENCE, per_step=0.02)


def test_a_rule_that_needs_no_noise_still_has_it_measured_for_the_choice():
    live = Live(rule="linear")
    live.run(60, per_step=0.01)
    assert live.model.noise is not None
    assert live.loader.current_batch_size > REFERENCE


def test_what_was_learned_is_kept(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    live = Live()
    resilin.resume()
    live.run(100, per_step=0.01)
    size = live.loader.autoscaler.state_dict()["batch_size"]
    state = live.loader.autoscaler.state_dict()
    assert size > REFERENCE
    resilin.current_job().recovery.finish()
    resilin.reset_job()
    resilin.checkpoint_to(tmp_path, every=None)
    live = Live()
    assert resilin.resume().step == 100
    live.run(1, per_step=0.01)
    assert live.sizes == [size]
    assert live.loader.autoscaler.profile.observations()
    assert json.loads(json.dumps(state)) == state


def test_setting_a_size_ends_the_choosing():
    live = Live()
    live.run(5)
    live.loader.set_batch_size(24)
    live.run(5)
    assert live.loader.current_batch_size == 24
    assert live.loader.autoscaler is None
    # From now on the batch stays: that is what a scheduler has to know.
    told = resilin.hints()["batch"]
    assert (told["current"], told["fixed"], told["max_batch_size"]) == (24, True, 24)


def test_the_nearest_allowed_size():
    bounds = BatchBounds(64, (8, 16), gradient_accumulation=False)
    assert bounds.nearest(100, 2) == 32
    assert bounds.nearest(1, 2) == 16
    assert bounds.nearest(100, 8) == 64
    assert BatchBounds(64).nearest(100, 8) == 64
    with pytest.raises(PlanError, match="at most 8 replicas"):
        bounds.nearest(10, 9)


# Memory --------------------------------------------------------------------------------------


def test_the_micro_batch_grows_to_what_fits():
    # What a linear layer keeps for backward: its input, 40 bytes a sample, and the weight.
    live = Live(bounds=None, max_local_bsz="auto", memory_budget=4000)
    live.loader.set_batch_size(MOST)
    sizes = []
    forward = live.net.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    live.run(10)
    forward.remove()
    assert sizes[0] == 2
    assert all(later <= 2 * max(sizes[:i]) for i, later in enumerate(sizes) if i)
    largest = max(sizes)
    assert 0.5 * 4000 <= 40 * largest <= 4000
    assert live.model.clock.samples == 10 * MOST


def test_the_choice_respects_what_fits():
    live = Live(bounds=(1, 200), max_local_bsz="auto", memory_budget=1000)
    live.run(120, per_step=0.01)
    assert live.loader.autoscaler.bounds.local_bsz_bounds[1] <= 25
    assert all(c.local_bsz <= 25 for d in decisions(live)[3:] for c in d.candidates)


def test_auto_needs_something_to_go_by():
    with pytest.raises(ValueError, match="needs memory_budget="):
        Live(bounds=None, max_local_bsz="auto")
    resilin.reset_job()
    with pytest.raises(ValueError, match=r"memory_budget \(100\) is for max_local_bsz='auto'"):
        Live(bounds=None, max_local_bsz=8, memory_budget=100)


def test_room_follows_a_straight_line():
    limit = LocalLimit(1000, start=4)
    assert limit.limit == 4
    limit.measured(4, 300)
    assert limit.limit == 8
    limit.measured(8, 400)
    # 200 bytes stay, 25 a sample.
    assert limit.limit == 16
    limit.measured(16, 600)
    assert limit.limit == 32
    limit.measured(32, 1000)
    assert limit.limit == 32
    assert limit.failed(32) == 16
    assert limit.failed(1) == 1


class Allocator(torch.nn.Module):
    """A model that runs out of memory above some size, in forward or in backward."""

    def __init__(self, most, where):
        super().__init__()
        self.net = torch.nn.Linear(10, 4)
        self.most, self.where = most, where

    def forward(self, x):
        def check(grad):
            if len(x) > self.most:
                raise torch.OutOfMemoryError(f"backward of {len(x)} samples")
            return grad

        if self.where == "forward" and len(x) > self.most:
            raise torch.OutOfMemoryError(f"forward of {len(x)} samples")
        out = self.net(x)
        if self.where == "backward":
            out.register_hook(check)
        return out


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_running_out_of_memory_repeats_the_step_in_smaller_pieces(where):
    def train(most):
        resilin.reset_job()
        live = Live(bounds=None)
        live.net = Allocator(most, where)
        torch.manual_seed(1)
        torch.nn.init.normal_(live.net.net.weight)
        live.model.release()
        live.optimizer = torch.optim.SGD(live.net.parameters(), lr=0.01)
        live.model = resilin.AdaptiveDataParallel(live.net, live.optimizer, rule="constant")
        live.run(20)
        return live

    plain, tight = train(1000), train(5)
    faults = [event for event in tight.events if isinstance(event, FaultEvent)]
    assert [fault.kind for fault in faults] == ["out_of_memory", "out_of_memory"]
    assert f"{where} of 16 samples" in faults[0].detail
    assert "at most 8" in faults[0].detail
    assert "at most 4" in faults[1].detail
    # The global batch and the samples are the same, and so is what was learned.
    assert tight.model.clock == plain.model.clock
    torch.testing.assert_close(tight.net.net.weight, plain.net.net.weight, rtol=1e-4, atol=1e-6)


def test_an_error_that_smaller_pieces_cannot_mend_goes_on():
    live = Live(bounds=None)
    with pytest.raises(torch.OutOfMemoryError, match="mine"), live.loader.retry_smaller():
        raise torch.OutOfMemoryError("mine")
    with pytest.raises(ZeroDivisionError), live.loader.retry_smaller():
        raise ZeroDivisionError


@pytest.mark.world_size(2)
@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_one_replica_short_of_memory_does_not_disturb_the_others(where, good_steps, monkeypatch):
    live = Live(bounds=None)
    live.model.release()
    live.net = Allocator(100, where)
    live.optimizer = torch.optim.SGD(live.net.parameters(), lr=0.01)
    live.model = resilin.AdaptiveDataParallel(live.net, live.optimizer, rule="constant")
    entropy = F.cross_entropy

    def loss(out, y):
        if where == "loss" and len(out) > live.net.most:
            raise torch.OutOfMemoryError(f"loss of {len(out)} samples")
        return entropy(out, y)

    monkeypatch.setattr(F, "cross_entropy", loss)
    live.run(good_steps)
    live.net.most = 3 if replica() == 1 else 100
    live.run(10 - good_steps)
    faults = [event for event in live.events if isinstance(event, FaultEvent)]
    assert len(faults) == 2 * replica()
    weights = [torch.empty(4, 10), torch.empty(4, 10)]
    torch.distributed.all_gather(weights, live.net.net.weight.detach())
    assert torch.equal(*weights)
    assert live.model.clock.samples == 10 * REFERENCE


def test_the_wait_for_the_reduction_is_timed():
    timer = SyncTimer("cpu")
    assert timer.seconds() is None
    timer.reduced()
    assert timer.seconds() is None
    timer.computed()
    CLOCK.advance(0.25)
    timer.reduced()
    assert timer.seconds() == pytest.approx(0.25 + CLOCK.TICK)
    timer.computed()
    timer.dropped()
    CLOCK.advance(1.0)
    timer.reduced()
    assert timer.seconds() == pytest.approx(0.25 + CLOCK.TICK)
