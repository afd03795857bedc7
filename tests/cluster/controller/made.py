"""Small states and policies for the tests of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.controller.changes import apply
from resilin.cluster.controller.state import State
from resilin.cluster.decision import ClusterStatus, Decision, Reason
from resilin.cluster.job import JobSpec
from resilin.cluster.node import Allocation, Node


class Even:
    """Accelerators in turn to all jobs, in the order of their names; moves nobody without need."""

    name = "even"

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        left = {node.name: node.accelerators for node in status.nodes}
        shares: dict[str, dict[str, int]] = {job.spec.id: {} for job in status.jobs}
        fair = max(1, sum(left.values()) // max(1, len(status.jobs)))
        for job in status.jobs:
            for name, count in job.allocation.shares if job.allocation else ():
                kept = min(count, left[name], fair - sum(shares[job.spec.id].values()))
                if kept > 0:
                    shares[job.spec.id][name] = kept
                    left[name] -= kept
        for job in status.jobs:
            most = min(fair, job.spec.max_replicas)
            for name in left:
                count = min(left[name], most - sum(shares[job.spec.id].values()))
                if count > 0:
                    shares[job.spec.id][name] = shares[job.spec.id].get(name, 0) + count
                    left[name] -= count
        kind = status.nodes[0].kind if status.nodes else "cpu"
        wanted = {
            job.spec.id: Allocation(kind=kind, shares=tuple(shares[job.spec.id].items()))
            for job in status.jobs
            if sum(shares[job.spec.id].values()) >= job.spec.min_replicas
        }
        reasons = {
            name: Reason(size=each.size, next_size=None, value=1.0, price=2.0, text="its share")
            for name, each in wanted.items()
        }
        rounds = int(memory.get("rounds", 0)) + 1
        return Decision(allocations=wanted, reasons=reasons, memory={"rounds": rounds})


def node(name: str, accelerators: int = 1) -> Node:
    return Node(name=name, accelerators=accelerators, kind="cpu")


def submitted(name: str, time: float = 0.0, **wishes: Any) -> r.Submitted:
    spec = JobSpec(id=name, submitted=time, **wishes)
    launch = r.Launch(script=("train.py",), directory="/work")
    return r.Submitted(time=time, spec=spec, launch=launch)


def state_of(*records: r.Record) -> State:
    state = State()
    opened = r.Opened(time=0.0, cluster="c1")
    met = r.Met(time=0.0, endpoint="127.0.0.1:1", number=1)
    for record in (opened, met, *records):
        state = apply(state, record)
    return state
