"""Nodes that come and go."""

from __future__ import annotations

import pytest

from resilin.cluster.simulation.nodes import Fleet
from resilin.core.trace import CapacityTrace


def names(fleet: Fleet) -> list[str]:
    return [node.name for node in fleet.nodes]


def test_without_a_trace_all_nodes_stay():
    fleet = Fleet(3, 4)
    assert names(fleet) == ["node-000", "node-001", "node-002"]
    assert fleet.advance(1e6) is False
    assert names(fleet) == ["node-000", "node-001", "node-002"]


def test_a_node_is_announced_leaves_and_another_comes():
    trace = CapacityTrace((0.0, 100.0, 200.0), (8, 4, 12))
    fleet = Fleet(3, 4, trace=trace, notice=30.0)
    assert len(names(fleet)) == 2
    assert fleet.advance(60.0) is False
    assert fleet.advance(70.0) is True
    (leaving,) = [node for node in fleet.nodes if node.leaves is not None]
    assert leaving.leaves == 100.0
    assert fleet.advance(80.0) is False
    assert fleet.advance(100.0) is True
    (stays,) = fleet.nodes
    assert stays.name != leaving.name
    assert fleet.advance(200.0) is True
    assert names(fleet) == [stays.name, "node-002", "node-003"]


def test_a_node_that_leaves_without_notice_is_gone_at_once():
    fleet = Fleet(2, 4, trace=CapacityTrace((0.0, 100.0), (8, 4)))
    assert fleet.advance(99.0) is False
    assert fleet.advance(100.0) is True
    assert len(names(fleet)) == 1
    # The announcement and the end are one.
    assert all(node.leaves is None for node in fleet.nodes)


def test_there_are_never_more_than_the_trace_has():
    trace = CapacityTrace.spot(40, 7200.0, seed=3, mean_hold=60.0, end="repeat")
    fleet = Fleet(8, 4, trace=trace, notice=45.0, seed=1)
    scaled = trace.scaled(32)
    seen = set()
    for now in range(10, 20000, 10):
        fleet.advance(float(now))
        assert len(fleet.nodes) == scaled.at(now) // 4
        seen |= set(names(fleet))
    assert len(seen) > 20


def test_the_same_seed_draws_the_same_nodes():
    trace = CapacityTrace((0.0, 50.0, 100.0), (32, 16, 4))

    def left(seed: int) -> list[str]:
        fleet = Fleet(8, 4, trace=trace, seed=seed)
        fleet.advance(50.0)
        return names(fleet)

    assert left(1) == left(1)
    assert len({tuple(left(seed)) for seed in range(8)}) > 1


def test_a_trace_too_small_for_a_node_is_an_error():
    with pytest.raises(ValueError, match="enough for one node of 4"):
        Fleet(2, 4, trace=CapacityTrace((0.0,), (3,)))
