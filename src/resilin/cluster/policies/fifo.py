"""`Fifo`: jobs in the order of their submission, each until it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.job import JobStatus
from resilin.cluster.policies.pool import Pool, is_pinned, lay_out


class Fifo:
    """First come, first served. A job that runs keeps its size.

    Jobs of a higher priority go first, and within it those whose tenant is below its guarantee. A
    job gets its largest size, or what is left of it, at least its smallest.

    Args:
        backfill: Whether jobs may start ahead of one that does not fit yet. It can then wait for
            long.
    """

    name = "fifo"

    def __init__(self, *, backfill: bool = False) -> None:
        self._backfill = backfill

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on."""
        del memory  # the allocations say who runs
        pool = Pool(status)
        sizes: dict[str, int] = {}
        kinds: dict[str, str] = {}
        for job in status.jobs:
            has = job.allocation
            if has is None or has.size < job.spec.min_replicas:
                continue
            if is_pinned(job) or pool.can_stay(job, has.kind, has.size):
                sizes[job.spec.id], kinds[job.spec.id] = has.size, has.kind
                pool.take(job, has.kind, has.size)
        waiting = sorted(
            (job for job in status.jobs if job.spec.id not in sizes),
            key=lambda job: (-job.spec.priority, job.spec.submitted),
        )
        for guaranteed in (True, False):
            for job in waiting:
                if job.spec.id in sizes:
                    continue
                size, kind = _largest(pool, job, guaranteed=guaranteed)
                if kind is not None:
                    sizes[job.spec.id], kinds[job.spec.id] = size, kind
                    pool.take(job, kind, size)
                elif not (self._backfill or guaranteed or pool.is_at_limit(job)):
                    break
        ordered = sorted(status.jobs, key=lambda job: (-job.spec.priority, job.spec.submitted))
        return Decision(allocations=lay_out(pool, ordered, sizes, kinds))


def _largest(pool: Pool, job: JobStatus, *, guaranteed: bool) -> tuple[int, str | None]:
    """The largest size that fits, and its kind; None if not even the smallest does."""
    whole = pool.kind_for(job, job.spec.max_replicas, guaranteed=guaranteed)
    if whole is not None:
        return job.spec.max_replicas, whole
    kind = pool.kind_for(job, job.spec.min_replicas, guaranteed=guaranteed)
    if kind is None:
        return 0, None
    return min(job.spec.max_replicas, pool.room(job, kind, guaranteed=guaranteed)), kind
