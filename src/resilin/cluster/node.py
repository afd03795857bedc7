"""Nodes of a cluster, and the accelerators of them that a job has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from resilin.core import _validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with accelerators of one kind."""

    name: str
    """Its name in the scheduler of the site."""
    accelerators: int
    """Accelerators that jobs of this cluster may use."""
    kind: str = "gpu"
    """Kind of accelerator; a job never mixes kinds."""
    leaves: float | None = None
    """Time at which it is taken away, in seconds; None if nobody said so."""

    def __post_init__(self) -> None:
        _validate.text("name", self.name)
        _validate.text("kind", self.kind)
        _validate.whole("accelerators", self.accelerators, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Accelerators of one job: how many on which nodes, in the order in which they were given."""

    kind: str
    """Their kind."""
    shares: tuple[tuple[str, int], ...]
    """Name of each node, and accelerators on it; no node twice."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.shares]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"shares {self.shares} must name at least one node, and none twice")
        for name, count in self.shares:
            _validate.whole(f"accelerators of {name}", count, at_least=1)

    @property
    def size(self) -> int:
        """Number of accelerators: one replica has one."""
        return sum(count for _, count in self.shares)

    @property
    def hosts(self) -> int:
        """Number of nodes."""
        return len(self.shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """Accelerators on each node, in order."""
        return tuple(count for _, count in self.shares)


def free(nodes: Iterable[Node], allocations: Iterable[Allocation]) -> dict[str, int]:
    """Accelerators of each node that no allocation uses, in the order of the nodes.

    Raises:
        ValueError: More are used than a node has, or a node is unknown.
    """
    left = {node.name: node.accelerators for node in nodes}
    for allocation in allocations:
        for name, count in allocation.shares:
            if name not in left:
                raise ValueError(f"{name} must be one of the nodes {', '.join(left)}")
            left[name] -= count
            if left[name] < 0:
                raise ValueError(
                    f"{name} has {-left[name]} accelerators too few for its allocations"
                )
    return left
