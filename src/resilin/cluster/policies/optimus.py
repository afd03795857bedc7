"""`Optimus`: one more accelerator to the job whose remaining time it shortens most.

After Peng et al., "Optimus" (EuroSys 2018), in the form that the Pollux artifact compares with. It
believes the speeds and the work that jobs report; the simulator tells it the true ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.job import JobStatus
from resilin.cluster.policies.pool import Pool, is_pinned, lay_out


class Optimus:
    """Greedy by the seconds that the next accelerator saves."""

    name = "optimus"

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on."""
        del memory  # each decision starts from nothing
        pool = Pool(status)
        pinned = [job for job in status.jobs if is_pinned(job)]
        kinds = pool.admit(pinned, lambda job: job.spec.max_replicas)
        sizes = {job.spec.id: job.allocation.size for job in pinned if job.allocation}
        others = [job for job in status.jobs if job.spec.id not in kinds]
        priorities = sorted({job.spec.priority for job in others}, reverse=True)
        if status.quotas:
            _give(pool, others, sizes, kinds, guaranteed=True)
        for priority in priorities:
            tier = [job for job in others if job.spec.priority == priority]
            _give(pool, tier, sizes, kinds, guaranteed=False)
        # Small jobs are placed first, so that they fill the gaps.
        ordered = sorted(status.jobs, key=lambda job: sizes.get(job.spec.id, 0))
        return Decision(allocations=lay_out(pool, ordered, sizes, kinds))


def _give(
    pool: Pool,
    jobs: Sequence[JobStatus],
    sizes: dict[str, int],
    kinds: dict[str, str],
    *,
    guaranteed: bool,
) -> None:
    """Give each job its smallest size, then let those grow that gain most."""
    for job in sorted(jobs, key=lambda job: job.spec.min_replicas):
        name, least = job.spec.id, job.spec.min_replicas
        if name not in sizes:
            kind = pool.kind_for(job, least, guaranteed=guaranteed)
            if kind is not None:
                sizes[name], kinds[name] = least, kind
                pool.take(job, kind, least)
    gains = {
        job.spec.id: _gain(job, sizes[job.spec.id], kinds[job.spec.id])
        for job in sorted(jobs, key=lambda job: job.spec.min_replicas)
        if job.spec.id in sizes
    }
    by_name = {job.spec.id: job for job in jobs}
    while gains:
        name = max(gains, key=lambda each: gains[each][0])
        gain, larger = gains[name]
        if gain <= 0:
            return
        job, kind, more = by_name[name], kinds[name], larger - sizes[name]
        if pool.room(job, kind, guaranteed=guaranteed) < more:
            del gains[name]
            continue
        pool.take(job, kind, more)
        sizes[name] = larger
        gains[name] = _gain(job, larger, kind)


def _gain(job: JobStatus, size: int, kind: str) -> tuple[float, int]:
    """Seconds that the next larger size saves, for each accelerator, and that size."""
    table = next((each for each in job.speeds if each.kind == kind), None)
    if table is None:
        return 0.0, size
    larger = next((each for each in table.sizes if each > size), None)
    if larger is None or larger > job.spec.max_replicas:
        return 0.0, size
    index = table.sizes.index(larger)
    now, then = table.goodput[max(0, index - 1)], table.goodput[index]
    if not now > 0 or not then > 0:
        return 0.0, size
    left = job.done if job.total is None else job.total - job.done
    return (1 / now - 1 / then) * max(left, 1.0) / (larger - size), larger
