"""Reasons are true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as example

from resilin.cluster.decision import Quota
from resilin.cluster.job import Speeds
from resilin.cluster.policies.by_name import by_name
from tests.cluster.statuses import cluster, hosts, job, on, statuses
from tests.examples import examples


def decide(*jobs, nodes=None, **options):
    return by_name("ours", growth=4.0, first=2).decide(
        cluster(nodes or hosts(2), list(jobs), **options), {}
    )


def test_a_job_that_would_gain_less_than_others_waits_for_that_reason():
    jobs = [job(f"j{i}", total=1100.0 + i) for i in range(12)]
    found = decide(*jobs)
    waiting = [id for id in found.reasons if id not in found.allocations]
    assert sorted(waiting) == ["j10", "j11", "j8", "j9"]
    reason = found.reasons["j11"]
    assert (reason.size, reason.next_size) == (0, 1)
    assert 0 < reason.value < reason.price
    assert reason.text == (
        f"waits: 1 more accelerator would be worth {reason.value:.2g} to it, "
        f"and {reason.price:.2g} to others"
    )


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (job("a", max_replicas=4), "has 4: that is its largest size, 4"),
        (job("a", profiled=1), "has 4: it has run on 1 at most, so it may have 4 now"),
        (job("a", speeds=()), "has 2: it has not been measured yet, so it starts with 2"),
        (
            job("a", allocation=on(gpu_0=1), stale=True),
            "has 1: its last hints are too old to let it grow",
        ),
        (
            job("a", allocation=on(gpu_0=1), preemptible=False),
            "has 1: it may not be preempted",
        ),
        (
            job("a", min_replicas=20),
            "waits: no kind of node has 20 accelerators, its smallest size",
        ),
        (job("a"), "has 8: no larger size is offered to it"),
        (job("a", kinds=("tpu",)), "waits: no node has accelerators of its kinds, tpu"),
        (
            job("a", speeds=(Speeds(kind="gpu", sizes=(1,), goodput=(0.0,)),)),
            "waits: its hints allow no size that is offered",
        ),
        (
            job("a", allocation=on(gpu_0=4), rescale_seconds=1e4, total=1500.0),
            "has 4: more accelerators would not make it faster, with the cost of a change counted",
        ),
    ],
)
def test_a_limit_is_named(one, text):
    assert decide(one).reasons["a"].text == text


def test_a_higher_priority_is_named():
    found = decide(job("low"), job("high", priority=1))
    assert found.allocations.keys() == {"high"}
    reason = found.reasons["low"]
    assert reason.text == (
        f"waits: {reason.next_size} more accelerator would be worth {reason.value:.2g} to it, "
        "but jobs of a higher priority come first"
    )


def test_the_limit_of_a_tenant_is_named():
    found = decide(
        job("a", tenant="t"), job("b", tenant="t"), job("c"), quotas={"t": Quota(limit=2)}
    )
    assert found.reasons["a"].text.endswith("to others of its tenant")


def test_accelerators_on_the_wrong_hosts_are_named():
    pinned = [job(f"p{i}", allocation=on(**{f"gpu_{i}": 1}), preemptible=False) for i in (0, 1)]
    found = decide(*pinned, job("a", min_replicas=4))
    assert found.reasons["a"].text == (
        "waits: 4 accelerators are free, but not on the hosts that it would need"
    )


@example(statuses())
@examples(60)
def test_a_job_has_all_that_is_worth_its_price_or_the_sentence_says_what_limits_it(status):
    one_kind = replace(
        status,
        nodes=tuple(replace(node, accelerators=4) for node in status.nodes if node.kind == "gpu"),
        jobs=tuple(each for each in status.jobs if each.allocation is None),
        quotas={},
    )
    decision = by_name("ours", lead=0.0).decide(one_kind, {})
    free = sum(node.accelerators for node in one_kind.nodes) - sum(
        each.size for each in decision.allocations.values()
    )
    assert set(decision.reasons) == {each.spec.id for each in one_kind.jobs}
    for id, reason in decision.reasons.items():
        assert reason.size == (decision.allocations[id].size if id in decision.allocations else 0)
        if "on the hosts that it would need" in reason.text:
            continue
        if reason.next_size is None:
            assert reason.text.count("worth") == 0
        elif reason.value > max(reason.price, 0.0):
            assert reason.text.endswith(("are left over for it", "come first"))
            assert free < reason.next_size - reason.size
        elif reason.value > 0:
            assert reason.text.endswith("to others")
