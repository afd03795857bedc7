"""`Pool`: accelerators that a policy has not given out yet, under the quotas of tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from resilin.cluster.decision import ClusterStatus
from resilin.cluster.job import JobStatus
from resilin.cluster.node import Allocation


class Pool:
    """Free accelerators of all nodes that stay, by count first and by place afterwards.

    A policy first takes counts, then keeps or places each job. Nodes that will leave are not in
    it: whoever is on one moves.
    """

    def __init__(self, status: ClusterStatus) -> None:
        self._status = status
        self._kinds = {node.name: node.kind for node in status.nodes if node.leaves is None}
        self._free = {
            node.name: node.accelerators for node in status.nodes if node.name in self._kinds
        }
        self._left = Counter[str]()
        for name, kind in self._kinds.items():
            self._left[kind] += self._free[name]
        self._used = Counter[str]()

    def room(self, job: JobStatus, kind: str, *, guaranteed: bool = False) -> int:
        """Most accelerators of a kind that the job could still get.

        Args:
            job: The job.
            kind: Kind of accelerator.
            guaranteed: Whether to count only what the job's tenant is sure of.
        """
        quota = self._status.quotas.get(job.spec.tenant)
        most = quota.limit if quota else None
        if guaranteed:
            most = quota.guaranteed if quota else 0
        left = self._left[kind]
        return left if most is None else max(0, min(left, most - self._used[job.spec.tenant]))

    def kind_for(self, job: JobStatus, size: int, *, guaranteed: bool = False) -> str | None:
        """A kind on which the job can have this size: its own, or the first; None without one."""
        kinds = [kind for kind in self._left if not job.spec.kinds or kind in job.spec.kinds]
        if job.allocation is not None and job.allocation.kind in kinds:
            kinds.remove(job.allocation.kind)
            kinds.insert(0, job.allocation.kind)
        fitting = (kind for kind in kinds if self.room(job, kind, guaranteed=guaranteed) >= size)
        return next(fitting, None)

    def is_at_limit(self, job: JobStatus) -> bool:
        """Whether the limit of its tenant alone keeps the job from its smallest size."""
        quota = self._status.quotas.get(job.spec.tenant)
        if quota is None or quota.limit is None:
            return False
        return quota.limit - self._used[job.spec.tenant] < job.spec.min_replicas

    def take(self, job: JobStatus, kind: str, count: int) -> None:
        """Count accelerators as given to a job."""
        self._left[kind] -= count
        self._used[job.spec.tenant] += count

    def admit(self, jobs: Iterable[JobStatus], size: Callable[[JobStatus], int]) -> dict[str, str]:
        """Take counts for the jobs that fit; their kinds, by id.

        Jobs that run and must not be stopped come first, then those within the guarantee of their
        tenant, then by priority, each in the order given.
        """
        ordered = sorted(jobs, key=lambda job: -job.spec.priority)
        chosen: dict[str, str] = {}
        for job in ordered:
            if is_pinned(job):
                assert job.allocation is not None
                chosen[job.spec.id] = job.allocation.kind
                self.take(job, job.allocation.kind, job.allocation.size)
        for guaranteed in (True, False):
            for job in ordered:
                if job.spec.id in chosen:
                    continue
                kind = self.kind_for(job, size(job), guaranteed=guaranteed)
                if kind is not None:
                    chosen[job.spec.id] = kind
                    self.take(job, kind, size(job))
        return chosen

    def can_stay(self, job: JobStatus, kind: str, size: int) -> bool:
        """Whether the job has this size already, on nodes that stay."""
        has = job.allocation
        if has is None or has.kind != kind or has.size != size:
            return False
        return is_pinned(job) or all(name in self._free for name, _ in has.shares)

    def keep(self, allocation: Allocation) -> Allocation:
        """Let a job stay where it is."""
        for name, count in allocation.shares:
            if name in self._free:
                self._free[name] -= count
        return allocation

    def place(self, kind: str, size: int) -> Allocation:
        """Free accelerators: of the node that has most first, of equal ones the first."""
        shares = []
        while size > 0:
            names = (name for name in self._free if self._kinds[name] == kind)
            name = max(names, key=self._free.__getitem__)
            count = min(size, self._free[name])
            assert count > 0, (kind, size, self._free)
            shares.append((name, count))
            self._free[name] -= count
            size -= count
        return Allocation(kind=kind, shares=tuple(shares))


def is_pinned(job: JobStatus) -> bool:
    """Whether a job runs and must not be stopped."""
    return (
        not job.spec.preemptible
        and job.allocation is not None
        and job.allocation.size >= job.spec.min_replicas
    )


def lay_out(
    pool: Pool, jobs: Iterable[JobStatus], sizes: dict[str, int], kinds: dict[str, str]
) -> dict[str, Allocation]:
    """Allocations for these sizes: jobs that can stay do, the others are placed in this order."""
    ordered = [job for job in jobs if sizes.get(job.spec.id)]
    found = {
        job.spec.id: pool.keep(job.allocation)
        for job in ordered
        if job.allocation and pool.can_stay(job, kinds[job.spec.id], sizes[job.spec.id])
    }
    for job in ordered:
        name = job.spec.id
        if name not in found:
            found[name] = pool.place(kinds[name], sizes[name])
    return found
