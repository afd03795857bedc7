"""Buffers of sharded models: those of the first replica count, in each step and after a restart."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import TensorDataset

import resilin
from resilin.engine.collectives import wait_for
from resilin.training.gradient.sharding import find_sharding
from resilin.training.gradient.shared_buffers import SharedBuffers
from resilin.training.state.memory_scan import Scan

SAMPLES, STEPS = 36, 8


class Lost(Exception):
    """All processes are gone."""


class Net(nn.Module):
    """Statistics of the samples, numbers of them, and a buffer that is another one each time."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.head(self.body(x - 0.1 * self.mean))


def numbers(net):
    """All parameters, and all buffers of this process."""
    with torch.no_grad():
        found = {
            name: p.full_tensor() if isinstance(p, DTensor) else p.clone()
            for name, p in net.named_parameters()
        }
    return found, {name: each.clone() for name, each in net.named_buffers()}


def run(kind, lost=None, begun=None):
    """Trains for some steps; returns parameters, and the buffers after each step.

    Args:
        kind: `fsdp`, or anything else for a model that is whole.
        lost: The step after which all processes are lost.
        begun: Gets the buffers that the first step begins with.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    torch.manual_seed(0)
    net = Net().double()
    if kind == "fsdp":
        fully_shard(net.body)
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, stats_every=1000)
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(x, y), batch_size=9, shuffle=True, max_local_bsz=3
    )
    resilin.checkpoint_to(None, memory_every=1)
    buffers = {}
    for _ in resilin.remaining_epochs_until(2):
        for inputs, targets in loader:
            if begun is not None and not begun:
                begun.update(numbers(net)[1])
            F.cross_entropy(model(inputs), targets).backward()
            steps = model.clock.steps
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > steps:
                buffers[model.clock.steps] = numbers(net)[1]
                if model.clock.steps == lost:
                    raise Lost
    return numbers(net)[0], buffers


def same(found, expected, limit=0.0):
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        mine = found[name].double()
        assert (mine - right).norm() <= limit * right.double().norm(), name


def of_first(buffers):
    said = [buffers]
    dist.broadcast_object_list(said)
    return said[0]


@pytest.mark.world_size(2, init=False)
def test_the_first_replica_counts_as_under_ddp_and_after_a_restart(shared_path, monkeypatch):
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(shared_path / "store"), 2)
    monkeypatch.setattr(Scan, "writers", lambda self: set())
    found = {}
    for name in ("ddp", "fsdp", "lost", "again"):
        memory = shared_path / ("lost" if name == "again" else name)
        monkeypatch.setenv("RESILIN_MEMORY_DIR", str(memory))
        place = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=place, rank=rank, world_size=2)
        if name == "lost":
            with pytest.raises(Lost):
                run("fsdp", lost=5)
        else:
            found[name] = run("ddp" if name == "ddp" else "fsdp")
        resilin.reset_job()
        if name == "lost":
            dist.barrier()
            if rank == 0:
                shutil.copytree(memory, shared_path / "smaller")
            dist.barrier()
        if name == "fsdp":
            parameters, buffers = found["ddp"]
            assert set(buffers) == set(range(1, STEPS + 1))
            same(found["fsdp"][0], parameters, 1e-12)
            right = of_first(buffers)
            assert any(not torch.equal(right[5][each], buffers[5][each]) for each in right[5]) == (
                rank == 1
            )
            for step, each in right.items():
                same(found["fsdp"][1][step], each, 1e-12)
        if name == "again":
            # From the statistics of the first process, whoever had written them.
            same(found["again"][0], found["fsdp"][0])
            for step in range(5, STEPS + 1):
                same(found["again"][1][step], found["fsdp"][1][step])
            check_all_types(monkeypatch)
        dist.destroy_process_group()
    if rank == 0:
        # One process begins with the same. Step 5 was lost with the loop that had just made it.
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path / "smaller"))
        begun = {}
        with pytest.raises(Lost):
            run("none", lost=6, begun=begun)
        same(begun, found["fsdp"][1][4])


def check_all_types(monkeypatch):
    """Types of all sizes are sent together; what is split has nothing in common."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    net = nn.Linear(4, 4)
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    plain = {
        "a_bool": mine > 3,
        "a_half": mine.half(),
        "a_long": mine.long(),
        "a_complex": mine.to(torch.complex128),
        "turned": mine.t(),
        "none": mine[:0],
    }
    for name, buffer in plain.items():
        net.register_buffer(name, buffer.clone())
    assert not net.turned.is_contiguous()
    net.register_buffer("split", DTensor.from_local(mine.clone(), mesh, [Shard(0)]))
    net.register_buffer("copied", DTensor.from_local(mine.clone(), mesh, [Replicate()]))
    fully_shard(net)
    sharding = find_sharding(net, None, resilin.current_job().engine.membership)
    sent = []
    real = dist.broadcast

    def broadcast(*arguments, **options):
        sent.append(options["group"])
        return real(*arguments, **options)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    SharedBuffers(net, sharding, wait_for).share(dist.group.WORLD)
    # One broadcast per group, and the mesh may have the same group as all processes.
    assert len(sent) == len(set(sent)) <= 2
    first = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(net.a_bool, first > 3)
    assert torch.equal(net.a_half, first.half())
    assert torch.equal(net.a_long, first.long())
    assert torch.equal(net.a_complex, first.to(torch.complex128))
    assert torch.equal(net.turned, first.t())
    assert torch.equal(net.split.to_local(), mine)
    assert torch.equal(net.copied.to_local(), first)
    bare = nn.Linear(4, 4)
    fully_shard(bare)
    sharding = find_sharding(bare, None, resilin.current_job().engine.membership)
    sent.clear()
    SharedBuffers(bare, sharding, wait_for).share(dist.group.WORLD)
    assert sent == []
