"""Sizes that jobs are offered on each kind of accelerator, and the hosts that each of them takes.

A size divides a host, or it is a number of whole hosts: such sizes leave no gaps, so that any
choice of them within the capacity can be placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilin.cluster.node import Node

DENSE_HOSTS = 8
"""All numbers of whole hosts are offered up to this one."""
STEP = 1.12
"""Ratio of two sizes beyond that: a finer choice would change the goodput by less than a restart
costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """Sizes of one kind of accelerator."""

    kind: str
    """Kind of accelerator."""
    host: int
    """Accelerators of its usual host."""
    capacity: int
    """Accelerators of all its hosts."""
    sizes: tuple[int, ...]
    """Sizes, ascending."""

    def hosts(self, size: int) -> int:
        """Fewest hosts that have this many accelerators."""
        return -(-size // self.host)


def parts_of_host(host: int) -> tuple[int, ...]:
    """Sizes below a host: divisors of it that each divide the next, so that they leave no gaps."""
    found, size = [], 1
    while size < host:
        found.append(size)
        factor = next(each for each in range(2, host + 1) if (host // size) % each == 0)
        size *= factor
    return tuple(found)


def sizes(host: int, capacity: int) -> tuple[int, ...]:
    """Sizes offered where hosts have `host` accelerators and all of them have `capacity`.

    Args:
        host: Accelerators of one host, at least 1.
        capacity: Accelerators of all hosts; no size is above it.
    """
    offered = [size for size in parts_of_host(host) if size <= capacity]
    most = capacity // host
    hosts = 1
    while hosts <= most:
        offered.append(hosts * host)
        following = hosts + 1 if hosts < DENSE_HOSTS else max(hosts + 1, int(hosts * STEP))
        # The whole cluster is always offered.
        hosts = following if following <= most or hosts == most else most
    return tuple(offered)


def menus(nodes: Iterable[Node]) -> Mapping[str, Menu]:
    """Menu of each kind, in the order of their names.

    The host of a kind is the most frequent one, the larger of two that are as frequent; nodes
    without accelerators do not count.
    """
    by_kind: dict[str, Counter[int]] = {}
    for node in nodes:
        if node.accelerators:
            by_kind.setdefault(node.kind, Counter())[node.accelerators] += 1
    found = {}
    for kind in sorted(by_kind):
        counts = by_kind[kind]
        host = max(counts, key=lambda size: (counts[size], size))
        capacity = sum(size * count for size, count in counts.items())
        found[kind] = Menu(kind=kind, host=host, capacity=capacity, sizes=sizes(host, capacity))
    return found


def offers(nodes: Iterable[Node]) -> dict[str, list[list[int]]]:
    """Sizes and hosts of each kind, as the controller tells them to jobs."""
    return {
        kind: [[size, menu.hosts(size)] for size in menu.sizes]
        for kind, menu in menus(nodes).items()
    }
