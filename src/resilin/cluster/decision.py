"""`Policy`: a function from the status of a cluster to the allocation of each job, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from resilin.cluster.job import JobStatus
from resilin.cluster.node import Allocation, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Guarantee and limit of one tenant, in accelerators of all kinds."""

    guaranteed: int = 0
    """Accelerators its jobs get before others share the rest."""
    limit: int | None = None
    """Most accelerators of its jobs; None means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """All that a policy knows."""

    now: float
    """The time, in seconds."""
    nodes: tuple[Node, ...]
    """Nodes that are up, with those that will leave."""
    jobs: tuple[JobStatus, ...]
    """Jobs that have not ended, in the order of their submission."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas by tenant; a tenant without one has no guarantee and no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason for the size of a job: two numbers and a comparison."""

    size: int
    """Size decided; 0 means that it waits."""
    next_size: int | None
    """The next size it could have had; None if it has the largest."""
    value: float
    """Value of one more accelerator to this job, on the way to that size."""
    price: float
    """Value of one accelerator to the others: it grows where its value is above the price."""
    text: str
    """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a policy."""

    allocations: Mapping[str, Allocation]
    """Allocation of each job that runs, by its id; a job that is not in it waits."""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """Reasons, by the id of the job; policies of the literature give none."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of an accelerator of each kind."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """State of the policy for its next decision, in the types of JSON."""


class Policy(Protocol):
    """Divides a cluster among jobs. The same status and memory give the same decision."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on.

        Args:
            status: The cluster now.
            memory: `memory` of the last decision; empty before the first.
        """
