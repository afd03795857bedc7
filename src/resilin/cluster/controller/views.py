"""Jobs and nodes as users see them: plain values, for HTTP, the command line and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilin.cluster.controller.state import Job, PartRecord, Phase, State


def jobs_view(state: State) -> list[dict[str, Any]]:
    """All jobs, in the order of their submission."""
    parts = state.by_job()
    return [job_view(state, job, parts.get(name, ())) for name, job in state.jobs.items()]


def job_view(state: State, job: Job, parts: Sequence[PartRecord]) -> dict[str, Any]:
    """One job with these parts."""
    spec, wanted = job.spec, state.wanted.get(job.spec.id)
    told = (job.hints or {}).get("progress")
    progress = told if isinstance(told, dict) else {}
    return {
        "id": spec.id,
        "phase": state.phase(job, parts).value,
        "replicas": sum(part.accelerators for part in parts if part.began is not None),
        "wanted": wanted.size if wanted is not None and job.active else 0,
        "nodes": {part.node: part.accelerators for part in parts},
        "kind": None if wanted is None else wanted.kind,
        "min": spec.min_replicas,
        "max": spec.max_replicas,
        "priority": spec.priority,
        "tenant": spec.tenant,
        "submitted": spec.submitted,
        "ended": job.ended,
        "life": job.life,
        "restarts": job.restarts,
        "failures": job.failures,
        "served": job.served,
        "progress": progress.get("progress"),
        "total": progress.get("total"),
        "hinted": job.hinted,
        "why": job.why,
        "script": list(job.launch.script),
    }


def nodes_view(state: State) -> list[dict[str, Any]]:
    """All nodes, with the jobs on them."""
    used: dict[str, dict[str, int]] = {}
    for part in state.parts.values():
        its = used.setdefault(part.node, {})
        its[part.job] = its.get(part.job, 0) + part.accelerators
    return [
        {
            "name": name,
            "accelerators": known.node.accelerators,
            "kind": known.node.kind,
            "leaves": min(
                (at for at in (known.node.leaves, state.drains.get(name)) if at is not None),
                default=None,
            ),
            "drained": name in state.drains,
            "missed": known.missed,
            "jobs": used.get(name, {}),
        }
        for name, known in state.nodes.items()
    ]


def why_view(state: State, job: Job, parts: Sequence[PartRecord], now: float) -> dict[str, Any]:
    """The reason for the size of a job: two numbers and a comparison, if the policy has them."""
    phase = state.phase(job, parts)
    reason = state.reason(job.spec.id) if job.active else None
    wanted = state.wanted.get(job.spec.id) if job.active else None
    told: dict[str, Any] = {
        "id": job.spec.id,
        "phase": phase.value,
        "size": 0 if wanted is None else wanted.size,
        "policy": None if state.decision is None else state.decision.policy,
        "decided": None if state.decision is None else state.decision.time,
        "generation": None if state.decision is None else state.decision.generation,
    }
    if reason is not None:
        told |= {
            "next_size": reason.next_size,
            "value": reason.value,
            "price": reason.price,
        }
    sentences = _sentences(state, job, parts, phase, now)
    told["text"] = " ".join(f"{each.rstrip('.')}." for each in sentences)
    return told


def _sentences(
    state: State, job: Job, parts: Sequence[PartRecord], phase: Phase, now: float
) -> list[str]:
    if job.outcome is not None:
        return [f"{job.spec.id} has {phase.value}: {job.why}."]
    if job.cancelled:
        return [f"{job.spec.id} is being cancelled; {_leaving(parts)}."]
    reason = state.reason(job.spec.id)
    wanted = state.wanted.get(job.spec.id)
    size = 0 if wanted is None else wanted.size
    text = [reason.text if reason is not None else f"The policy gave it {size} accelerators."]
    if state.decision is None:
        text = ["Nothing has been decided yet."]
    if now < job.retry:
        text.append(f"It is started again in {job.retry - now:.0f} s: {job.why}.")
    if leaving := [part for part in parts if part.asked is not None]:
        text.append(f"It changes: {_leaving(leaving)}.")
    if pending := [part for part in parts if part.began is None and part.asked is None]:
        text.append(f"{', '.join(part.name for part in pending)} has not begun to run yet.")
    return text


def _leaving(parts: Sequence[PartRecord]) -> str:
    names = ", ".join(f"{part.name} leaves {part.node} ({part.why})" for part in parts)
    return names or "nothing of it runs any more"
