"""Copies that a process of another host keeps: what is sent, and what happens without room."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from resilin.core.placement import Placement
from resilin.engine.base import Engine
from resilin.training.state import memory_file
from resilin.training.state.buddy_copies import BuddyCopies, Incoming
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.memory_file import DATA
from resilin.training.state.memory_schedule import MemorySchedule
from resilin.training.state.registry import Registry
from resilin.training.state.shards import Shard, Sharded, kept_pieces
from resilin.training.state.snapshot import Snapshot, Version
from resilin.training.state.stage import Block, Bytes, Layout

HOSTS = {0: 0, 1: 0, 2: 1, 3: 1}


def split_tensor(holders, holder=0):
    data = torch.arange(64.0)
    shard = Shard(Placement((128,), (64,), (64,)), data)
    return Sharded((128,), data.dtype, (shard,), holders, holder)


def away(holders, holder=0, hosts=HOSTS):
    """What process 0 would send to its buddy, with each part kept twice."""
    found = BuddyCopies(hosts, 0, None)
    kept = kept_pieces({"x": split_tensor(holders, holder)}, 2)
    return [
        each.piece[1].offsets[0] for each in kept if each.is_first and found.lacks(each.keepers)
    ]


def test_only_what_one_host_has_is_sent():
    assert away((0,)) == [64]
    # Another host has it, or a process of this host alone, as under tensor parallelism.
    assert away((0, 2)) == []
    assert away((0, 1)) == [64]
    assert away((1, 0), holder=1) == [96]
    # A process that keeps no copies is no help.
    assert away((0, 2), hosts={0: 0, 1: 1}) == [64]


def test_one_host_has_no_buddies_and_says_so_once(tmp_path, caplog):
    memory = MemoryCopies(tmp_path / "memory", holders=2)
    memory.buddies = BuddyCopies.form(Engine(), keeps=True)
    assert not memory.buddies.are_there
    place = Place(host=0, local_process=0, num_local_processes=1, process=0)
    for step in (1, 2):
        snapshot = Snapshot(Version(0, step), {}, {"x": split_tensor((0,))})
        assert memory.stage(snapshot, {}, place).outgoing is None
    [said] = caplog.records
    assert "memory_holders is 2" in said.getMessage()
    assert "on one host" in said.getMessage()


def test_more_copies_than_buddies_keep_are_said_to_be_impossible(caplog):
    copies = BuddyCopies(HOSTS, 0, object())
    assert copies.are_there
    copies.warn(2)
    assert not caplog.records
    copies.warn(3)
    copies.warn(3)
    assert [record.getMessage() for record in caplog.records] == [
        "memory_holders is 3, and pieces that only one host has are kept 2 times: there and by one "
        "process of another host"
    ]


def incoming(ward, value):
    data = torch.full((4,), float(value))
    piece = ("x", Placement((8,), (4 * (ward - 1),), (4,)))
    block = torch.zeros(64, dtype=torch.uint8)
    block[:16] = data.view(torch.uint8)
    layout = incoming.layouts.setdefault(ward, Layout.of({piece: data}, DATA))
    return Incoming(ward, {"sums": {"replica": ward, "of": {}}}, Bytes(layout, block))


incoming.layouts = {}


def kept(memory, version):
    """The pieces of wards in the files of a version, by their beginning."""
    offer = memory.scan().offer(version)
    found = offer.provider([(number, (slice(0, 1),)) for number in range(len(offer.pieces))])
    pairs = zip(offer.pieces, found, strict=True)
    return {piece.placement.offsets[0]: tensor.item() for piece, tensor in pairs}


def test_what_is_kept_for_one_process_of_another_host_is_no_copy_of_this_one(tmp_path):
    memory = MemoryCopies(tmp_path / "memory", holders=2)
    BuddyCopies({0: 0, 1: 1}, 0, None).write(
        memory.directory, Version(0, 1), [incoming(1, 1)], (0, 0, 1)
    )
    assert kept(memory, Version(0, 1)) == {0: 1.0}
    assert memory.scan().versions == []


def test_without_room_the_copy_before_stays_and_what_fitted_is_not_written_twice(
    tmp_path, monkeypatch, caplog
):
    memory = MemoryCopies(tmp_path / "memory", holders=2)
    copies = BuddyCopies({0: 0, 1: 1, 2: 1}, 0, None)
    versions = [Version(0, step) for step in range(4)]
    for step in (1, 2):
        copies.write(
            memory.directory, versions[step], [incoming(1, step), incoming(2, step)], (0, 0, 1)
        )
    # Another layout needs a new file, and there is room for one of two.
    del incoming.layouts[1], incoming.layouts[2]
    real = memory_file.FileWriter._open
    opened = []

    def no_second(writer, size):
        opened.append(writer.path.name)
        if len(opened) == 2:
            raise OSError("no room")
        return real(writer, size)

    monkeypatch.setattr(memory_file.FileWriter, "_open", no_second)
    found = [incoming(1, 3), incoming(2, 3)]
    with pytest.raises(OSError, match="no room"):
        copies.write(memory.directory, versions[3], found, (0, 0, 1))
    assert kept(memory, versions[2]) == {0: 2.0, 4: 2.0}
    assert kept(memory, versions[3]) == {0: 3.0}
    copies.write(memory.directory, versions[3], found, (0, 0, 1))
    assert kept(memory, versions[2]) == {0: 2.0, 4: 2.0}
    assert kept(memory, versions[3]) == {0: 3.0, 4: 3.0}
    # They are copies for others: this host has no state of its own.
    assert memory.scan().versions == []
    assert memory.scan().sums(versions[3]) == {1: {}, 2: {}}
    for _ in range(2):
        copies.failed(memory.directory, versions[3], OSError("full"))
    [said] = caplog.records
    assert "of step 3" in said.getMessage()
    memory.buddies = copies
    memory.withdraw()
    assert list(memory.directory.iterdir()) == []


class OnTwoHosts(Engine):
    """Each process is on a host of its own."""

    def find_membership(self):
        return replace(super().find_membership(), host=dist.get_rank(), num_hosts=2)


class Half:
    """A state of which each process has one half."""

    def state_dict(self):
        rank = dist.get_rank()
        shard = Shard(Placement((6,), (3 * rank,), (3,)), torch.arange(3.0) + rank)
        return {"x": Sharded((6,), torch.float32, (shard,), (rank,))}

    def load_state_dict(self, state):
        raise AssertionError("nothing is restored")


@pytest.mark.world_size(2)
def test_a_process_without_room_holds_up_nobody(shared_path, monkeypatch, caplog):
    rank, engine, registry = dist.get_rank(), OnTwoHosts(), Registry()
    registry.add("half", Half())
    memory = MemoryCopies(shared_path / f"host{rank}", holders=2)
    schedule = MemorySchedule(memory, 1, engine, registry)
    schedule.form(2)
    real = memory_file.FileWriter.write

    def write(writer, version, block, meta):
        if (rank, version.step) == (0, 2) and isinstance(block, Block):
            raise OSError("no room")
        real(writer, version, block, meta)

    monkeypatch.setattr(memory_file.FileWriter, "write", write)
    steps = {}
    for step in (1, 2, 2, 3, 4):
        schedule.keep(Version(0, step))
        schedule.wait()
        found = [file for file in memory.scan().files if "ward" in file.meta]
        assert {file.meta["ward"] for file in found} == {1 - rank}
        steps[step] = {file.version.step for file in found}
        # What is kept for the other one is its half.
        newest = Version(0, max(steps[step]))
        pieces = {piece.placement.offsets: piece for piece in memory.scan().offer(newest).pieces}
        assert (3 - 3 * rank,) in pieces
    # Process 0 sends what it cannot keep. Then it waits for two steps, and takes part without.
    assert steps == {1: {1}, 2: {1, 2}, 3: {1, 2}, 4: {2, 4}}
    assert max(memory.scan().versions).step == 4
    assert ("no room for a memory copy of step 2" in caplog.text) == (rank == 0)
    schedule.close()
