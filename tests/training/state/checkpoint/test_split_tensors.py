"""Checkpoints of tensors that are split over the processes, and loading them in another split."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from resilin.core.placement import Placement
from resilin.training.state.checkpoint import CheckpointError, Checkpoints
from resilin.training.state.shards import Shard, Sharded
from resilin.training.state.snapshot import Snapshot, Version, split
from tests.training.state.checkpoint.snapshots import raw

MATRIX = torch.arange(35, dtype=torch.float64).reshape(7, 5)
VECTOR = torch.arange(3, dtype=torch.bfloat16)
SHARED = torch.arange(1000.0)


def piece(tensor, offsets, sizes):
    region = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    return Shard(Placement(tuple(tensor.shape), offsets, sizes), tensor[region].clone())


def sharded(tensor, *pieces):
    return Sharded(
        tuple(tensor.shape), tensor.dtype, tuple(piece(tensor, *each) for each in pieces)
    )


def snapshot(matrix, vector, step=1):
    """A state with two split tensors, one that is whole, and numbers."""
    state = {"matrix": matrix, "shared": SHARED, "vector": vector, "empty": sharded(EMPTY), "n": 3}
    tree, tensors = split("state", state)
    return Snapshot(Version(0, step), {"state": tree}, tensors)


EMPTY = torch.empty(0, 4)


def states(rank):
    """What each of two processes holds: several pieces, and a tensor of which one has none."""
    if rank == 0:
        state = snapshot(
            sharded(MATRIX, ((0, 0), (3, 5)), ((3, 3), (4, 2))),
            sharded(VECTOR, ((0,), (2,))),
        )
        state.tensors["state.empty"] = sharded(EMPTY, ((0, 0), (0, 4)))
        return state
    # The second piece is one that both have: it counts once.
    return snapshot(
        sharded(MATRIX, ((3, 0), (4, 3)), ((3, 3), (4, 2))),
        sharded(VECTOR, ((2,), (1,)), ((3,), (0,))),
    )


def check_whole(found):
    assert torch.equal(found["matrix"], MATRIX)
    assert raw(found["vector"]) == raw(VECTOR)
    assert torch.equal(found["shared"], SHARED)
    assert found["empty"].shape == EMPTY.shape
    assert found["n"] == 3


@pytest.mark.world_size(2)
def test_each_process_writes_its_pieces_and_gets_those_it_asks_for(shared_path):
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    checkpoints = Checkpoints(shared_path)
    commit = checkpoints.save(states(rank), group)
    assert [len(commit.tensors[f"state.{name}"]) for name in ("matrix", "shared", "vector")] == [
        3,
        1,
        2,
    ]
    # What is whole is dealt out as ever: one process writes it.
    written = json.loads((Path(commit.path) / "COMMIT.json").read_bytes())["commit"]["tensors"]
    assert {each["file"] for each in written["state.matrix"]["pieces"]} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
    check_whole(checkpoints.load(commit, group).state("state"))
    wanted = {
        "state.matrix": [
            Placement((7, 5), (0, 2 * rank), (7, 2 + rank)),
            Placement((7, 5), (5, 0), (1, 5)),
        ],
        "state.vector": [] if rank else [Placement.whole((3,))],
    }
    found = checkpoints.newest(group, wanted=wanted).state("state")
    for shard in found["matrix"].shards:
        expected = piece(MATRIX, shard.placement.offsets, shard.placement.sizes)
        assert torch.equal(shard.data, expected.data)
    assert [shard.placement for shard in found["matrix"].shards] == wanted["state.matrix"]
    assert found["vector"].shards[0].data.tolist() == [0, 1, 2] if rank == 0 else True
    assert (len(found["vector"].shards), found["vector"].nbytes) == ((0, 0) if rank else (1, 6))
    assert torch.equal(found["shared"], SHARED)


@pytest.mark.world_size(2)
def test_one_process_loads_what_two_have_saved_and_so_does_plain_torch(shared_path):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    commit = Checkpoints(shared_path).save(states(dist.get_rank()), group)
    check_whole(Checkpoints(shared_path).newest().state("state"))
    target = {"state.matrix": torch.zeros(7, 5, dtype=torch.float64), "state.shared": SHARED * 0}
    dcp.load(target, checkpoint_id=commit.path)
    assert torch.equal(target["state.matrix"], MATRIX)
    assert torch.equal(target["state.shared"], SHARED)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (((0, 0), (3, 5)), "state.matrix has 35 elements, and its pieces have 15"),
        (None, "no process has written a piece of state.matrix"),
    ],
)
def test_a_tensor_that_is_not_all_there_is_not_saved(tmp_path, matrix, message):
    incomplete = snapshot(sharded(MATRIX, *([matrix] if matrix else [])), sharded(VECTOR))
    incomplete.tensors.pop("state.vector"), incomplete.tensors.pop("state.empty")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(incomplete)
    assert list(tmp_path.glob("step-*")) == []


def test_wanted_pieces_of_another_shape_are_refused(tmp_path):
    state = snapshot(sharded(MATRIX, ((0, 0), (7, 5))), sharded(VECTOR, ((0,), (3,))))
    state.tensors["state.empty"] = sharded(EMPTY, ((0, 0), (0, 4)))
    checkpoints = Checkpoints(tmp_path)
    commit = checkpoints.save(state)
    with pytest.raises(
        ValueError, match=r"shape \(7, 5\) .* cannot have a piece of shape \(8, 5\)"
    ):
        checkpoints.load(commit, wanted={"state.matrix": [Placement((8, 5), (0, 0), (1, 5))]})
