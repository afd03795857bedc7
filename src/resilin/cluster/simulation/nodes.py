"""`Fleet`: the nodes of a simulated cluster over time.

Without a trace they are there for good. With one, as many are there as the trace has accelerators
for; which one leaves is drawn from a seeded generator, and is announced before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from resilin.cluster.node import Node
from resilin.core import _validate
from resilin.core.trace import CapacityTrace


class Fleet:
    """The nodes now, and those that come and go.

    Args:
        count: Number of nodes; with a trace, the most there are.
        per_node: Accelerators of each.
        trace: Accelerators over time; None means that all nodes stay.
        notice: Seconds between the announcement that a node leaves and its end.
        seed: Seed of the choice of nodes that leave.
        kind: Kind of accelerator.
    """

    def __init__(
        self,
        count: int,
        per_node: int,
        *,
        trace: CapacityTrace | None = None,
        notice: float = 0.0,
        seed: int = 0,
        kind: str = "gpu",
    ) -> None:
        _validate.whole("count", count, at_least=1)
        _validate.whole("per_node", per_node, at_least=1)
        _validate.real("notice", notice, at_least=0)
        self._count, self._per_node, self._kind = count, per_node, kind
        self._trace = trace and trace.scaled(count * per_node)
        if self._trace is not None and max(self._trace.replicas) < per_node:
            raise ValueError(
                f"the trace has at most {max(self._trace.replicas)} accelerators: it must have "
                f"enough for one node of {per_node}"
            )
        self._notice = notice
        self._random = np.random.default_rng(seed)
        self._named = 0
        self._nodes: list[Node] = []
        self._grow(self._wanted(0.0))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with those that will leave."""
        return tuple(self._nodes)

    def advance(self, now: float) -> bool:
        """Bring the nodes to the time `now`; whether one came, left, or is about to leave."""
        if self._trace is None:
            return False
        before = self.nodes
        self._nodes = [node for node in before if node.leaves is None or node.leaves > now]
        here = self._wanted(now)
        # More left than was announced, as when the notice is shorter than the steps of time.
        self._nodes = self._without(len(self._nodes) - here)
        self._grow(here - len(self._nodes))
        staying = sum(node.leaves is None for node in self._nodes)
        for node in self._drawn(staying - self._wanted(now + self._notice)):
            index = self._nodes.index(node)
            self._nodes[index] = replace(node, leaves=now + self._notice)
        return self.nodes != before

    def _wanted(self, now: float) -> int:
        if self._trace is None:
            return self._count
        return min(self._count, self._trace.at(now) // self._per_node)

    def _grow(self, count: int) -> None:
        for _ in range(count):
            name = f"node-{self._named:03}"
            self._nodes.append(Node(name=name, accelerators=self._per_node, kind=self._kind))
            self._named += 1

    def _drawn(self, count: int) -> list[Node]:
        """This many of the nodes that stay, chosen at random."""
        staying = [node for node in self._nodes if node.leaves is None]
        if count <= 0:
            return []
        chosen = self._random.choice(len(staying), size=min(count, len(staying)), replace=False)
        return [staying[index] for index in sorted(chosen.tolist())]

    def _without(self, count: int) -> list[Node]:
        """The nodes without this many: first those that were about to leave."""
        if count <= 0:
            return self._nodes
        gone = [node for node in self._nodes if node.leaves is not None][:count]
        gone += self._drawn(count - len(gone))
        return [node for node in self._nodes if node not in gone]
