"""FIFO, Tiresias and Optimus: the order of each, and the rules of operators and users for all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given as example

from resilin.cluster.decision import Quota
from resilin.cluster.job import Speeds
from resilin.cluster.policies.by_name import by_name
from resilin.cluster.policies.fifo import Fifo
from resilin.cluster.policies.optimus import Optimus
from resilin.cluster.policies.tiresias import Tiresias
from tests.cluster.statuses import check, cluster, given, hosts, job, on, statuses
from tests.examples import examples

IN_ORDER = ["fifo", "tiresias", "optimus"]
LEAD = 120.0

quick = examples(60)


@pytest.mark.parametrize("name", IN_ORDER)
@example(statuses())
@quick
def test_every_decision_can_be_carried_out_and_keeps_all_rules(name, status):
    limits = {tenant: replace(quota, limit=None) for tenant, quota in status.quotas.items()}
    running = [each for each in status.jobs if each.allocation]
    leaving = {n.name for n in status.nodes if n.leaves and n.leaves <= status.now + LEAD}
    pinned = [
        each
        for each in running
        if not each.spec.preemptible and not leaving & {n for n, _ in each.allocation.shares}
    ]
    decision = by_name(name).decide(status, {})
    # What runs and may not be stopped may exceed a limit that came later; FIFO stops nothing.
    over = running if name == "fifo" else pinned
    check(replace(status, quotas=limits) if over else status, decision, LEAD)
    for each in pinned:
        assert decision.allocations[each.spec.id] == each.allocation
    memory = json.loads(json.dumps(decision.memory))
    assert memory == decision.memory
    assert by_name(name).decide(status, {}) == decision


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_higher_priority_is_served_first(name):
    jobs = [
        job("low", min_replicas=4, max_replicas=4),
        job("high", submitted=1.0, priority=1, min_replicas=4, max_replicas=4),
    ]
    assert given(by_name(name).decide(cluster(hosts(1), jobs), {})) == {"high": 4}
    assert given(by_name(name).decide(cluster(hosts(2), jobs), {})) == {"high": 4, "low": 4}


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_guarantee_holds_against_a_higher_priority_of_others(name):
    jobs = [
        job("boss", tenant="boss", priority=9, min_replicas=4, max_replicas=8),
        job("mine", tenant="mine", min_replicas=4, max_replicas=4),
    ]
    status = cluster(hosts(2), jobs)
    assert given(by_name(name).decide(status, {})) == {"boss": 8}
    quotas = {"mine": Quota(guaranteed=4)}
    found = given(by_name(name).decide(replace(status, quotas=quotas), {}))
    # Tiresias gives a job all it wants or nothing.
    assert found == ({"mine": 4} if name == "tiresias" else {"boss": 4, "mine": 4})


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_tenant_never_exceeds_its_limit_and_the_rest_goes_to_others(name):
    jobs = [job(f"{t}{i}", tenant=t, max_replicas=4) for t in ("a", "b") for i in range(3)]
    quotas = {"a": Quota(limit=3)}
    found = given(by_name(name).decide(cluster(hosts(4), jobs, quotas=quotas), {}))
    assert sum(size for id, size in found.items() if id[0] == "a") == 3
    assert sum(size for id, size in found.items() if id[0] == "b") == 12


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_node_that_leaves_is_left(name):
    nodes = [*hosts(1, leaves=1100.0), *hosts(2)[1:]]
    moves = job("moves", allocation=on(gpu_0=4), min_replicas=4, max_replicas=4)
    found = by_name(name).decide(cluster(nodes, [moves]), {})
    assert found.allocations == {"moves": on(gpu_1=4)}


@pytest.mark.parametrize("name", IN_ORDER)
def test_kinds_are_chosen_by_the_job_and_never_mixed(name):
    nodes = [*hosts(1), *hosts(1, kind="tpu")]
    wide = job("wide", min_replicas=6, max_replicas=6)
    other = job("other", submitted=1.0, min_replicas=2, max_replicas=2, kinds=("tpu",))
    policy = Fifo(backfill=True) if name == "fifo" else by_name(name)
    found = policy.decide(cluster(nodes, [wide, other]), {}).allocations
    assert {id: each.kind for id, each in found.items()} == {"other": "tpu"}


def test_fifo_lets_nobody_pass_a_job_that_waits_unless_it_fills_gaps():
    runs = job("runs", allocation=on(gpu_0=3), max_replicas=3)
    big = job("big", submitted=1.0, min_replicas=4, max_replicas=4)
    small = job("small", submitted=2.0, max_replicas=1)
    status = cluster(hosts(1), [runs, big, small])
    assert given(Fifo().decide(status, {})) == {"runs": 3}
    assert given(Fifo(backfill=True).decide(status, {})) == {"runs": 3, "small": 1}


def test_fifo_is_not_held_up_by_a_tenant_at_its_limit():
    jobs = [job("full", tenant="a", min_replicas=2), job("free", submitted=1.0, max_replicas=2)]
    status = cluster(hosts(1), jobs, quotas={"a": Quota(limit=1)})
    assert given(Fifo().decide(status, {})) == {"free": 2}


def test_fifo_gives_an_elastic_job_what_is_left_and_then_leaves_it_alone():
    jobs = [job("first", max_replicas=3), job("second", submitted=1.0, max_replicas=8)]
    status = cluster(hosts(1), jobs)
    decision = Fifo().decide(status, {})
    assert given(decision) == {"first": 3, "second": 1}
    alone = replace(jobs[1], allocation=decision.allocations["second"])
    assert given(Fifo().decide(cluster(hosts(1), [alone]), {})) == {"second": 1}


def test_tiresias_moves_a_job_to_the_second_queue_after_its_service():
    policy = Tiresias(threshold=400)
    old = job("old", min_replicas=4, max_replicas=4)
    first = policy.decide(cluster(hosts(1), [old], now=1000.0), {})
    assert given(first) == {"old": 4}
    old = replace(old, allocation=first.allocations["old"])
    new = job("new", submitted=1050.0, min_replicas=4, max_replicas=4)
    before = policy.decide(cluster(hosts(1), [old, new], now=1099.0), first.memory)
    assert given(before) == {"old": 4}
    after = policy.decide(cluster(hosts(1), [old, new], now=1100.0), before.memory)
    assert given(after) == {"new": 4}
    # Both have had their service: the one that came to the second queue first is first.
    new = replace(new, allocation=after.allocations["new"])
    waits = replace(old, allocation=None)
    last = policy.decide(cluster(hosts(1), [waits, new], now=1200.0), after.memory)
    assert given(last) == {"old": 4}


def test_tiresias_with_patience_returns_a_job_that_waited_to_the_first_queue():
    both = [job(name, min_replicas=4, max_replicas=4) for name in ("a", "b")]
    memory = {
        "first": ["b"],
        "second": ["a"],
        "running": ["b"],
        "ran": {"a": 100, "b": 10},
        "waited": {"a": 150},
        "now": 900,
    }
    both[1] = replace(both[1], allocation=on(gpu_0=4))
    status = cluster(hosts(1), both, now=1000.0)
    patient = Tiresias().decide(status, memory)
    assert (patient.memory["first"], patient.memory["second"]) == (["b"], ["a"])
    found = Tiresias(patience=2.0).decide(status, memory)
    assert (found.memory["first"], found.memory["second"]) == (["b", "a"], [])


def test_tiresias_gives_an_elastic_job_no_more_than_there_is():
    assert given(Tiresias().decide(cluster(hosts(2), [job("wide")]), {})) == {"wide": 8}


def table(*seconds: float) -> tuple[Speeds, ...]:
    sizes = tuple(range(1, len(seconds) + 1))
    return (Speeds(kind="gpu", sizes=sizes, goodput=tuple(1 / each for each in seconds)),)


def test_optimus_gives_the_next_accelerator_where_it_saves_most_seconds():
    # Savings in seconds: a: 100 x (4 - 3) = 100, then 100 x 0.5 = 50; b: 30 x (4 - 2) = 60, 30.
    a = job("a", speeds=table(4.0, 3.0, 2.5), done=0.0, total=100.0, max_replicas=3)
    b = job("b", speeds=table(4.0, 2.0, 1.0), done=0.0, total=30.0, max_replicas=3)
    sizes = [
        given(Optimus().decide(cluster(hosts(1, count), [a, b]), {})) for count in (2, 3, 4, 5, 6)
    ]
    assert sizes == [
        {"a": 1, "b": 1},
        {"a": 2, "b": 1},
        {"a": 2, "b": 2},
        {"a": 3, "b": 2},
        {"a": 3, "b": 3},
    ]


def test_optimus_stops_where_more_would_be_slower():
    slower = job("slower", speeds=table(4.0, 3.0, 3.5, 1.0), max_replicas=4)
    assert given(Optimus().decide(cluster(hosts(1), [slower]), {})) == {"slower": 2}
