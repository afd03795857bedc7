"""`Fifo`: jobs in the order of their submission, each until it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.job import JobStatus
from resilin.cluster.policies.pool import Pool


class Fifo:
    """First come, first served. A job that runs keeps its size.

    Jobs of a higher priority go first, and within it those whose tenant is below its guarantee. A
    job gets its largest size, or what is left of it, at least its smallest.

    Args:
        backfill: Whether jobs may start ahead of one that does not fit yet. It can then wait for
            long.
        constraints: Settings of the operator; of these, `lead` holds.
    """

    name = "fifo"

    def __init__(self, *, backfill: bool = False, constraints: Constraints | None = None) -> None:
        self._backfill = backfill
        self._lead = (constraints or Constraints()).lead

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on."""
        del memory  # the allocations say who runs
        pool = Pool(status, self._lead)
        for job in status.jobs:
            if job.allocation and pool.stays(job) and not pool.is_pinned(job):
                pool.take(job, job.allocation.kind, job.allocation.size)
        waiting = sorted(
            (job for job in status.jobs if not pool.size(job)),
            key=lambda job: (-job.spec.priority, job.spec.submitted),
        )
        for guaranteed in (True, False):
            for job in waiting:
                if pool.size(job):
                    continue
                size, kind = _largest(pool, job, guaranteed=guaranteed)
                if kind is not None:
                    pool.take(job, kind, size)
                elif not (self._backfill or guaranteed or pool.is_at_limit(job)):
                    break
        return Decision(allocations=pool.lay_out(status.jobs))


def _largest(pool: Pool, job: JobStatus, *, guaranteed: bool) -> tuple[int, str | None]:
    """The largest size that fits, and its kind; None if not even the smallest does."""
    whole = pool.kind_for(job, job.spec.max_replicas, guaranteed=guaranteed)
    if whole is not None:
        return job.spec.max_replicas, whole
    kind = pool.kind_for(job, job.spec.min_replicas, guaranteed=guaranteed)
    if kind is None:
        return 0, None
    return min(job.spec.max_replicas, pool.room(job, kind, guaranteed=guaranteed)), kind
