"""`Tiresias`: jobs of fixed size, those with the least service first, in two queues.

After Gu et al., "Tiresias" (NSDI 2019), in the form that the Pollux artifact compares with: a job
that has had a given service moves to the second queue, and within a queue the order is that of
arrival.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.policies.pool import Pool

THRESHOLD = 16 * 3600
"""Accelerator-seconds after which a job moves to the second queue."""


class Tiresias:
    """Two queues by attained service.

    Every job has its largest size, as far as the cluster and the quota of its tenant have it, or
    nothing.

    Args:
        threshold: Accelerator-seconds after which a job moves to the second queue.
        patience: A job of the second queue returns to the first one after it waited this many
            times as long as it ran; 0 means never.
        constraints: Settings of the operator; of these, `lead` holds.
    """

    name = "tiresias"

    def __init__(
        self,
        threshold: float = THRESHOLD,
        patience: float = 0.0,
        constraints: Constraints | None = None,
    ) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold ({threshold}) must be above 0")
        if not patience >= 0:
            raise ValueError(f"patience ({patience}) must be at least 0")
        self._threshold = threshold
        self._patience = patience
        self._lead = (constraints or Constraints()).lead

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what from now on."""
        now = int(status.now)
        jobs = {job.spec.id: job for job in status.jobs}
        first, second = (
            [name for name in memory.get(queue, []) if name in jobs]
            for queue in ("first", "second")
        )
        ran, waited = ({**memory.get(key, {})} for key in ("ran", "waited"))
        before = int(memory.get("now", now))
        running = set(memory.get("running", []))
        known = {*first, *second}
        first += [name for name in jobs if name not in known]
        pool = Pool(status, self._lead)
        sizes = {name: pool.largest(job) for name, job in jobs.items()}
        for name in jobs:
            if name in running:
                ran[name] = ran.get(name, 0) + now - before
                if name in first and ran[name] * sizes[name] >= self._threshold:
                    first.remove(name)
                    second.append(name)
            elif name in second:
                waited[name] = waited.get(name, 0) + now - before
                if self._patience and waited[name] >= ran[name] * self._patience:
                    ran[name] = waited[name] = 0
                    second.remove(name)
                    first.append(name)
        ordered = [jobs[name] for name in (*first, *second)]
        pool.admit(ordered, sizes)
        return Decision(
            allocations=pool.lay_out(ordered),
            memory={
                "first": first,
                "second": second,
                "running": [name for name, job in jobs.items() if pool.size(job)],
                "ran": {name: time for name, time in ran.items() if name in jobs},
                "waited": {name: time for name, time in waited.items() if name in jobs},
                "now": now,
            },
        )
