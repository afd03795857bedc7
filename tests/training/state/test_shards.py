"""Tensors of which a process holds pieces: put together from any split, and kept in memory."""

import pytest
import torch

from resilin.core.placement import Placement
from resilin.engine.base import Engine
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.offers import Table
from resilin.training.state.registry import Registry
from resilin.training.state.shards import Assembly, Shard, Sharded, own_pieces, shares
from resilin.training.state.snapshot import Snapshot, Version, join, split

FULL = torch.arange(20.0).reshape(5, 4)
NOW = Version(0, 3)


def rows(begin, end, tensor=FULL):
    placement = Placement(tuple(tensor.shape), (begin, 0), (end - begin, tensor.shape[1]))
    return Shard(placement, tensor[begin:end].clone())


def sharded(*bounds):
    return Sharded((5, 4), torch.float32, tuple(rows(*each) for each in bounds))


def test_pieces_become_the_whole_or_another_split():
    whole, columns = Assembly(), Placement((5, 4), (1, 2), (3, 2))
    other = Assembly({"x": [columns]})
    for shard in (rows(3, 5), rows(0, 1), rows(1, 3)):
        for assembly in (whole, other):
            assembly.add("x", shard.placement, shard.data)
            assembly.add("y", Placement.whole((5, 4)), FULL)
    assert torch.equal(whole.result()["x"], FULL)
    found = other.result()
    assert torch.equal(found["x"].shards[0].data, FULL[1:4, 2:4])
    # What is whole and wanted whole is not copied.
    assert found["y"] is FULL


def test_elements_that_are_missing_are_counted():
    assembly = Assembly()
    assembly.add("x", rows(0, 3).placement, rows(0, 3).data)
    with pytest.raises(ValueError, match="x lacks 8 of the elements that are needed here"):
        assembly.result()


def test_a_piece_of_the_wrong_size_or_type_is_refused():
    with pytest.raises(ValueError, match=r"sizes \(2, 4\) cannot have data of shape \(1, 4\)"):
        Shard(Placement((5, 4), (0, 0), (2, 4)), FULL[:1])
    with pytest.raises(ValueError, match=r"torch.float64 cannot have a piece .* torch.float32"):
        Sharded((5, 4), torch.float64, (rows(0, 2),))


def test_who_writes_what():
    tensors = {"a": FULL, "split": sharded((0, 2), (4, 5)), "b": FULL[:2]}
    assert sorted(name for share in shares(tensors, 2) for name in share) == ["a", "b"]
    assert [piece for piece, _ in own_pieces(tensors)] == [
        ("split", rows(0, 2).placement),
        ("split", rows(4, 5).placement),
    ]
    # An empty piece says nothing, but for an empty tensor.
    none = Placement((0, 4), (0, 0), (0, 4))
    tensors = {
        "x": sharded((0, 0)),
        "y": Sharded((0, 4), torch.int8, (Shard(none, torch.empty(0, 4, dtype=torch.int8)),)),
    }
    assert [piece for piece, _ in own_pieces(tensors)] == [("y", none)]


def test_a_state_may_have_them_wherever_it_may_have_tensors():
    held = sharded((0, 2))
    tree, tensors = split("model", {"weight": held, "bias": [FULL]})
    assert sorted(tensors) == ["model.bias.0", "model.weight"]
    joined = join(tree, tensors)
    assert joined["weight"] is held
    assert torch.equal(joined["bias"][0], FULL)
    # Loaded as a whole, the tree is the same: it does not say how anything was split.
    assert torch.equal(join(tree, tensors | {"model.weight": FULL})["weight"], FULL)
    snapshot = Snapshot(NOW, {"model": tree}, tensors)
    assert snapshot.num_bytes == (8 + 20) * 4


class Part:
    """A registered thing that has some rows of a tensor."""

    def __init__(self, *bounds):
        self.state = {"weight": sharded(*bounds), "same": FULL}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_the_registry_carries_them():
    registry, part = Registry(), Part((0, 2))
    registry.add("part", part)
    snapshot = registry.take(NOW)
    assert snapshot.tensors["part.weight"] is part.state["weight"]
    other = Registry()
    other.restore(snapshot, first_replica=True)
    # Nobody has claimed it yet: it is taken as it was restored.
    assert other.take(NOW).tensors["part.weight"] is part.state["weight"]
    late = Part((4, 5))
    with pytest.warns(UserWarning, match="registered at step"):
        Registry.add(registry_at(other, 9), "part", late)
    assert late.state["weight"] is part.state["weight"]


