"""Jobs, nodes and statuses for tests of policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from resilin.cluster.decision import ClusterStatus, Decision, Quota
from resilin.cluster.job import JobSpec, JobStatus, Speeds
from resilin.cluster.node import Allocation, Node, free

SIZES = (1, 2, 4, 8, 16, 32, 64)


def speeds(kind: str = "gpu", factor: float = 1.0, loss: float = 0.1) -> Speeds:
    """Goodput that grows with the size, less and less."""
    goodput = tuple(factor * size / (1 + loss * (size - 1)) for size in SIZES)
    return Speeds(kind=kind, sizes=SIZES, goodput=goodput)


def job(
    id: str,
    *,
    submitted: float = 0.0,
    allocation: Allocation | None = None,
    loss: float = 0.1,
    now: float = 1000.0,
    **options: Any,
) -> JobStatus:
    """A job that was measured up to size 64; options are those of its spec and its status."""
    wishes = {
        name: options.pop(name)
        for name in ("tenant", "priority", "min_replicas", "max_replicas", "preemptible", "kinds")
        if name in options
    }
    state = {
        "speeds": (speeds(loss=loss),),
        "profiled": 64,
        "done": 1000.0,
        "total": 10_000.0,
        "waiting_since": None if allocation else min(now, submitted),
        "changed": submitted if allocation else None,
        **options,
    }
    spec = JobSpec(id=id, submitted=submitted, **wishes)
    return JobStatus(spec=spec, allocation=allocation, **state)


def hosts(count: int, accelerators: int = 4, kind: str = "gpu", **options: Any) -> list[Node]:
    return [
        Node(name=f"{kind}-{i}", accelerators=accelerators, kind=kind, **options)
        for i in range(count)
    ]


def on(kind: str = "gpu", **shares: int) -> Allocation:
    """An allocation; the underscore in a name stands for a hyphen."""
    return Allocation(
        kind=kind, shares=tuple((name.replace("_", "-"), n) for name, n in shares.items())
    )


def cluster(
    nodes: list[Node],
    jobs: list[JobStatus],
    *,
    now: float = 1000.0,
    quotas: Mapping[str, Quota] | None = None,
) -> ClusterStatus:
    return ClusterStatus(now=now, nodes=tuple(nodes), jobs=tuple(jobs), quotas=quotas or {})


def given(decision: Decision) -> dict[str, int]:
    """Sizes by job."""
    return {name: allocation.size for name, allocation in sorted(decision.allocations.items())}


def check(status: ClusterStatus, decision: Decision, lead: float) -> None:
    """Raises unless a decision can be carried out and holds all rules."""
    free(status.nodes, decision.allocations.values())
    nodes = {node.name: node for node in status.nodes}
    specs = {each.spec.id: each.spec for each in status.jobs}
    used: dict[str, int] = {}
    for name, allocation in decision.allocations.items():
        spec = specs[name]
        assert spec.min_replicas <= allocation.size <= spec.max_replicas
        assert not spec.kinds or allocation.kind in spec.kinds
        for node, _ in allocation.shares:
            assert nodes[node].kind == allocation.kind
            leaves = nodes[node].leaves
            assert leaves is None or leaves > status.now + lead
        used[spec.tenant] = used.get(spec.tenant, 0) + allocation.size
    for tenant, quota in status.quotas.items():
        assert quota.limit is None or used.get(tenant, 0) <= quota.limit


@st.composite
def statuses(draw: st.DrawFn) -> ClusterStatus:
    """Clusters of one or two kinds in any state that an earlier decision could have left."""
    now = 10_000.0
    nodes = []
    for kind in draw(st.sampled_from([("gpu",), ("gpu", "tpu")])):
        for i in range(draw(st.integers(1, 5))):
            leaves = draw(st.sampled_from([None, None, None, now + 30, now + 5000]))
            size = draw(st.sampled_from([4, 4, 4, 3]))
            nodes.append(Node(name=f"{kind}-{i}", accelerators=size, kind=kind, leaves=leaves))
    left = {node.name: node.accelerators for node in nodes}
    jobs = []
    for i in range(draw(st.integers(0, 7))):
        least = draw(st.sampled_from([1, 1, 1, 2, 3, 6]))
        most = max(least, draw(st.sampled_from([1, 2, 4, 6, 8, 64])))
        kinds = draw(st.sampled_from([(), (), ("gpu",), ("tpu",)]))
        allocation = None
        own = [n for n in nodes if left[n.name] >= least and (not kinds or n.kind in kinds)]
        if own and draw(st.booleans()):
            node = draw(st.sampled_from(own))
            size = draw(st.integers(least, min(most, left[node.name])))
            left[node.name] -= size
            allocation = Allocation(kind=node.kind, shares=((node.name, size),))
        known = draw(st.sampled_from([(), ("gpu",), ("gpu", "tpu")]))
        jobs.append(
            job(
                f"j{i}",
                submitted=float(i),
                allocation=allocation,
                now=now,
                min_replicas=least,
                max_replicas=most,
                kinds=kinds,
                tenant=draw(st.sampled_from(["default", "a", "b"])),
                priority=draw(st.sampled_from([0, 0, 0, 1, 2])),
                preemptible=draw(st.sampled_from([True, True, False])),
                speeds=tuple(
                    speeds(kind, draw(st.sampled_from([0.5, 1.0, 3.0]))) for kind in known
                ),
                profiled=draw(st.sampled_from([0, 1, 4])),
                done=draw(st.sampled_from([0.0, 10.0, 1e4, 2e4])),
                total=draw(st.sampled_from([None, 1.5e4, 1e6])),
                rescale_seconds=draw(st.sampled_from([0.0, 1.0, 30.0, 300.0])),
                stale=draw(st.sampled_from([False, False, True])),
                changed=draw(st.sampled_from([0.0, now - 50])) if allocation else None,
            )
        )
    quotas = {
        "a": Quota(guaranteed=draw(st.sampled_from([0, 2, 6])), limit=None),
        "b": Quota(limit=draw(st.sampled_from([None, 0, 3, 100]))),
    }
    return ClusterStatus(now=now, nodes=tuple(nodes), jobs=tuple(jobs), quotas=quotas)
