"""Sums that stay on the device of their tensors until they are read."""

import re
from types import SimpleNamespace

import pytest
import torch

import resilin
from resilin.engine import devices
from tests.replicas import replica
from tests.training.recovery_job import Job

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class Queue(devices.Device):
    """The CPU as a device that queues: what is on it is not read on the way."""

    kind = "cpu"
    queues = True


@pytest.fixture
def queue(monkeypatch):
    kind = Queue()
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    return kind


def terms(num=60):
    """Numbers and tensors of all types, of which the order of adding shows in the last bits."""
    generator = torch.Generator().manual_seed(3)
    for i in range(num):
        value = 1e3 * torch.randn((), dtype=torch.float64, generator=generator) ** 3
        dtype = TYPES[i % len(TYPES)]
        limits = None if dtype.is_floating_point or dtype == torch.bool else torch.iinfo(dtype)
        if limits is not None:
            value = value.clamp(limits.min, limits.max)
        yield value.item() if i % 5 == 4 else value.to(dtype).reshape((1,) * (i % 3))


def fill(stats, move=lambda term: term):
    for i, term in enumerate(terms()):
        if isinstance(term, torch.Tensor):
            term = move(term)
        if i % 2:
            stats["mixed"] += term
        else:
            stats["mixed"] -= term
        stats.update({"all": term}, every=1)
        stats.subtract({"less": term})
        if i in (7, 9):
            stats["set"] = term


def result(stats):
    with stats.synchronized():
        return {key: value.hex() for key, value in stats.items()}


def test_the_sums_have_the_same_bits_as_those_of_the_host(monkeypatch):
    plain = resilin.Accumulator()
    fill(plain)
    expected = result(plain)
    monkeypatch.setattr(devices, "_KINDS", (Queue(),))
    stats = resilin.Accumulator()
    fill(stats)
    assert isinstance(stats._sums["mixed"], torch.Tensor)
    assert result(stats) == expected
    # Read once: from here on they are numbers, until there is something new.
    assert {type(value) for value in stats._sums.values()} == {float}
    fill(stats)
    fill(plain)
    assert result(stats) == result(plain)


@pytest.mark.world_size(1)
def test_no_host_read_in_adding_and_one_wait_in_synchronized(counted):
    resilin.reset_job()
    plain = resilin.Accumulator()
    fill(plain)
    moved = [
        term.pin_memory().to(counted.device, non_blocking=True)
        for term in terms()
        if isinstance(term, torch.Tensor)
    ]
    rest = iter(moved)
    stats = resilin.Accumulator()
    counted.set_lag(1)  # an event has not passed when it is asked for the first time
    counted.clear()
    fill(stats, move=lambda _: next(rest))
    begun = stats.begin_state_dict()
    assert counted.told("read", "wait") == []
    counted.clear()
    state = begun()
    assert [told.what for told in counted.told("read", "wait")] == ["wait"]
    assert {key: value.hex() for key, value in state["sums"].items()} == result(plain)
    counted.clear()
    assert result(stats) == result(plain)
    assert [told.what for told in counted.told("read", "wait")] == ["wait"]
    assert result(stats) == result(plain)
    assert [told.what for told in counted.told("read", "wait")] == ["wait"]


def test_a_state_that_was_begun_is_that_of_its_moment(queue):
    stats = resilin.Accumulator()
    loss = torch.ones((), dtype=torch.float64)
    stats["loss"] += loss
    stats["set"] = loss
    loss.zero_()  # The script may use its tensor again.
    begun = stats.begin_state_dict()
    stats["loss"] += torch.ones(())
    assert begun() == {"sums": {"loss": 1.0, "set": 1.0}}
    assert stats.state_dict() == {"sums": {"loss": 2.0, "set": 1.0}}
    # Taking it changes nothing.
    assert isinstance(stats._sums["loss"], torch.Tensor)
    del stats["set"]
    assert result(stats) == {"loss": (2.0).hex()}


def test_a_graph_is_not_kept(queue):
    weight = torch.ones(2, requires_grad=True)
    stats = resilin.Accumulator()
    stats["loss"] += (2 * weight).sum()
    stats["set"] = weight.sum()
    assert not any(value.requires_grad for value in stats._sums.values())


def test_sums_stay_with_the_job_that_they_were_made_in(monkeypatch):
    stats = resilin.Accumulator()
    resilin.reset_job()
    changed = []
    later = SimpleNamespace(sums_changed=lambda: changed.append(1), sums_read=changed.clear)
    monkeypatch.setattr(resilin.current_job(), "live", later)
    stats["loss"] += 1
    with stats.synchronized():
        assert stats["loss"] == 1
    assert changed == []


@pytest.mark.parametrize("term", [torch.ones(2), torch.ones(0), torch.tensor(1j)])
def test_what_is_no_number_is_refused_as_on_the_host(queue, term):
    stats = resilin.Accumulator()
    with pytest.raises((RuntimeError, ValueError)) as host:
        float(term)
    with pytest.raises(type(host.value), match=re.escape(str(host.value))):
        stats["a"] += term
    assert len(stats) == 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("same", [True, False], ids=["same keys", "other keys"])
def test_sums_over_replicas(monkeypatch, same):
    monkeypatch.setattr(devices, "_KINDS", (Queue(),))
    stats = resilin.Accumulator()
    for _ in range(3):
        stats["loss"] += torch.tensor(0.25 * (replica() + 1))
    stats["count" if same else f"count {replica()}"] += torch.tensor(5)
    with stats.synchronized():
        expected = {"count": 10.0} if same else {"count 0": 5.0, "count 1": 5.0}
        assert dict(stats) == {"loss": 2.25, **expected}


class Crash(Exception):
    """The process is gone."""


def train(fail_at=None):
    """Sums losses on the device over an epoch; returns them in bits."""
    resilin.reset_job()
    resilin.checkpoint_to(None, memory_every=1)
    job = Job()
    found = []
    for _ in resilin.remaining_epochs_until(2):
        stats = resilin.Accumulator()
        for x, y, _ in job.loader:
            loss = torch.nn.functional.cross_entropy(job.model(x), y)
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            stats["loss"] += loss
            stats["steps"] += 1
            if job.model.clock.steps == fail_at:
                raise Crash
        with stats.synchronized():
            found.append({key: value.hex() for key, value in stats.items()})
    return found


@pytest.mark.parametrize("fail_at", [3, 7, 10])
def test_sums_on_a_device_survive_a_restart(tmp_path, monkeypatch, queue, fail_at):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "one"))
    expected = train()
    assert len(expected) == 2
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "two"))
    with pytest.raises(Crash):
        train(fail_at)
    # The last step of the first life had no copy yet, and is repeated.
    assert train()[-1] == expected[-1]
