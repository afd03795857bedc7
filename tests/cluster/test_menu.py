"""Sizes offered to jobs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.menu import DENSE_HOSTS, menus, offers, parts_of_host, sizes
from resilin.cluster.node import Node


def test_small_hosts_are_offered_in_halves_and_whole():
    assert sizes(4, 32) == (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
    assert sizes(8, 16) == (1, 2, 4, 8, 16)
    assert sizes(1, 3) == (1, 2, 3)


@pytest.mark.parametrize(("host", "parts"), [(6, (1, 2)), (12, (1, 2, 4)), (7, (1,)), (1, ())])
def test_each_part_of_a_host_divides_the_next(host, parts):
    assert parts_of_host(host) == parts


@given(st.integers(1, 16), st.integers(1, 20_000))
def test_sizes_divide_a_host_or_are_whole_hosts_and_end_with_the_cluster(host, hosts):
    found = sizes(host, host * hosts)
    assert list(found) == sorted(set(found))
    assert all(host % size == 0 or size % host == 0 for size in found)
    assert found[-1] == host * hosts
    whole = [size // host for size in found if size >= host]
    assert whole[:DENSE_HOSTS] == list(range(1, min(hosts, DENSE_HOSTS) + 1))
    beyond = [b / a for a, b in itertools.pairwise(whole) if a >= DENSE_HOSTS]
    assert all(ratio <= 1.125 for ratio in beyond)


def test_the_menu_of_a_large_cluster_is_short():
    assert len(sizes(8, 10_000)) < 65
    assert len(sizes(8, 100_000)) < 85


def test_the_host_of_a_kind_is_the_most_frequent_one():
    nodes = [Node(name=f"n{i}", accelerators=count) for i, count in enumerate([8, 8, 4, 0, 0, 0])]
    menu = menus(nodes)["gpu"]
    assert (menu.host, menu.capacity) == (8, 20)
    assert menu.sizes == (1, 2, 4, 8, 16)
    assert menu.hosts(16) == 2
    assert menu.hosts(6) == 1


def test_each_kind_has_its_menu():
    nodes = [Node(name="a", accelerators=4, kind="t4"), Node(name="b", accelerators=2, kind="a100")]
    assert offers(nodes) == {"a100": [[1, 1], [2, 1]], "t4": [[1, 1], [2, 1], [4, 1]]}
    assert offers([]) == {}
