"""`Optimus`: one more accelerator to the job whose remaining time it shortens most.

After Peng et al., "Optimus" (EuroSys 2018), in the form that the Pollux artifact compares with. It
believes the speeds and the work that jobs report; the simulator tells it the true ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.job import JobStatus
from resilin.cluster.policies.pool import Pool


class Optimus:
    """Greedy by the seconds that the next accelerator saves.

    Args:
        constraints: Settings of the operator; of these, `lead` holds.
    """

    name = "optimus"

    def __init__(self, constraints: Constraints | None = None) -> None:
        self._lead = (constraints or Constraints()).lead

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on."""
        del memory  # each decision starts from nothing
        pool = Pool(status, self._lead)
        jobs = [job for job in status.jobs if not pool.is_pinned(job)]
        if status.quotas:
            _give(pool, jobs, guaranteed=True)
        for priority in sorted({job.spec.priority for job in jobs}, reverse=True):
            tier = [job for job in jobs if job.spec.priority == priority]
            _give(pool, tier, guaranteed=False)
        # Small jobs are placed first.
        return Decision(allocations=pool.lay_out(sorted(status.jobs, key=pool.size)))


def _give(pool: Pool, jobs: Sequence[JobStatus], *, guaranteed: bool) -> None:
    """Give each job its smallest size, then let those grow that gain most."""
    ordered = sorted(jobs, key=lambda job: job.spec.min_replicas)
    for job in ordered:
        least = job.spec.min_replicas
        kind = pool.kind_for(job, least, guaranteed=guaranteed)
        if kind is not None and not pool.size(job):
            pool.take(job, kind, least)
    by_name = {job.spec.id: job for job in ordered if pool.size(job)}
    gains = {name: _gain(job, pool) for name, job in by_name.items()}
    while gains:
        name = max(gains, key=lambda each: gains[each][0])
        gain, more = gains[name]
        if gain <= 0:
            return
        job = by_name[name]
        if pool.room(job, pool.kind(job), guaranteed=guaranteed) < more:
            del gains[name]
            continue
        pool.take(job, pool.kind(job), more)
        gains[name] = _gain(job, pool)


def _gain(job: JobStatus, pool: Pool) -> tuple[float, int]:
    """Seconds that growth to the next size saves, for each accelerator, and how many those are."""
    size, kind = pool.size(job), pool.kind(job)
    table = next((each for each in job.speeds if each.kind == kind), None)
    if table is None:
        return 0.0, 0
    larger = next((each for each in table.sizes if each > size), None)
    if larger is None or larger > job.spec.max_replicas:
        return 0.0, 0
    index = table.sizes.index(larger)
    now, then = table.goodput[max(0, index - 1)], table.goodput[index]
    if not now > 0 or not then > 0:
        return 0.0, 0
    left = job.done if job.total is None else job.total - job.done
    return (1 / now - 1 / then) * max(left, 1.0) / (larger - size), larger - size
