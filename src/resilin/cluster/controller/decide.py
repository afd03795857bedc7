"""Second part of a step: ask the policy, when something has changed or the interval is over.

A policy sees a job as the wishes of its user, what it had so far, and its last hints.

A decision that is not possible, or a policy that fails, changes nothing: it is reported, and what
was wanted before is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.controller.rules import Draft, Rules
from resilin.cluster.controller.state import Job, PartRecord, State
from resilin.cluster.decision import ClusterStatus, Policy
from resilin.cluster.job import RESCALE_SECONDS, JobStatus, Speeds
from resilin.cluster.node import Allocation, Node, free
from resilin.core.hints import HintsError, JobHints


def usable(state: State, now: float, rules: Rules, without: set[str]) -> tuple[Node, ...]:
    """Nodes that may be used from now on, with the times at which they leave."""
    found = []
    for name, known in state.nodes.items():
        times = [at for at in (known.node.leaves, state.drains.get(name)) if at is not None]
        leaves = min(times, default=None)
        if name in without or (leaves is not None and leaves - now <= rules.lead):
            continue
        found.append(
            Node(
                name=name,
                accelerators=known.node.accelerators,
                kind=known.node.kind,
                leaves=leaves,
            )
        )
    return tuple(found)


def decide(draft: Draft, nodes: Sequence[Node], policy: Policy, rules: Rules) -> None:
    """Add the decision of the policy, if one is due."""
    state, now = draft.state, draft.now
    jobs = [job for job in state.jobs.values() if job.active]
    last = state.decision
    because = _because(jobs, nodes, policy)
    same = last is not None and last.because == because
    if not jobs and not state.wanted:
        return
    if same and last is not None and 0 <= now - last.time < rules.interval:
        return
    parts, sizes = state.by_job(), {node.name: (node.kind, node.accelerators) for node in nodes}
    status = ClusterStatus(
        now=now,
        nodes=tuple(nodes),
        jobs=tuple(
            job_status(
                job,
                parts.get(job.spec.id, ()),
                _left(state.wanted.get(job.spec.id), job, sizes),
                now,
                rules,
            )
            for job in jobs
        ),
        quotas=rules.quotas,
    )
    memory = last.memory if last is not None and last.policy == policy.name else {}
    try:
        decision = policy.decide(status, memory)
        wanted = {name: decision.allocations[name] for name in decision.allocations}
        json.dumps(decision.memory)
        _check(wanted, {job.spec.id: job for job in jobs}, nodes)
    except Exception as error:
        # It is code that others may have written; jobs must not suffer from it.
        draft.troubles.append(f"policy {policy.name} failed: {type(error).__name__}: {error}")
        return
    number = 0 if last is None else last.generation
    draft.add(
        r.Decided(
            time=now,
            generation=number if wanted == state.wanted else number + 1,
            because=because,
            wanted=wanted,
            reasons=dict(decision.reasons),
            prices=dict(decision.prices),
            memory=dict(decision.memory),
            policy=policy.name,
        )
    )


def _because(jobs: Sequence[Job], nodes: Sequence[Node], policy: Policy) -> str:
    """A short name of what calls for a decision when it changes."""
    seen = [policy.name]
    seen += [f"{job.spec.id} {bool((job.hints or {}).get('goodput'))}" for job in jobs]
    seen += [f"{n.name} {n.accelerators} {n.kind} {n.leaves}" for n in nodes]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def _left(
    before: Allocation | None, job: Job, sizes: Mapping[str, tuple[str, int]]
) -> Allocation | None:
    """The rest of an allocation on these nodes; None if it is too little to run."""
    if before is None:
        return None
    shares = tuple(
        (name, count)
        for name, count in before.shares
        if sizes.get(name, ("", 0))[0] == before.kind and sizes[name][1] >= count
    )
    if not shares or sum(count for _, count in shares) < job.spec.min_replicas:
        return None
    return Allocation(kind=before.kind, shares=shares)


def _check(
    wanted: Mapping[str, Allocation], jobs: Mapping[str, Job], nodes: Sequence[Node]
) -> None:
    """Raises unless the decision can be carried out."""
    kinds = {node.name: node.kind for node in nodes}
    for name, allocation in wanted.items():
        if name not in jobs:
            raise ValueError(f"{name} must be one of the jobs that have not ended")
        spec = jobs[name].spec
        if not spec.min_replicas <= allocation.size <= spec.max_replicas:
            raise ValueError(
                f"size of {name} ({allocation.size}) must be from {spec.min_replicas} to "
                f"{spec.max_replicas}"
            )
        wrong = [node for node, _ in allocation.shares if kinds.get(node) != allocation.kind]
        if wrong or (spec.kinds and allocation.kind not in spec.kinds):
            raise ValueError(f"{name} must not run on kind {allocation.kind} ({wrong})")
    free(nodes, wanted.values())


def job_status(
    job: Job,
    parts: Sequence[PartRecord],
    allocation: Allocation | None,
    now: float,
    rules: Rules,
) -> JobStatus:
    """The status of a job.

    Args:
        job: The job.
        parts: Its parts that have not ended.
        allocation: What it has now.
        now: The time.
        rules: Limits.
    """
    hints = read_hints(job.hints)
    facts: dict[str, Any] = {}
    if hints is not None:
        facts = {
            "speeds": speeds(hints),
            # Goodput counts reference samples, progress counts reference steps.
            "done": hints.progress * hints.reference,
            "total": None if hints.total is None else hints.total * hints.reference,
            "rescale_seconds": _or(hints.rescale_seconds, RESCALE_SECONDS),
            "stale": job.hinted is not None and now - job.hinted > rules.stale,
        }
    profiled = max(job.profiled, 0 if hints is None else hints.profiled)
    running = sum(
        part.accelerators * max(0.0, now - part.began) for part in parts if part.began is not None
    )
    return JobStatus(
        spec=job.spec,
        allocation=allocation,
        profiled=profiled,
        restarts=job.restarts,
        served=job.served + running,
        waiting_since=job.waiting_since if allocation is None else None,
        changed=job.changed,
        **facts,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def read_hints(told: Mapping[str, Any] | None) -> JobHints | None:
    """Hints from their JSON form; None without, or if another version has written them."""
    if told is None:
        return None
    try:
        return JobHints.from_json(told)
    except HintsError:
        # They were checked when they came: an older controller has read the journal of a later one.
        return None


def speeds(hints: JobHints) -> tuple[Speeds, ...]:
    """Goodput of the job at the sizes that it was offered, for each kind it was measured on."""
    return tuple(
        Speeds(kind=table.kind, sizes=table.sizes, goodput=table.goodput)
        for table in hints.tables
        if table.sizes
    )
