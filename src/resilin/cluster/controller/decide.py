"""Second part of a step: ask the policy, when something has changed or the interval is over.

A decision that is not possible, or a policy that fails, changes nothing: it is reported, and what
was wanted before is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from resilin.cluster.controller import records as r
from resilin.cluster.controller.knowledge import job_status
from resilin.cluster.controller.rules import Draft, Rules
from resilin.cluster.controller.state import Job, State
from resilin.cluster.decision import ClusterStatus, Policy
from resilin.cluster.node import Allocation, Node, free


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
