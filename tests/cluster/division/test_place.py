"""Allocation of sizes on nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.division.place import Want, place
from resilin.cluster.menu import sizes
from resilin.cluster.node import Allocation, Node, free
from tests.examples import examples


def hosts(*counts: int) -> list[Node]:
    return [Node(name=f"n{i}", accelerators=count) for i, count in enumerate(counts)]


def on(**shares: int) -> Allocation:
    return Allocation(kind="gpu", shares=tuple(shares.items()))


def want(job: str, size: int, now: Allocation | None = None) -> Want:
    return Want(job=job, kind="gpu", size=size, now=now)


@st.composite
def packed(draw):
    """Equal hosts, and sizes of the menu within their capacity."""
    host = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    capacity = host * draw(st.integers(1, 12))
    chosen, left = [], capacity
    while left and draw(st.integers(0, 30)):
        chosen.append(
            draw(st.sampled_from([size for size in sizes(host, capacity) if size <= left]))
        )
        left -= chosen[-1]
    return host, capacity // host, chosen


@given(packed(), st.data())
def test_sizes_of_the_menu_can_always_be_placed_whatever_runs_already(case, data):
    host, count, chosen = case
    nodes = hosts(*[host] * count)
    first = place(nodes, {}, [want(f"j{i}", size) for i, size in enumerate(chosen)])
    assert {job: a.size for job, a in first.items()} == {f"j{i}": s for i, s in enumerate(chosen)}
    free(nodes, first.values())
    # Some end, others come and fill the holes.
    stay = {job: a for job, a in first.items() if data.draw(st.booleans())}
    left = host * count - sum(a.size for a in stay.values())
    new = []
    while left and data.draw(st.integers(0, 30)):
        options = [size for size in sizes(host, host * count) if size <= left]
        new.append(data.draw(st.sampled_from(options)))
        left -= new[-1]
    wants = [want(job, a.size, a) for job, a in stay.items()]
    wants += [want(f"new{i}", size) for i, size in enumerate(new)]
    second = place(nodes, {}, wants)
    assert {each.job: each.size for each in wants} == {job: a.size for job, a in second.items()}
    free(nodes, second.values())
    for job, a in second.items():
        assert a.hosts == -(-a.size // host), job


def test_what_runs_stays_and_the_fullest_node_is_filled():
    nodes = hosts(4, 4, 4)
    now = {"a": on(n2=2), "b": on(n1=1)}
    found = place(nodes, {}, [*(want(job, a.size, a) for job, a in now.items()), want("c", 2)])
    assert found == {**now, "c": on(n2=2)}


def test_a_job_that_shrinks_or_grows_keeps_nodes_it_has():
    nodes = hosts(4, 4, 4, 4)
    found = place(nodes, {}, [want("a", 4, on(n2=4, n3=4)), want("b", 2, on(n1=1))])
    assert found == {"a": on(n2=4), "b": on(n1=2)}
    grown = place(nodes, {}, [want("a", 12, on(n3=4))])
    assert grown["a"].shares[0] == ("n3", 4)


def test_the_fewest_small_jobs_move_for_a_large_one():
    nodes = hosts(4, 4, 4)
    now = {"a": on(n0=1), "b": on(n1=2), "c": on(n2=1), "d": on(n2=1)}
    wants = [want(job, a.size, a) for job, a in now.items()]
    found = place(nodes, {}, [*wants, want("large", 4)])
    assert found["large"] == on(n0=4)
    assert [job for job in now if found[job] != now[job]] == ["a"]


def test_a_job_of_several_hosts_owns_them():
    nodes = hosts(4, 4, 4)
    found = place(nodes, {}, [want("a", 8), want("b", 1), want("c", 2)])
    assert found["a"].counts == (4, 4)
    assert {name for name, _ in found["b"].shares} == {name for name, _ in found["c"].shares}


def test_a_fixed_size_that_no_number_of_hosts_has_shares_its_last_host_with_small_jobs_only():
    nodes = hosts(4, 4, 4)
    found = place(nodes, {}, [want("a", 6), want("b", 2)])
    assert found["a"].counts == (4, 2)
    assert found["b"].shares[0][0] == found["a"].shares[1][0]
    two = place(nodes, {}, [want("a", 6), want("b", 6)])
    assert list(two) == ["a"]


def test_a_job_without_room_takes_a_smaller_size_or_waits():
    nodes = hosts(4, 4)
    kept = {"pinned": on(n0=1), "other": on(n1=1)}
    found = place(nodes, kept, [want("a", 4)], lambda each: (2, 1))
    assert found == {**kept, "a": on(n0=2)}
    assert place(nodes, kept, [want("a", 4)]) == kept


def test_a_pinned_job_never_moves():
    nodes = hosts(4, 4)
    kept = {"pinned": on(n0=1)}
    found = place(nodes, kept, [want("a", 4), want("b", 2)])
    assert found == {**kept, "a": on(n1=4), "b": on(n0=2)}


def test_unequal_hosts_are_never_given_twice():
    nodes = hosts(8, 3, 5, 4)
    found = place(nodes, {}, [want("a", 8), want("b", 8), want("c", 4)], lambda each: (4, 2, 1))
    free(nodes, found.values())
    assert found["a"] == on(n0=8)
    assert sum(a.size for a in found.values()) >= 16


def test_kinds_are_never_mixed():
    nodes = [Node(name="a", accelerators=2, kind="t4"), Node(name="b", accelerators=2, kind="a100")]
    wants = [
        Want(job="x", kind="t4", size=2, now=Allocation(kind="a100", shares=(("b", 2),))),
        Want(job="y", kind="a100", size=2),
    ]
    found = place(nodes, {}, wants)
    assert found["x"] == Allocation(kind="t4", shares=(("a", 2),))
    assert found["y"] == Allocation(kind="a100", shares=(("b", 2),))
    with pytest.raises(KeyError):
        place(nodes, {"z": Allocation(kind="t4", shares=(("gone", 1),))}, wants)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=8),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.data(),
)
@examples(300)
def test_on_unequal_hosts_a_placement_is_found_and_is_possible(counts, before, later, data):
    # Jobs of one size once took each other's node for ever.
    nodes = hosts(*counts)
    first = place(nodes, {}, [want(f"a{i}", size) for i, size in enumerate(before)])
    wants = [want(job, a.size, a) for job, a in first.items() if data.draw(st.booleans())]
    wants += [want(f"b{i}", size) for i, size in enumerate(later)]
    second = place(nodes, {}, wants)
    free(nodes, second.values())
    assert all(second[each.job].size == each.size for each in wants if each.job in second)
