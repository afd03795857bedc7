"""`simulate`: a workload under a policy, from the first submission to the last end.

The same workload, policy and settings give the same result, bit by bit. Time moves in steps: jobs
train through a step, then the policy decides. With events, steps are short, and it decides where
something happened in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from resilin.cluster.decision import ClusterStatus, Decision, Policy, Quota
from resilin.cluster.menu import sizes
from resilin.cluster.node import Node, free
from resilin.cluster.simulation.jobs import Costs, SimulatedJob, Stretch
from resilin.cluster.simulation.nodes import Fleet
from resilin.cluster.simulation.training import Offer
from resilin.cluster.simulation.workload import ADAPTS, Adapts, Submission
from resilin.core import _validate
from resilin.core.trace import CapacityTrace

End = Literal["known", "unknown", "wrong"]
"""Knowledge of the work of a job: true, none, or off by a random factor."""
ENDS: tuple[End, ...] = ("known", "unknown", "wrong")
"""Values of `End`."""
NATURE: Mapping[str, Adapts] = {"fifo": "nothing", "tiresias": "nothing", "optimus": "size"}
"""Parts of jobs that change, under policies that cannot make use of more."""
STUCK = 7 * 86400.0
"""Seconds without any accelerator in use after which a simulation is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The cluster and its rules. The defaults are those of the published comparison.

    Each field is one assumption of a simulation.
    """

    nodes: int = 16
    """Number of nodes; with a `trace`, the most."""
    per_node: int = 4
    """Accelerators of each node."""
    interval: float = 60.0
    """Seconds between decisions."""
    events: bool = False
    """Whether to decide also when a job came or ended."""
    grain: float = 10.0
    """Seconds of a step of time with events or a trace."""
    start_seconds: float = 30.0
    """Seconds that a start from nothing takes."""
    rescale_seconds: float = 30.0
    """Seconds that a change of size or nodes of a running job takes."""
    end: End = "known"
    """Knowledge that jobs have of their end."""
    error: float = 0.5
    """Standard deviation of the log of a declared end that is `wrong`."""
    seed: int = 0
    """Seed of wrong ends, and of the nodes that leave."""
    trace: CapacityTrace | None = None
    """Accelerators over time; None means that all nodes stay."""
    notice: float = 30.0
    """Seconds between the announcement that a node leaves and its end."""
    quotas: Mapping[str, Quota] | None = None
    """Quotas by tenant."""
    adapts: Adapts | None = None
    """Parts of a job that may change; None means those that the policy can make use of."""

    def __post_init__(self) -> None:
        _validate.real("interval", self.interval, above=0)
        _validate.real("grain", self.grain, above=0)
        _validate.real("start_seconds", self.start_seconds, at_least=0)
        _validate.real("rescale_seconds", self.rescale_seconds, at_least=0)
        _validate.real("error", self.error, at_least=0)
        _validate.one_of("end", self.end, ENDS)
        if self.adapts is not None:
            _validate.one_of("adapts", self.adapts, ADAPTS)
        if (self.events or self.trace) and self.interval % self.grain:
            raise ValueError(
                f"interval ({self.interval:g}) must be a multiple of grain ({self.grain:g})"
            )


@dataclass(frozen=True, slots=True)
class JobResult:
    """Times of one job."""

    id: str
    """Name of the job."""
    submitted: float
    """Time of its submission, in seconds."""
    started: float
    """Time at which it first had accelerators."""
    finished: float
    """Time at which it finished."""
    restarts: int
    """Changes of its allocation after the first start."""
    served: float
    """Accelerator-seconds it had."""
    stretches: tuple[Stretch, ...]
    """Its allocations over time."""

    @property
    def seconds(self) -> float:
        """Seconds from submission to end."""
        return self.finished - self.submitted


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated workload."""

    policy: str
    """Name of the policy."""
    jobs: tuple[JobResult, ...]
    """All jobs, in the order of their submission."""
    capacity: float
    """Accelerator-seconds that were there from the first submission to the last end."""
    decisions: int
    """Number of decisions."""


def simulate(
    workload: Sequence[Submission], policy: Policy, settings: Settings | None = None
) -> Result:
    """Run a workload to the end of its last job.

    Args:
        workload: Jobs, at least one, in the order of their submission.
        policy: Who gets what.
        settings: The cluster and its rules; None means the defaults.

    Raises:
        ValueError: The policy gave out what is not there or a size that a job must not have, or
            some job does not finish.
    """
    return _Run(workload, policy, settings or Settings()).result()


