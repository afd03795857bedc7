"""The state of a cluster in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilin.cluster.controller.state import Phase, State
from resilin.cluster.controller.views import job_view

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
