"""Rules of operators and users, for all policies that value sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as example
from hypothesis import strategies as st

from resilin.cluster.decision import Quota
from resilin.cluster.policies.by_name import by_name
from tests.cluster.statuses import check, cluster, given, hosts, job, on, speeds, statuses
from tests.examples import examples

BY_VALUE = ["ours", "pollux", "sia"]
LEAD = 120.0

quick = examples(25)


@pytest.mark.parametrize("name", BY_VALUE)
@example(statuses())
@quick
def test_every_decision_can_be_carried_out_and_keeps_all_rules(name, status):
    limits = {name: replace(quota, limit=None) for name, quota in status.quotas.items()}
    pinned = {
        each.spec.id: each.allocation
        for each in status.jobs
        if each.allocation and not each.spec.preemptible
    }
    decision = by_name(name).decide(status, {})
    # What may not be preempted may exceed a limit that came later.
    check(replace(status, quotas=limits) if pinned else status, decision, LEAD)
    nodes = {node.name: node for node in status.nodes}
    for id, allocation in pinned.items():
        if all(
            nodes[n].leaves is None or nodes[n].leaves > status.now + LEAD
            for n, _ in allocation.shares
        ):
            assert decision.allocations[id] == allocation


@pytest.mark.parametrize("name", BY_VALUE)
@example(statuses(), st.randoms(use_true_random=False))
@quick
def test_the_same_status_gives_the_same_decision_in_any_order(name, status, random):
    nodes, jobs = list(status.nodes), list(status.jobs)
    random.shuffle(nodes)
    random.shuffle(jobs)
    quotas = dict(reversed(status.quotas.items()))
    other = replace(status, nodes=tuple(nodes), jobs=tuple(jobs), quotas=quotas)
    policy = by_name(name)
    first = policy.decide(status, {})
    assert policy.decide(other, {}) == first
    assert by_name(name).decide(other, {}) == first


@example(statuses(), st.integers(0, 2))
@quick
def test_no_more_running_jobs_change_than_allowed(status, most):
    lead = 0.0
    steady = replace(
        status, nodes=tuple(replace(node, leaves=None) for node in status.nodes), quotas={}
    )
    decision = by_name("ours", changes=most, lead=lead).decide(steady, {})
    changed = [
        each.spec.id
        for each in steady.jobs
        if each.allocation and decision.allocations.get(each.spec.id) != each.allocation
    ]
    assert len(changed) <= most
    check(steady, decision, lead)


@example(statuses())
@quick
def test_a_job_keeps_what_it_has_for_its_least_dwell_time(status):
    steady = replace(status, nodes=tuple(replace(node, leaves=None) for node in status.nodes))
    decision = by_name("ours", dwell=100.0).decide(steady, {})
    for each in steady.jobs:
        if each.allocation and each.changed == status.now - 50:
            assert decision.allocations[each.spec.id] == each.allocation


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_higher_priority_is_served_first(name):
    jobs = [job("low"), job("high", submitted=1.0, priority=1, min_replicas=4, max_replicas=4)]
    assert given(by_name(name).decide(cluster(hosts(1), jobs), {})) == {"high": 4}
    assert given(by_name(name).decide(cluster(hosts(2), jobs), {})) == {"high": 4, "low": 4}


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_tenant_gets_its_guarantee_before_others_share(name):
    many = [job(f"m{i}", tenant="many", total=1100.0) for i in range(8)]
    one = job("one", tenant="one", total=1e6)
    status = cluster(hosts(2), [*many, one])
    quotas = {"one": Quota(guaranteed=4)}
    assert given(by_name(name).decide(status, {})).get("one", 0) < 4
    found = given(by_name(name).decide(replace(status, quotas=quotas), {}))
    assert found["one"] == 4
    # A guarantee that is not used is for all.
    alone = given(by_name(name).decide(cluster(hosts(2), many, quotas=quotas), {}))
    assert sum(alone.values()) == 8


def test_a_guarantee_holds_against_a_higher_priority_of_others():
    jobs = [job("mine", tenant="mine"), job("boss", tenant="boss", priority=9)]
    quotas = {"mine": Quota(guaranteed=4)}
    found = given(by_name("ours").decide(cluster(hosts(2), jobs, quotas=quotas), {}))
    assert found == {"boss": 4, "mine": 4}


def test_a_tenant_never_exceeds_its_limit_and_the_rest_goes_to_others():
    jobs = [job(f"{t}{i}", tenant=t) for t in ("a", "b") for i in range(3)]
    quotas = {"a": Quota(limit=4)}
    found = given(by_name("ours").decide(cluster(hosts(4), jobs, quotas=quotas), {}))
    assert sum(size for name, size in found.items() if name[0] == "a") == 4
    assert sum(size for name, size in found.items() if name[0] == "b") == 12


@pytest.mark.parametrize("name", BY_VALUE)
def test_a_job_of_a_fixed_size_has_it_or_nothing(name):
    fixed = job("fixed", min_replicas=6, max_replicas=6)
    found = by_name(name).decide(cluster(hosts(2), [fixed]), {})
    assert found.allocations["fixed"].counts == (4, 2)
    assert by_name(name).decide(cluster(hosts(1), [fixed]), {}).allocations == {}


def test_a_job_that_may_not_be_preempted_stays_when_a_shorter_one_comes():
    stays = job("stays", allocation=on(gpu_0=4), preemptible=False, total=1e9)
    short = job("short", submitted=9.0, total=1001.0, priority=3)
    assert given(by_name("ours").decide(cluster(hosts(1), [stays, short]), {})) == {"stays": 4}


def test_a_node_that_leaves_is_left_and_the_move_costs_nothing_extra():
    nodes = [*hosts(1, leaves=1100.0), *hosts(2, kind="gpu")[1:]]
    moves = job("moves", allocation=on(gpu_0=4), rescale_seconds=1e6, total=1e6)
    found = by_name("ours").decide(cluster(nodes, [moves]), {})
    assert found.allocations == {"moves": on(gpu_1=4)}
    later = by_name("ours").decide(cluster(nodes, [moves], now=900.0), {})
    assert later.allocations == {"moves": on(gpu_0=4)}


def test_a_job_that_may_not_be_preempted_leaves_a_node_that_goes():
    nodes = [*hosts(1, leaves=1010.0), *hosts(2)[1:]]
    moves = job("moves", allocation=on(gpu_0=2), preemptible=False)
    assert by_name("ours").decide(cluster(nodes, [moves]), {}).allocations["moves"].shares == (
        ("gpu-1", 4),
    )


def test_jobs_take_the_kind_that_suits_them_and_never_mix():
    nodes = [*hosts(1, kind="new"), *hosts(1, kind="old")]
    fast = job("fast", speeds=(speeds("new", 4.0), speeds("old", 1.0)))
    same = job("same", speeds=(speeds("new", 1.0), speeds("old", 1.0)))
    found = by_name("ours").decide(cluster(nodes, [fast, same]), {})
    assert {name: a.kind for name, a in found.allocations.items()} == {"fast": "new", "same": "old"}
    only = job("only", kinds=("old",))
    assert by_name("ours").decide(cluster(nodes, [only]), {}).allocations["only"].kind == "old"


def test_a_kind_without_a_table_takes_the_ratio_that_others_have_measured():
    nodes = [*hosts(1, kind="new"), *hosts(1, kind="old")]
    both = job("both", speeds=(speeds("old"), speeds("new", 5.0)), kinds=("old",))
    one = job("one", speeds=(speeds("old"),))
    assert by_name("ours").decide(cluster(nodes, [both, one]), {}).allocations["one"].kind == "new"


def test_old_hints_keep_a_size_and_let_nothing_grow():
    runs = job("runs", allocation=on(gpu_0=2), stale=True)
    assert given(by_name("ours").decide(cluster(hosts(4), [runs]), {})) == {"runs": 2}
    waits = job("waits", stale=True, profiled=4)
    assert given(by_name("ours").decide(cluster(hosts(4), [waits]), {})) == {"waits": 4}


@pytest.mark.parametrize(("name", "first", "factor"), [("ours", 4, 8), ("pollux", 1, 2)])
def test_growth_is_limited_by_what_was_measured(name, first, factor):
    new = job("new", speeds=(), profiled=0)
    assert given(by_name(name).decide(cluster(hosts(8), [new]), {})) == {"new": first}
    known = job("known", profiled=2, allocation=on(gpu_0=2), rescale_seconds=0.1, total=1e7)
    assert given(by_name(name).decide(cluster(hosts(8), [known]), {})) == {"known": 2 * factor}


def test_a_change_must_pay_for_what_it_costs_this_job():
    def decide(seconds):
        runs = job("runs", allocation=on(gpu_0=2), rescale_seconds=seconds, total=1200.0)
        return given(by_name("ours").decide(cluster(hosts(1), [runs]), {}))["runs"]

    assert decide(1.0) == 4
    assert decide(60.0) == 2


def test_nothing_to_decide_is_decided():
    for name in BY_VALUE:
        assert by_name(name).decide(cluster([], [job("a")]), {}).allocations == {}
        assert by_name(name).decide(cluster(hosts(1), []), {}).allocations == {}
    waits = by_name("ours").decide(cluster([], [job("a")]), {}).reasons["a"]
    assert waits.text == "waits: no node has accelerators that it could use"
