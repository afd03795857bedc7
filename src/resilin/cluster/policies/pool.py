"""`Pool`: accelerators that a policy has not given out yet, under the quotas of tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from resilin.cluster.decision import ClusterStatus
from resilin.cluster.division.constraints import must_leave, usable
from resilin.cluster.job import JobStatus
from resilin.cluster.node import Allocation


class Pool:
    """Free accelerators of the nodes that stay: first by count, then by place.

    A policy takes counts for the jobs that it chooses, then lays them out.

    Args:
        status: The cluster now.
        lead: Seconds before a node leaves at which its jobs leave it.
    """

    def __init__(self, status: ClusterStatus, lead: float) -> None:
        nodes = usable(status.nodes, status.now, lead)
        self._quotas = status.quotas
        self._kinds = {node.name: node.kind for node in nodes}
        self._free = {node.name: node.accelerators for node in nodes}
        self._homeless = must_leave(status.jobs, nodes)
        self._left = Counter[str]()
        for node in nodes:
            self._left[node.kind] += node.accelerators
        self._used = Counter[str]()
        self._sizes: dict[str, int] = {}
        self._kind: dict[str, str] = {}
        for job in status.jobs:
            if self.is_pinned(job):
                assert job.allocation is not None
                self.take(job, job.allocation.kind, job.allocation.size)

    def stays(self, job: JobStatus) -> bool:
        """Whether the job runs at a size that it may have, on nodes that stay."""
        return (
            job.allocation is not None
            and job.spec.id not in self._homeless
            and job.spec.min_replicas <= job.allocation.size <= job.spec.max_replicas
        )

    def is_pinned(self, job: JobStatus) -> bool:
        """Whether the job must keep what it has; the pool has given it that."""
        return not job.spec.preemptible and self.stays(job)

    def size(self, job: JobStatus) -> int:
        """Accelerators that the job was given so far."""
        return self._sizes.get(job.spec.id, 0)

    def kind(self, job: JobStatus) -> str:
        """Kind of the accelerators that the job was given."""
        return self._kind[job.spec.id]

    def room(self, job: JobStatus, kind: str, *, guaranteed: bool = False) -> int:
        """Most accelerators of a kind that the job could get in addition.

        Args:
            job: The job.
            kind: Kind of accelerator.
            guaranteed: Whether to count only what the job's tenant is sure of.
        """
        quota = self._quotas.get(job.spec.tenant)
        most = quota.limit if quota else None
        if guaranteed:
            most = min(quota.guaranteed, self._limit(job)) if quota else 0
        left = self._left[kind]
        return left if most is None else max(0, min(left, most - self._used[job.spec.tenant]))

    def kind_for(self, job: JobStatus, size: int, *, guaranteed: bool = False) -> str | None:
        """A kind on which the job can have this size: its own, or the first; None without one."""
        kinds = self._allowed(job)
        if job.allocation is not None and job.allocation.kind in kinds:
            kinds.remove(job.allocation.kind)
            kinds.insert(0, job.allocation.kind)
        fitting = (kind for kind in kinds if self.room(job, kind, guaranteed=guaranteed) >= size)
        return next(fitting, None)

    def largest(self, job: JobStatus) -> int:
        """Size that the job would have if it were alone: at least its smallest."""
        most = Counter[str]()
        for name, kind in self._kinds.items():
            most[kind] += self._free[name]
        there = max((most[kind] for kind in self._allowed(job)), default=0)
        return max(job.spec.min_replicas, min(job.spec.max_replicas, there, self._limit(job)))

    def is_at_limit(self, job: JobStatus) -> bool:
        """Whether the limit of its tenant alone keeps the job from its smallest size."""
        quota = self._quotas.get(job.spec.tenant)
        if quota is None or quota.limit is None:
            return False
        return quota.limit - self._used[job.spec.tenant] < job.spec.min_replicas

    def take(self, job: JobStatus, kind: str, count: int) -> None:
        """Give the job this many more."""
        self._left[kind] -= count
        self._used[job.spec.tenant] += count
        self._sizes[job.spec.id] = self.size(job) + count
        self._kind[job.spec.id] = kind

    def admit(self, jobs: Iterable[JobStatus], sizes: Mapping[str, int]) -> None:
        """Give these sizes to the jobs that fit and have nothing yet.

        First come those within the guarantee of their tenant, then all by priority, each in the
        order given.
        """
        ordered = sorted(jobs, key=lambda job: -job.spec.priority)
        for guaranteed in (True, False) if self._quotas else (False,):
            for job in ordered:
                if self.size(job):
                    continue
                kind = self.kind_for(job, sizes[job.spec.id], guaranteed=guaranteed)
                if kind is not None:
                    self.take(job, kind, sizes[job.spec.id])

    def lay_out(self, jobs: Iterable[JobStatus]) -> dict[str, Allocation]:
        """Places for all that was given: jobs that can stay do, others follow in this order."""
        chosen = [job for job in jobs if self.size(job)]
        found: dict[str, Allocation] = {}
        for job in chosen:
            has = job.allocation
            if has and self.stays(job) and (has.kind, has.size) == (self.kind(job), self.size(job)):
                found[job.spec.id] = has
                for name, count in has.shares:
                    self._free[name] -= count
        for job in chosen:
            if job.spec.id not in found:
                found[job.spec.id] = self._place(self.kind(job), self.size(job))
        return found

    def _place(self, kind: str, size: int) -> Allocation:
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

    def _allowed(self, job: JobStatus) -> list[str]:
        return [kind for kind in self._left if not job.spec.kinds or kind in job.spec.kinds]

    def _limit(self, job: JobStatus) -> int:
        quota = self._quotas.get(job.spec.tenant)
        everything = sum(self._left.values()) + sum(self._used.values())
        return everything if quota is None or quota.limit is None else quota.limit
