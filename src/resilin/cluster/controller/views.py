"""Jobs and nodes as others see them: values for users and the page, metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Sample = tuple[Mapping[str, str], float]
"""Labels and value."""


def metrics(state: State, now: float, troubles: int) -> str:
    """All metrics.

    Args:
        state: The state.
        now: The time.
        troubles: Number of troubles that were reported to the operator and hold.
    """
    parts = state.by_job()
    views = [job_view(state, job, parts.get(name, ())) for name, job in state.jobs.items()]
    active = [view for view in views if view["ended"] is None]
    used: dict[str, int] = {}
    for part in state.parts.values():
        used[part.node] = used.get(part.node, 0) + part.accelerators
    nodes = [(name, known.node) for name, known in state.nodes.items()]
    decision = state.decision
    phases = [view["phase"] for view in views]
    return "".join(
        (
            _metric(
                "jobs",
                "gauge",
                "Jobs in each phase.",
                [({"phase": each.value}, phases.count(each.value)) for each in Phase],
            ),
            _metric(
                "job_replicas",
                "gauge",
                "Replicas that run.",
                [({"job": view["id"]}, view["replicas"]) for view in active],
            ),
            _metric(
                "job_replicas_wanted",
                "gauge",
                "Replicas that the policy wants.",
                [({"job": view["id"]}, view["wanted"]) for view in active],
            ),
            _metric(
                "job_restarts_total",
                "counter",
                "Changes of the allocation.",
                [({"job": view["id"]}, view["restarts"]) for view in active],
            ),
            _metric(
                "job_failures",
                "gauge",
                "Failures without progress.",
                [({"job": view["id"]}, view["failures"]) for view in active],
            ),
            _metric(
                "node_accelerators",
                "gauge",
                "Accelerators of a node.",
                [({"node": name, "kind": node.kind}, node.accelerators) for name, node in nodes],
            ),
            _metric(
                "node_accelerators_used",
                "gauge",
                "Accelerators that parts have.",
                [({"node": name, "kind": node.kind}, used.get(name, 0)) for name, node in nodes],
            ),
            _metric(
                "accelerator_price",
                "gauge",
                "Value of one more accelerator.",
                [({"kind": kind}, price) for kind, price in decision.prices.items()]
                if decision is not None
                else [],
            ),
            _metric(
                "generation",
                "gauge",
                "Number of the last decision.",
                [({}, 0 if decision is None else decision.generation)],
            ),
            _metric(
                "decision_age_seconds",
                "gauge",
                "Age of the last decision.",
                [] if decision is None else [({}, max(0.0, now - decision.time))],
            ),
            _metric("troubles", "gauge", "Troubles that hold.", [({}, troubles)]),
        )
    )


def _metric(name: str, kind: str, text: str, samples: Sequence[Sample]) -> str:
    full = f"resilin_scheduler_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        told = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels.items())
        lines.append(f"{full}{{{told}}} {_number(value)}" if told else f"{full} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.17g}"