def registry_at(registry, steps):
    registry._steps = lambda: steps
    return registry


# Memory ----------------------------------------------------------------------------------------


def take(*bounds):
    registry = Registry()
    registry.add("part", Part(*bounds))
    return registry.take(NOW)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "memory").mkdir(mode=0o700)
    return tmp_path / "memory"


def keep(directory, *held, host=0, first=0):
    """Each process of a host keeps its pieces, and a share of what is whole."""
    num = len(held)
    copies = [MemoryCopies(directory) for _ in held]
    for i, bounds in enumerate(held):
        copies[i].keep(
            take(*bounds),
            {},
            Place(host=host, local_process=i, num_local_processes=num, process=first + i),
        )
    return copies


def test_a_host_gives_back_the_pieces_of_all_its_processes(directory):
    keep(directory, [(0, 2)], [(2, 3), (4, 5)])
    copies = MemoryCopies(directory)
    assert copies.scan().versions == [NOW]
    state = copies.scan().read(NOW).state("part")
    assert torch.equal(state["same"], FULL)
    assert state["weight"].shape == (5, 4)
    shards = sorted(state["weight"].shards, key=lambda shard: shard.placement.offsets)
    expected = [rows(0, 2), rows(2, 3), rows(4, 5)]
    assert [shard.placement for shard in shards] == [shard.placement for shard in expected]
    for found, shard in zip(shards, expected, strict=True):
        assert torch.equal(found.data, shard.data)
    offer = copies.scan().offer(NOW)
    assert offer.shapes == {"part.weight": (5, 4)}
    assert [each.placement for each in offer.pieces] == [shard.placement for shard in expected]
    regions = [(2, (slice(0, 1), slice(1, 3))), (0, (slice(1, 2), slice(0, 4)))]
    found = offer.provider(regions)
    assert torch.equal(found[0], FULL[4:5, 1:3])
    assert torch.equal(found[1], FULL[1:2])


def test_a_copy_counts_only_if_the_pieces_of_all_hosts_are_the_whole(tmp_path):
    hosts = []
    for host, held in enumerate(([[(0, 2)], [(2, 3)]], [[(3, 4)], [(4, 5)]])):
        directory = tmp_path / str(host)
        directory.mkdir(mode=0o700)
        keep(directory, *held, host=host, first=2 * host)
        hosts.append(MemoryCopies(directory))
    assert missing(hosts) == ""
    assert "has 20 elements, and its pieces have 12" in missing(hosts[:1])
    # A process dies in its copy: its neighbour has its share of what is whole, but no pieces.
    next(tmp_path.glob("1/0-1-1-1-*")).unlink()
    assert hosts[1].scan().versions == [NOW]
    assert "has 20 elements, and its pieces have 16" in missing(hosts)
    # A host that has none of the pieces of a tensor says so.
    for path in tmp_path.glob("1/0-1-0-0-*"):
        path.unlink()
    assert hosts[1].scan().offer(NOW).shapes == {"part.weight": (5, 4)}
    assert hosts[1].scan().offer(NOW).pieces == []


def missing(hosts):
    """What the tables of one process per host lack, together."""
    tables = [Table.gather(Engine(), copies.scan().offer(NOW)) for copies in hosts]
    whole = Table({}, {}, {}, {})
    for table in tables:
        whole.shapes.update(table.shapes)
        for name, pieces in table.pieces.items():
            whole.pieces.setdefault(name, {}).update(pieces)
    return whole.missing()


def test_a_copy_of_whole_tensors_has_no_trace_of_it(directory):
    registry = Registry()
    registry.add("job", Part())
    whole = registry.take(NOW)
    whole.tensors["job.weight"] = FULL
    copies = MemoryCopies(directory)
    copies.keep(whole, {}, Place(host=0, local_process=0, num_local_processes=1, process=0))
    assert copies.scan().offer(NOW).shapes == {}
    assert torch.equal(copies.scan().read(NOW).tensors["job.weight"], FULL)
