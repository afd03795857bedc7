"""The parts that are useful alone: accumulate, plan, Accumulator, epochs, the job."""

import pytest
import torch
from torch import nn

import resilin
from tests.replicas import replica, worlds


def make():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model, x):
    model(x).square().mean().backward()


def test_accumulate_averages_exactly():
    x = torch.randn(12, 3, dtype=torch.float64)
    model, optimizer = make()
    assert resilin.accumulate(optimizer, 3) is optimizer
    other, plain = make()
    for _ in range(2):
        for part in x.split(4):
            backward(model, part)
            optimizer.step()
            optimizer.zero_grad()
        backward(other, x)
        plain.step()
        plain.zero_grad()
        assert torch.allclose(model.weight, other.weight, rtol=1e-12)


def test_accumulate_changes_between_steps_and_comes_off():
    model, optimizer = make()
    x = torch.ones(1, 3, dtype=torch.float64)
    resilin.accumulate(optimizer, 2)
    backward(model, x)
    optimizer.step()
    with pytest.raises(ValueError, match="1 of 2 micro-batches are waiting"):
        resilin.accumulate(optimizer, 4)
    backward(model, x)
    optimizer.step()
    resilin.accumulate(optimizer, 4)
    resilin.accumulate(optimizer, 1)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    backward(model, x)
    optimizer.step()
    assert (model.weight != before).all()
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        resilin.accumulate(optimizer, 0)
    resilin.AdaptiveDataParallel(model, optimizer)
    with pytest.raises(ValueError, match="belongs to an AdaptiveDataParallel"):
        resilin.accumulate(optimizer, 2)


@pytest.mark.parametrize(
    ("world", "steps"),
    [pytest.param(n, s, marks=pytest.mark.world_size(n)) for n, s in ((1, 4), (2, 2), (4, 1))],
)
def test_the_plan_of_the_present_replicas(world, steps):
    plan = resilin.plan(256, max_local_bsz=64)
    assert (plan.steps, plan.batch_size) == (steps, 64)
    assert (plan.global_batch_size, plan.gpus, plan.master) == (256, world, replica() == 0)


@pytest.mark.parametrize("world", worlds(1, 2, 3))
def test_accumulator(world):
    stats = resilin.Accumulator()
    stats["loss"] += 0.5 * (replica() + 1)
    stats["loss"] += torch.tensor(1.0, requires_grad=True)
    stats["count"] -= 2
    stats.update({"count": 5}, other=1)
    stats.subtract({"other": 3})
    with stats.synchronized():
        assert stats["count"] == 3 * world
        assert stats["other"] == -2 * world
        assert stats["loss"] == 0.5 * sum(range(1, world + 1)) + world
        assert dict(stats) == {"loss": stats["loss"], "count": 3.0 * world, "other": -2.0 * world}
        with pytest.raises(RuntimeError, match="cannot be changed within"):
            stats["count"] += 1
        with pytest.raises(KeyError):
            stats["nothing"]
    # It goes on summing after it was read.
    stats["count"] += 1
    with stats.synchronized():
        assert stats["count"] == 4 * world


@pytest.mark.world_size(3)
def test_replicas_may_have_different_keys():
    stats = resilin.Accumulator()
    stats[f"from {replica()}"] += 1
    stats["all"] += replica()
    with stats.synchronized():
        assert dict(stats) == {"from 0": 1.0, "from 1": 1.0, "from 2": 1.0, "all": 3.0}


@pytest.mark.world_size(2)
def test_sums_that_were_read_can_be_cleared_at_once():
    stats = resilin.Accumulator()
    stats[f"from {replica()}"] += 1
    stats["all"] += 1
    with stats.synchronized():
        assert len(stats) == 3
        stats.clear()
        assert len(stats) == 0
    stats["all"] += 1
    with stats.synchronized():
        assert dict(stats) == {"all": 2.0}


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s["a"] / 2,
        lambda s: s["a"] + 1,
        lambda s: 1 - s["a"],
        lambda s: s["a"] > 0,
        lambda s: s["a"] == 1,
        lambda s: float(s["a"]),
        lambda s: f"{s['a']}",
        lambda s: print(s["a"]),
        lambda s: bool(s["a"]),
    ],
)
def test_reading_outside_synchronized_says_why(read):
    stats = resilin.Accumulator()
    stats["a"] += 1
    with pytest.raises(RuntimeError, match="part of a sum: other replicas have the rest"):
        read(stats)
    assert repr(stats) == "Accumulator(['a'], not synchronized)"


def test_accumulator_state():
    stats, other = resilin.Accumulator(), resilin.Accumulator()
    stats["a"] = 3
    other.load_state_dict(stats.state_dict())
    with other.synchronized():
        assert dict(other) == {"a": 3.0}
    del other["a"]
    assert len(other) == 0


def test_remaining_epochs():
    assert list(resilin.remaining_epochs_until(3)) == [0, 1, 2]
    assert list(resilin.remaining_epochs_until(3)) == []
    assert list(resilin.remaining_epochs_until(5)) == [3, 4]
    resilin.reset_job()
    for epoch in resilin.remaining_epochs_until(3):
        if epoch == 1:
            break
    # An epoch that was not finished is the first of those that remain.
    assert list(resilin.remaining_epochs_until(3)) == [1, 2]