class _Run:
    """One simulation."""

    def __init__(self, workload: Sequence[Submission], policy: Policy, settings: Settings) -> None:
        if not workload:
            raise ValueError("workload must have at least one job")
        self._policy, self._settings = policy, settings
        adapts = settings.adapts or NATURE.get(policy.name, "all")
        costs = Costs(settings.start_seconds, settings.rescale_seconds)
        self._jobs = []
        for index, entry in enumerate(workload):
            training = entry.training(adapts)
            total = _declared(settings, index, training.total)
            self._jobs.append(SimulatedJob(entry.spec(adapts), training, costs, total))
        self._fleet = Fleet(
            settings.nodes,
            settings.per_node,
            trace=settings.trace,
            notice=settings.notice,
            seed=settings.seed,
        )
        self._offers = _offers(settings, adapts)
        self._memory: Mapping[str, Any] = {}
        self._capacity = 0.0
        self._decisions = 0

    def result(self) -> Result:
        """Run to the end."""
        settings = self._settings
        step = settings.grain if settings.events or settings.trace else settings.interval
        now = decided = used = 0.0
        waiting, running = list(reversed(self._jobs)), list[SimulatedJob]()
        while waiting or running:
            for job in running:
                job.advance(now, step)
            ends = [job.finished for job in running if job.finished is not None]
            running = [job for job in running if job.finished is None]
            # Nobody asks for what is there after the last end.
            self._count(now, step if waiting or running else max(ends) - now)
            now += step
            came = False
            while waiting and waiting[-1].spec.submitted <= now:
                running.append(waiting.pop())
                came = True
            happened = self._fleet.advance(now) or (settings.events and (came or bool(ends)))
            if running and (happened or now - decided >= settings.interval):
                self._decide(now, running)
                decided = now
            elif not running:
                decided = now - now % settings.interval
            if not running or any(job.allocation for job in running):
                used = now
            elif now - used > STUCK:
                names = ", ".join(job.spec.id for job in running[:3])
                raise ValueError(
                    f"no job has had an accelerator for {STUCK:g} seconds: {names}; do they ask "
                    f"for more than {settings.nodes} nodes of {settings.per_node}?"
                )
        return Result(
            self._policy.name, tuple(map(_result, self._jobs)), self._capacity, self._decisions
        )

    def _count(self, now: float, seconds: float) -> None:
        """Add the accelerators that were there, from the first submission on."""
        first = self._jobs[0].spec.submitted
        there = max(0.0, now + seconds - max(now, first))
        self._capacity += there * sum(node.accelerators for node in self._fleet.nodes)

    def _decide(self, now: float, jobs: Sequence[SimulatedJob]) -> None:
        nodes = self._fleet.nodes
        names = {node.name for node in nodes}
        status = ClusterStatus(
            now=now,
            nodes=nodes,
            jobs=tuple(job.status(self._offers, names) for job in jobs),
            quotas=self._settings.quotas or {},
        )
        decision = self._policy.decide(status, self._memory)
        _check(decision, jobs, nodes)
        self._memory = decision.memory
        self._decisions += 1
        for job in jobs:
            job.reallocate(now, decision.allocations.get(job.spec.id))


def _offers(settings: Settings, adapts: Adapts) -> tuple[Offer, ...]:
    """Sizes that policies are told the speed of."""
    if adapts == "nothing":
        return ()
    most = settings.nodes * settings.per_node
    offered = range(1, most + 1) if adapts == "size" else sizes(settings.per_node, most)
    return (Offer.of("gpu", offered, settings.per_node),)


def _declared(settings: Settings, index: int, total: float) -> float | None:
    """Work that a job declares."""
    if settings.end == "unknown":
        return None
    if settings.end == "known":
        return total
    random = np.random.default_rng([settings.seed, index])
    return total * float(np.exp(random.normal(0.0, settings.error)))


def _check(decision: Decision, jobs: Sequence[SimulatedJob], nodes: Sequence[Node]) -> None:
    """Raises if a decision cannot be carried out."""
    specs = {job.spec.id: job.spec for job in jobs}
    kinds = {node.name: node.kind for node in nodes}
    free(nodes, decision.allocations.values())
    for name, allocation in decision.allocations.items():
        if name not in specs:
            raise ValueError(f"the policy gave accelerators to {name}, which does not wait or run")
        spec = specs[name]
        if not spec.min_replicas <= allocation.size <= spec.max_replicas:
            raise ValueError(
                f"the policy gave {name} {allocation.size} accelerators: it must have from "
                f"{spec.min_replicas} to {spec.max_replicas}"
            )
        wrong = {kinds[node] for node, _ in allocation.shares} - {allocation.kind}
        if wrong or (spec.kinds and allocation.kind not in spec.kinds):
            raise ValueError(
                f"the policy gave {name} accelerators of {allocation.kind} on nodes with "
                f"{', '.join(sorted(wrong)) or allocation.kind}: kinds must be one of the job's "
                f"({', '.join(spec.kinds) or 'any'}), and not mixed"
            )


def _result(job: SimulatedJob) -> JobResult:
    assert job.started is not None
    assert job.finished is not None
    return JobResult(
        job.spec.id,
        job.spec.submitted,
        job.started,
        job.finished,
        job.restarts,
        job.served,
        tuple(job.stretches),
    )
