"""State that some processes hold, on its way to those that lack it: whole tensors and pieces."""

import pytest
import torch
import torch.distributed as dist

from resilin.core.placement import Placement
from resilin.engine.base import Engine
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.restore import newest_state
from resilin.training.state.shards import Shard, Sharded
from resilin.training.state.snapshot import Snapshot, Version, split
from resilin.training.state.transfer import transfer

FULL = torch.arange(20.0).reshape(5, 4)
SAME = torch.arange(7)


def rows(begin, end):
    return Shard(Placement((5, 4), (begin, 0), (end - begin, 4)), FULL[begin:end].clone())


def snapshot(step, *shards):
    state = {"weight": Sharded((5, 4), torch.float32, shards), "same": SAME, "replicas": 2}
    tree, tensors = split("job", state)
    return Snapshot(Version(0, step), {"job": tree}, tensors)


@pytest.mark.world_size(2)
def test_pieces_reach_whoever_needs_them():
    rank, engine = dist.get_rank(), Engine()
    mine = snapshot(3, rows(0, 2)) if rank == 0 else snapshot(3, rows(1 + 1, 5))
    found = transfer(engine, mine, mine.version).state("job")
    assert torch.equal(found["weight"], FULL)
    assert torch.equal(found["same"], SAME)
    columns = Placement((5, 4), (0, 3 * rank), (5, 1))
    mine = snapshot(3, rows(0, 5)) if rank == 0 else None
    found = transfer(engine, mine, Version(0, 3), {"job.weight": [columns]}).state("job")
    assert torch.equal(found["weight"].shards[0].data, FULL[:, 3 * rank : 3 * rank + 1])
    assert torch.equal(found["same"], SAME)
    assert transfer(engine, None, Version(0, 3)) is None


@pytest.mark.world_size(2)
def test_the_newest_copy_wins_of_which_the_hosts_have_all_pieces(tmp_path):
    rank = dist.get_rank()
    directory = tmp_path / f"host{rank}"
    directory.mkdir(mode=0o700)
    memory = MemoryCopies(directory)
    halves = [rows(0, 2), rows(2, 5)]
    for step in (1, 2):
        # Of the second step the other host has died before it had copied its pieces.
        held = halves[rank : rank + 1] if step == 1 or rank == 0 else []
        memory.keep(
            snapshot(step, *held),
            {},
            Place(host=rank, local_process=0, num_local_processes=1, process=rank),
        )
    found = newest_state(Engine(), memory, None)
    assert (found.source, found.snapshot.version.step, found.in_memory) == ("memory", 1, True)
    assert torch.equal(found.snapshot.state("job")["weight"], FULL)
