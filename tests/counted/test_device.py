"""The counting device counts what it should, and computes what the CPU computes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.counted import group


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


READS = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "bool": lambda t: bool(t.any()),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "cpu": lambda t: t.cpu(),
    "copy": lambda t: torch.empty(3).copy_(t),
    "pageable": lambda t: torch.empty(3).copy_(t, non_blocking=True),
    "blocking": lambda t: torch.empty(3, pin_memory=True).copy_(t),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 1],
    "equal": lambda t: torch.equal(t, t),
    "format": lambda t: f"{t[0]:.1f}",
}


@pytest.mark.world_size(1)
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_is_counted_with_its_line(counted, read):
    t = pinned(1.0, 2.0, 3.0).to(counted.device, non_blocking=True)
    (t + 1).mul_(2).sum()
    assert counted.told() == []
    read(t)
    told = counted.told("read")
    assert told
    assert any("test_device.py" in line and "lambda t" in line for line in told[0].stack)
    assert {each.what for each in counted.told()} == {"read"}


@pytest.mark.world_size(1)
def test_a_copy_from_pageable_memory_is_counted_apart(counted):
    torch.tensor([1.0, 2.0], device=counted.device)
    torch.tensor(1.0).to(counted.device)
    pinned(1.0).to(counted.device)
    assert [told.what for told in counted.told()] == ["upload"] * 3
    assert "test_device.py" in counted.told()[0].place
    counted.clear()
    pinned(1.0).to(counted.device, non_blocking=True)
    torch.full((2,), 3.0, device=counted.device)[0] = 2.0
    torch.arange(4, device=counted.device) * 2.5
    assert counted.told() == []


@pytest.mark.world_size(1)
def test_a_copy_to_pinned_memory_is_no_read_and_is_there_when_its_event_has_passed(counted):
    source = pinned(1.0, 2.0).to(counted.device, non_blocking=True)
    target = torch.zeros(2, pin_memory=True)
    assert target.is_pinned()
    assert not torch.zeros(2).is_pinned()
    target.copy_(source, non_blocking=True)
    event = torch.Event(counted.device)
    event.record()
    source.fill_(9.0)  # in the queue behind the copy
    assert all(math.isnan(value) for value in target.tolist())
    counted.set_lag(1)
    assert not event.query()
    assert all(math.isnan(value) for value in target.tolist())
    assert event.query()
    assert target.tolist() == [1.0, 2.0]
    assert [told.what for told in counted.told()] == ["fetch", "query", "query"]


@pytest.mark.world_size(1)
def test_a_wait_is_counted_with_the_age_of_its_event(counted):
    target = torch.zeros(1, pin_memory=True)
    target.copy_(torch.ones(1, device=counted.device), non_blocking=True)
    event = torch.Event(counted.device)
    event.record()
    counted.tick()
    event.synchronize()
    assert target.item() == 1.0
    torch.accelerator.synchronize()
    assert [(told.what, told.age) for told in counted.told("wait")] == [("wait", 1), ("wait", 0)]


@pytest.mark.world_size(1)
def test_tensors_of_the_host_do_not_mix_with_its_own(counted):
    t = torch.ones(2, device=counted.device)
    assert (t * torch.tensor(3.0)).device == counted.device  # a number is passed to the kernel
    with pytest.raises(RuntimeError, match="on the same device"):
        t + torch.ones(2)


@pytest.mark.world_size(1)
def test_what_is_hidden_is_not_counted(counted):
    t = torch.ones(2, device=counted.device)
    with counted.unseen():
        assert t.tolist() == [1.0, 1.0]
    assert counted.told() == []


def make(device: torch.device, optimizer: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    model = model.double().to(device)
    model = copy.deepcopy(model)
    kwargs = {"SGD": {"momentum": 0.9}}.get(optimizer, {})
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **kwargs)


def train(model: nn.Module, stepper: torch.optim.Optimizer, batches) -> list[torch.Tensor]:
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
    return [*model.parameters(), *(p.grad for p in model.parameters())]


def assert_close(mine: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The same numbers, but for the order of sums: torch has other kernels for lists of tensors."""
    for ours, theirs in zip(mine, expected, strict=True):
        assert ours.device.type == "counted"
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_has_the_numbers_of_the_cpu_and_reads_nothing(counted, optimizer):
    torch.manual_seed(1)
    batches = [(torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))) for _ in range(5)]
    ours = [[t.pin_memory().to(counted.device, non_blocking=True) for t in b] for b in batches]
    with counted.unseen():
        model, stepper = make(counted.device, optimizer)
    trained = train(model, stepper, ours)
    assert counted.told() == []
    expected = train(*make(torch.device("cpu"), optimizer), batches)
    assert_close(trained, expected)


@pytest.mark.world_size(2, init=False)
def test_replicas_train_with_ddp_as_on_the_cpu(counted):
    group.join()
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    batches = [(torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))) for _ in range(5)]
    ours = [[t.pin_memory().to(counted.device, non_blocking=True) for t in b] for b in batches]
    with counted.unseen():
        model, _ = make(counted.device, "SGD")
    replicated = nn.parallel.DistributedDataParallel(model)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    train(replicated, stepper, ours[:2])  # DDP rebuilds its buckets, and reads for it, once
    counted.clear()
    trained = train(replicated, stepper, ours[2:])
    assert counted.told("read") == []
    gloo = dist.new_group(backend="gloo")
    plain = nn.parallel.DistributedDataParallel(
        make(torch.device("cpu"), "SGD")[0], process_group=gloo
    )
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)
    assert_close(trained, expected)


@pytest.mark.world_size(2, init=False)
def test_a_reduction_is_there_when_it_was_waited_for_and_takes_no_tensor_of_the_host(counted):
    group.join()
    tensor = torch.ones(2, device=counted.device)
    work = dist.all_reduce(tensor, async_op=True)
    assert all(math.isnan(value) for value in tensor.tolist())
    work.wait()
    assert tensor.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="no backend for a tensor on cpu"):
        dist.all_reduce(torch.ones(1))
