"""Wishes of operators and users that hold for every policy: who may not move, grow or wait on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from resilin.cluster.decision import ClusterStatus
from resilin.cluster.division.table import Bools, Floats, Table
from resilin.cluster.job import JobStatus
from resilin.cluster.node import Node
from resilin.core import _validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Settings of the operator."""

    patience: float = 3600.0
    """Seconds without accelerators after which a job comes first within its priority. It gets its
    smallest size, and may lose it in the next round: `dwell` lets it stay."""
    dwell: float = 0.0
    """Seconds that a job keeps an allocation, unless its node leaves."""
    changes: int | None = None
    """Most running jobs that one decision changes, forced moves not counted; None for any number.
    """
    lead: float = 120.0
    """Seconds before a node leaves at which its jobs leave it."""

    def __post_init__(self) -> None:
        _validate.real("patience", self.patience, at_least=0)
        _validate.real("dwell", self.dwell, at_least=0)
        _validate.real("lead", self.lead, at_least=0)
        if self.changes is not None:
            _validate.whole("changes", self.changes, at_least=0)


def in_order(jobs: Iterable[JobStatus]) -> tuple[JobStatus, ...]:
    """Jobs by the time of their submission, then by id: the order that breaks all ties."""
    return tuple(sorted(jobs, key=lambda job: (job.spec.submitted, job.spec.id)))


def usable(nodes: Iterable[Node], now: float, lead: float) -> tuple[Node, ...]:
    """Nodes that stay for longer than `lead` seconds and have accelerators, by name."""
    stay = (
        node
        for node in nodes
        if node.accelerators and (node.leaves is None or node.leaves > now + lead)
    )
    return tuple(sorted(stay, key=lambda node: node.name))


def must_leave(jobs: Sequence[JobStatus], nodes: Sequence[Node]) -> set[str]:
    """Ids of jobs that cannot keep what they have, on nodes that can be used.

    A node of theirs is gone, leaves, or has fewer accelerators than before: then the jobs that were
    submitted last leave it, those that may be preempted first.
    """
    left = {node.name: node.accelerators for node in nodes}
    kind = {node.name: node.kind for node in nodes}
    found = set()
    for job in sorted(jobs, key=lambda job: job.spec.preemptible):
        if job.allocation is None:
            continue
        shares = job.allocation.shares
        if all(
            left.get(name, 0) >= count and kind.get(name) == job.allocation.kind
            for name, count in shares
        ):
            for name, count in shares:
                left[name] -= count
        else:
            found.add(job.spec.id)
    return found


def pinned(table: Table, status: ClusterStatus, constraints: Constraints) -> Bools:
    """Whether each job keeps exactly what it has."""
    found = np.zeros(len(table.jobs), dtype=np.bool_)
    for row, job in enumerate(table.jobs):
        if not table.current[row]:
            continue
        young = job.changed is not None and status.now - job.changed < constraints.dwell
        found[row] = young or not job.spec.preemptible
    return found


def impatient(table: Table, now: float, patience: float) -> list[int]:
    """Rows of jobs that have waited too long, the longest wait first."""
    waits = [
        (job.waiting_since, row)
        for row, job in enumerate(table.jobs)
        if job.waiting_since is not None and now - job.waiting_since >= patience
    ]
    return [row for _, row in sorted(waits)]


def largest_sizes(table: Table, growth: float, first: int) -> Floats:
    """Largest size that each job may have now, by what is known of it.

    Args:
        table: Jobs and columns.
        growth: Times the largest size at which the job has run.
        first: Size of a job that has never run.
    """
    sizes = table.columns.sizes
    profiled = np.array([job.profiled for job in table.jobs], dtype=np.float64)
    known = np.array([bool(job.speeds) for job in table.jobs], dtype=np.bool_)
    stale = np.array([job.stale for job in table.jobs], dtype=np.bool_)
    running = table.current > 0
    cap = np.where(known, np.maximum(growth * profiled, first), first)
    # Old hints: a job that runs does not grow, one that waits returns to what it has tried.
    cap = np.where(stale, np.where(running, 0, np.maximum(profiled, first)), cap)
    some = table.may[:, 1:]
    least = (
        np.where(some.any(axis=1), sizes[1:][np.argmax(some, axis=1)], 0) if len(sizes) > 1 else 0
    )
    found: Floats = np.maximum(cap, np.where(running, sizes[table.current], least))
    return found


def allowed(table: Table, largest: Floats) -> Bools:
    """Whether each job may choose each column now."""
    return table.may & (table.columns.sizes <= largest[:, None])
