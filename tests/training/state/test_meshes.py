"""State of models that torch has split: taken in chunks, and restored on any other mesh."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as SplitBy
from torch.distributed.tensor.placement_types import _StridedShard

from resilin.core.mesh_spread import Spread
from resilin.core.placement import Stored
from resilin.engine.base import Engine
from resilin.training.state import memory_pieces
from resilin.training.state.checkpoint import Checkpoints, CorruptCheckpoint
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.memory import Place as HostPlace
from resilin.training.state.meshes import spread_of
from resilin.training.state.registry import Registry
from resilin.training.state.restore import newest_state
from resilin.training.state.shards import Shard, Sharded, own_pieces
from resilin.training.state.snapshot import Version
from tests.training.state.checkpoint.snapshots import flip
from tests.training.state.meshed import (
    Model,
    Place,
    check,
    full_tensors,
    local_bytes,
    optimizer_of,
    registry_of,
    train,
)

CHAINS = [
    [("fsdp", 4), ("fsdp", 2), ("fsdp", 3), ("hsdp", 2, 2), ("fsdp", 2)],
    [("hsdp", 2, 2), ("dptp", 2, 2), ("fsdp", 3), ("none", 1), ("fsdp", 2)],
]


class Counted:
    """A file that counts the bytes that are read of it."""

    def __init__(self, stream, counts):
        self._stream, self._counts = stream, counts

    def read(self, *size):
        data = self._stream.read(*size)
        self._counts.append(len(data))
        return data

    def seek(self, offset):
        return self._stream.seek(offset)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()


def count_reads(checkpoints, monkeypatch):
    counts, storage = [], checkpoints._storage
    real = storage.open
    monkeypatch.setattr(storage, "open", lambda *name: Counted(real(*name), counts), raising=False)
    return counts


def staged_bytes(snapshot):
    return sum(tensor.nbytes for _, tensor in own_pieces(snapshot.tensors))


@pytest.mark.world_size(4)
def test_checkpoints_are_restored_bitwise_on_every_other_mesh(shared_path, monkeypatch):
    for number, chain in enumerate(CHAINS):
        # Groups and meshes are made by all ranks, members or not.
        places = [Place(*each) for each in chain]
        expected = before = None
        for step, place in enumerate(places):
            directory = shared_path / f"chain{number}"
            if place.is_member:
                model = place.model(seed=10 * number + step)
                optimizer = optimizer_of(model)
                registry = registry_of(model, optimizer)
                checkpoints = Checkpoints(directory)
                group = place.group if place.num > 1 else None
                if expected is None:
                    train(model, optimizer)
                    expected = full_tensors(model, optimizer)
                else:
                    counts = count_reads(checkpoints, monkeypatch)
                    found = checkpoints.newest(group, wanted=registry.wanted)
                    registry.restore(found, first_replica=True)
                    check(model, optimizer, expected)
                    # A checkpoint of whole tensors has one file, and one process reads it.
                    if before != "none":
                        assert sum(counts) <= 1.5 * local_bytes(model, optimizer, shared=False)
                snapshot = registry.take(Version(0, step))
                check_holders(snapshot, place)
                assert staged_bytes(snapshot) <= 1.1 * local_bytes(model, optimizer)
                commit = checkpoints.save(snapshot, group)
                if place.kind == "none":
                    assert "crc32" not in str(_pieces(commit))
                elif dist.get_rank() == 0:
                    check_plain_load(commit, expected)
            before = place.kind
            said = [expected if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(said)
            expected = said[0]
        if place.is_member:
            # What was restored trains on.
            train(model, optimizer, steps=1)
        dist.barrier()
    check_damage(commit, checkpoints, registry, place)


def check_holders(snapshot, place):
    """Copies along a mesh are known, also those of what tensor parallelism leaves alone."""
    numbers = {"fsdp": (1, 1), "hsdp": (2, 2), "dptp": (1, 2), "none": (0, 0)}[place.kind]
    for name, number in zip(("up", "norm"), numbers, strict=True):
        held = snapshot.tensors[f"model.blocks.0.{name}.weight"]
        assert len(held.holders if isinstance(held, Sharded) else ()) == number


def _pieces(commit):
    return json.loads((Path(commit.path) / "COMMIT.json").read_bytes())["commit"]["tensors"]


def check_plain_load(commit, expected):
    """torch alone reads it, into whole tensors."""
    target = {
        f"model.{name}": torch.zeros_like(tensor)
        for name, tensor in expected.items()
        if not name[0].isdigit()
    }
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(target, checkpoint_id=commit.path, no_dist=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, expected[name.removeprefix("model.")]), name


def check_damage(commit, checkpoints, registry, place):
    """A flipped bit in the chunk of one process is found, and all processes refuse."""
    if not place.is_member:
        return
    if dist.get_rank() == 0:
        entry = commit.tensors["model.blocks.1.up.weight"][1]
        flip(Path(commit.path) / entry.file, entry.offset + entry.length // 2)
    dist.barrier(place.group)
    with pytest.raises(CorruptCheckpoint, match=r"blocks.1.up.weight at byte \d+: crc32"):
        checkpoints.load(commit, place.group, wanted=registry.wanted)


# Memory ----------------------------------------------------------------------------------------


class Job:
    """The part of a state that says how many replicas there were."""

    def state_dict(self):
        return {"replicas": 4}

    def load_state_dict(self, state):
        assert state == {"replicas": 4}


def on_host(shared_path, host, name="memory", **options):
    return MemoryCopies(shared_path / f"{name}-host{host}", **options)


def keep(memory, registry, step, rank, previous=None):
    """Keeps a copy as a process of one of two hosts with two processes each."""
    place = HostPlace(host=rank // 2, local_process=rank % 2, num_local_processes=2, process=rank)
    staged = memory.stage(registry.take(Version(0, step)), {}, place)
    memory.write(staged, previous=previous)
    return sum(
        tensor.nbytes
        for share in staged.shares
        for (_, placement), tensor in share.sources.items()
        if placement is not None
    )


@pytest.mark.world_size(4)
def test_memory_copies_are_complete_if_those_of_all_hosts_are(shared_path, monkeypatch, caplog):
    rank, engine = dist.get_rank(), Engine()
    fsdp, hsdp, dptp = Place("fsdp", 4), Place("hsdp", 2, 2), Place("dptp", 2, 2)
    model = fsdp.model(seed=1)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    expected = full_tensors(model, optimizer)
    registry = registry_of(model, optimizer)
    registry.add("job", Job())
    read = []
    real = memory_pieces.read_regions

    def read_regions(*arguments):
        found = real(*arguments)
        read.extend(tensor.nbytes for tensor in found)
        return found

    monkeypatch.setattr(memory_pieces, "read_regions", read_regions)
    memory = on_host(shared_path, rank // 2)
    for step, place in enumerate((hsdp, dptp), 1):
        staged = keep(memory, registry, step, rank)
        assert staged <= 1.1 * local_bytes(model, optimizer)
        dist.barrier()
        model = place.model(seed=10 + step)
        optimizer = optimizer_of(model)
        registry = registry_of(model, optimizer)
        registry.add("job", Job())
        read.clear()
        found = newest_state(engine, memory, None, wanted=registry.wanted)
        assert (found.source, found.snapshot.version.step) == ("memory", step)
        registry.restore(found.snapshot, first_replica=True)
        check(model, optimizer, expected)
        # Whatever one process needs is read once, by itself or by one that sends it. Those of a
        # host share what others need of it: the one that reads least for itself sends most.
        amounts = torch.tensor([sum(read), local_bytes(model, optimizer, shared=False)])
        assert amounts[0] <= 1.2 * amounts[1]
        dist.all_reduce(amounts)
        assert 0.95 * amounts[1] <= amounts[0] <= amounts[1]
    check_lost_host(shared_path, engine, hsdp, expected, caplog)
    check_late(model, optimizer, registry, expected, dptp)


def check_late(model, optimizer, registry, expected, place):
    """What is registered after the restore gets its part of it; what fits nothing is refused."""
    late = registry_of(model, optimizer)
    late.add("job", Job())
    snapshot = late.take(Version(0, 9))
    whole = {
        name: held.origin.full_tensor() if isinstance(held, Sharded) else held
        for name, held in snapshot.tensors.items()
    }
    again = Registry()
    again.restore(replace(snapshot, tensors=whole), first_replica=True)
    other = place.model(seed=8)
    fresh = optimizer_of(other)
    again.add("model", other)
    again.add("optimizer", fresh)
    check(other, fresh, expected)
    with pytest.raises(ValueError, match=r"state.1.row of shape \(5,\) was split .* says how"):
        again.wanted({"optimizer.state.1.row": Stored((5,), split=True)})
    assert again.wanted({"optimizer.state.1.row": Stored((5,), split=False)}) == {}
    shape = tuple(fresh.param_groups[0]["params"][1].shape)
    wanted = again.wanted({"optimizer.state.1.other": Stored(shape, split=True)})
    assert list(wanted) == ["optimizer.state.1.other"]


def test_splits_without_rectangles_are_refused():
    with pytest.raises(ValueError, match="only Shard and Replicate can be saved"):
        spread_of((2, 2), [Partial(), SplitBy(0)])
    with pytest.raises(ValueError, match=r"split factor 3, and the later .* by 2"):
        spread_of((2, 2), [_StridedShard(0, split_factor=3), SplitBy(0)])
    strided = spread_of((3, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), SplitBy(1)])
    assert strided == Spread((3, 2, 2), (None, 1, 1), (0, 2, 1))


def check_lost_host(shared_path, engine, hsdp, expected, caplog):
    """One host has all, if each chunk is kept by two holders; else it is an older checkpoint."""
    rank = dist.get_rank()
    model = hsdp.model(seed=1)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    registry = registry_of(model, optimizer)
    registry.add("job", Job())
    checkpoints = Checkpoints(shared_path / "checkpoints")
    checkpoints.save(registry.take(Version(0, 1)), engine.group("storage"))
    for holders, source in ((1, "checkpoint"), (2, "memory")):
        memory = on_host(shared_path, rank // 2, f"holders{holders}", holders=holders)
        keep(memory, registry, 2, rank)
        dist.barrier()
        if rank == 2:
            memory.forget()
        dist.barrier()
        other = hsdp.model(seed=5)
        fresh = optimizer_of(other)
        again = registry_of(other, fresh)
        again.add("job", Job())
        caplog.clear()
        found = newest_state(engine, memory, checkpoints, wanted=again.wanted)
        assert found.source == source
        again.restore(found.snapshot, first_replica=True)
        check(other, fresh, expected)
        assert ("are incomplete" in caplog.text) == (holders == 1 and rank == 0)
        dist.barrier()


@pytest.mark.world_size(3)
def test_copies_of_four_processes_are_restored_by_three(shared_path):
    rank, engine, place = dist.get_rank(), Engine(), Place("fsdp", 3)
    torch.manual_seed(3)
    plain = Model()
    plain_optimizer = optimizer_of(plain)
    train(plain, plain_optimizer)
    registry = registry_of(plain, plain_optimizer)
    registry.add("job", Job())
    snapshot = registry.take(Version(0, 1))
    spread = Spread((4,), (0,))
    if rank == 0:
        for process in range(4):
            keep(on_host(shared_path, process // 2), Split(snapshot, spread, process), 1, process)
    dist.barrier()
    model = place.model(seed=4)
    optimizer = optimizer_of(model)
    registry = registry_of(model, optimizer)
    registry.add("job", Job())
    memory = on_host(shared_path, rank // 2)
    found = newest_state(engine, memory, None, wanted=registry.wanted)
    registry.restore(found.snapshot, first_replica=True)
    check(model, optimizer, full_tensors(plain, plain_optimizer))


class Split:
    """Stands for the registry of one process of a mesh."""

    def __init__(self, snapshot, spread, process):
        self._snapshot, self._spread, self._process = snapshot, spread, process

    def take(self, version):
        tensors = {
            name: self._part(tensor) if tensor.dim() and "count" not in name else tensor
            for name, tensor in self._snapshot.tensors.items()
        }
        return replace(self._snapshot, version=version, tensors=tensors)

    def _part(self, tensor):
        placement = self._spread.placement(tuple(tensor.shape), self._process)
        begin, num = placement.offsets[0], placement.sizes[0]
        shard = Shard(placement, tensor[begin : begin + num])
        return Sharded(placement.shape, tensor.dtype, (shard,), (self._process,))
