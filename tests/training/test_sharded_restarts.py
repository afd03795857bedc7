"""Jobs with sharded models, lost in mid-epoch, that go on with other processes and meshes."""

import gc
import os
import shutil
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

import resilin
from resilin.training.state.buddy_copies import BuddyCopies
from resilin.training.state.exchange import Swaps
from resilin.training.state.memory_scan import Scan

SAMPLES, EPOCHS = 50, 3
CHAINS = [
    # How the model is sharded, over how many processes, and the step at which the job is lost.
    [("fsdp", (4,), 3), ("fsdp", (2,), 7), ("fsdp", (3,), 8), ("hsdp", (2, 2), None)],
    [("hsdp", (2, 2), 2), ("tp", (2, 2), 9), ("none", (1,), 12), ("fsdp", (3,), None)],
]


class Lost(Exception):
    """All processes are gone."""


def sharded(kind, sizes, seed):
    """A model with uneven and empty shards, on a mesh of all processes."""
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh())
    net = nn.Sequential(block, nn.Linear(7, 3)).double()
    if kind == "none":
        return net
    names = {"fsdp": ("data",), "hsdp": ("copies", "data"), "tp": ("data", "tensor")}[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if kind == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        mesh = mesh["data"]
    fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def run(kind, sizes, lost, record, checkpoints, seed=0, holders=1):
    """One life of the job; what it trains on is written down by step.

    Returns:
        Its parameters at the end; None if it was lost before.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    net = sharded(kind, sizes, seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer, stats_every=2)
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(x, y, torch.arange(SAMPLES)), batch_size=8, shuffle=True, max_local_bsz=3
    )
    memory_every = None if checkpoints else 1
    resilin.checkpoint_to(checkpoints, every=1, memory_every=memory_every, memory_holders=holders)
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        used = []
        for inputs, targets, numbers in loader:
            F.cross_entropy(model(inputs), targets).backward()
            model.clip_grad_norm_(1.0)
            steps = model.clock.steps
            optimizer.step()
            optimizer.zero_grad()
            used += numbers.tolist()[: loader.current_samples]
            if model.clock.steps > steps:
                record[steps] = epoch, everyone(used)
                used = []
                if model.clock.steps == lost:
                    raise Lost
    with torch.no_grad():
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]


def everyone(used):
    """The samples of one step on all replicas, sorted; those of one replica count once."""
    membership = resilin.current_job().engine.membership
    if membership.num_processes == 1:
        return sorted(used)
    parts = [None] * membership.num_processes
    dist.all_gather_object(parts, (membership.replica, used))
    by_replica = dict(parts)
    assert all(by_replica[replica] == each for replica, each in parts)
    return sorted(sample for each in by_replica.values() for sample in each)


def live(number, chain, store, shared_path, rank, kept):
    """All lives of one job. Returns its record and its parameters, on processes of the last one."""
    record, found = {}, None
    for life, (kind, sizes, lost) in enumerate(chain):
        num = torch.Size(sizes).numel()
        if rank < num:
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(num)
            if num > 1:
                place = dist.PrefixStore(f"{number}/{kept}/{life}", store)
                dist.init_process_group("gloo", store=place, rank=rank, world_size=num)
            try:
                folder = shared_path / f"saved{number}" if kept == "checkpoints" else None
                # Each has other parameters, until it has restored those of the job.
                found = run(kind, sizes, lost, record, folder, seed=life)
            except Lost:
                assert lost is not None
            resilin.reset_job()
            if num > 1:
                dist.destroy_process_group()
        # The next life begins after this one, on all ranks.
        key = f"over/{number}/{kept}/{life}"
        if store.add(key, 1) == 4:
            store.set(f"{key}/all", "1")
        store.wait([f"{key}/all"])
    return record, found


@pytest.mark.world_size(4, init=False)
def test_a_job_goes_on_with_other_processes_and_meshes(shared_path, monkeypatch):
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(shared_path / "store"), 4)
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path / f"alone{rank}"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole = {}
    expected = run("none", (1,), None, whole, None)
    resilin.reset_job()
    # Processes that are lost live on here, as those of a later life.
    monkeypatch.setattr(Scan, "writers", lambda self: set())
    for kept in ("memory", "checkpoints"):
        for number, chain in enumerate(CHAINS):
            monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path / f"{kept}{number}"))
            record, found = live(number, chain, store, shared_path, rank, kept)
            if found is None:
                continue
            for mine, right in zip(found, expected, strict=True):
                assert (mine - right).norm() <= 1e-11 * right.norm()
            if rank == 0:
                assert record == whole


# Buddies ---------------------------------------------------------------------------------------

# Per life: the host of each of its processes, and the step at which it is lost.
BUDDIES = [("AABC", 3), ("BC", 6), ("B", None)]


class Killed(Exception):
    """A process is gone while it sends."""


def send_only_the_sizes(monkeypatch, step):
    """Has this process killed when it has begun to send its copy of a step to its buddy."""
    real, exchange = Swaps.pass_on, BuddyCopies.exchange
    begun = []

    def die(swaps, outgoing, *rest):
        if not begun:
            return real(swaps, outgoing, *rest)
        [(target, tensors)] = outgoing.items()
        sizes = torch.tensor([tensor.numel() for tensor in tensors])
        assert sizes[-1] > 0
        dist.send(sizes, target, group=swaps._group, tag=0)
        raise Killed

    def begin(copies, version, outgoing):
        begun.extend([version] if version.step == step else [])
        return exchange(copies, version, outgoing)

    monkeypatch.setattr(Swaps, "pass_on", die)
    monkeypatch.setattr(BuddyCopies, "exchange", begin)


def one_life(hosts, lost, me, store, shared_path, record, number):
    """One life of a job, as one of its processes. Returns its parameters if it comes to its end."""
    host, num = hosts[me], len(hosts)
    os.environ["RESILIN_MEMORY_DIR"] = str(shared_path / f"host{host}")
    os.environ["GROUP_RANK"] = str(sorted(set(hosts)).index(host))
    os.environ["GROUP_WORLD_SIZE"] = str(len(set(hosts)))
    os.environ["LOCAL_RANK"] = str(hosts[:me].count(host))
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts.count(host))
    os.environ["WORLD_SIZE"] = str(num)
    if num > 1:
        place = dist.PrefixStore(f"buddies/{number}", store)
        dist.init_process_group("gloo", store=place, rank=me, world_size=num)
    kind = "fsdp" if num > 1 else "none"
    found = None
    try:
        found = run(kind, (num,), lost, record, None, seed=number, holders=2)
    except (Lost, Killed) as error:
        assert lost is not None
        # What it holds, such as groups, goes with it.
        traceback.clear_frames(error.__traceback__)
    except RuntimeError as error:
        # The other process was killed: its connections are closed.
        if hosts != "BC" or "onnection" not in str(error):
            raise
    resumed = resilin.current_job().recovery.resumed
    resilin.reset_job()
    if num > 1:
        dist.destroy_process_group()
    # As the end of a process does, this closes its connections.
    gc.collect()
    return resumed, found


@pytest.mark.nightly(part="jobs")
@pytest.mark.world_size(4, init=False)
def test_a_lost_host_costs_no_checkpoint(shared_path, monkeypatch):
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(shared_path / "store"), 4)
    for name in ("RESILIN_MEMORY_DIR", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(shared_path / f"alone{rank}"))
    whole, record, found = {}, {}, None
    expected = run("none", (1,), None, whole, None)
    resilin.reset_job()
    monkeypatch.setattr(Scan, "writers", lambda self: set())
    begun_at = []
    for number, (hosts, lost) in enumerate(BUDDIES):
        # Those whose host is lost are the first ranks, or the last.
        me = rank - {"AABC": 0, "BC": 2, "B": 2}[hosts]
        if 0 <= me < len(hosts):
            if hosts == "BC" and hosts[me] == "C":
                send_only_the_sizes(monkeypatch, lost - 1)
            resumed, found = one_life(hosts, lost, me, store, shared_path, record, number)
            begun_at.append(None if resumed is None else resumed.step)
        if store.add(f"over/{number}", 1) == 4:
            # The last process to come has the machine to itself.
            gone = {"AABC": "A", "BC": "C", "B": ""}[hosts]
            if gone:
                shutil.rmtree(shared_path / f"host{gone}")
            store.set(f"over/{number}/all", "1")
        store.wait([f"over/{number}/all"])
    if rank == 2:
        # Process B is killed at step 6; that of step 5 was being sent, so 4 is complete.
        assert begun_at == [None, 2, 4]
        assert record == whole
        for mine, right in zip(found, expected, strict=True):
            assert (mine - right).norm() <= 1e-11 * right.norm()
