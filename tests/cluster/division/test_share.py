"""Patience: no job waits without end, whatever else comes."""

from __future__ import annotations

import math

from hypothesis import given as example
from hypothesis import strategies as st

from resilin.cluster.policies.by_name import by_name
from tests.cluster.statuses import cluster, hosts, job
from tests.examples import examples

ROUND = 60.0
PATIENCE = 600.0


def longest_waits(arrivals, capacity, rounds, name, patience=PATIENCE):
    """Longest wait of each job: short ones come at each round, and nobody ever ends."""
    policy = by_name(name, patience=patience)
    nodes = hosts(capacity // 4)
    jobs, since, running, longest = {}, {}, {}, {}
    for number in range(rounds):
        now = number * ROUND
        for new in range(arrivals[number] if number < len(arrivals) else 0):
            id = f"j{len(jobs)}"
            jobs[id] = (now, 1 + (new % 2))
            since[id] = now
        statuses = []
        for id, (submitted, least) in jobs.items():
            total = 1e6 if id == "j0" else 1100.0
            statuses.append(
                job(
                    id,
                    submitted=submitted,
                    allocation=running.get(id),
                    min_replicas=least,
                    total=total,
                    waiting_since=since.get(id),
                )
            )
        decision = policy.decide(cluster(nodes, statuses, now=now), {})
        for id in jobs:
            if id in since:
                longest[id] = max(longest.get(id, 0.0), now - since[id])
            if id in decision.allocations:
                since.pop(id, None)
            elif id in running:
                since[id] = now
        running = dict(decision.allocations)
    return longest, sum(least for _, least in jobs.values())


@example(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.sampled_from(["ours", "pollux"]))
@examples(20)
def test_the_wait_is_bounded_for_any_arrival_stream(arrivals, name):
    capacity = 4
    longest, demand = longest_waits(arrivals, capacity, 60, name)
    # Those that are before it in the queue are served first; one accelerator may stay unused in a
    # round, as the next one in the queue needs two.
    turns = math.ceil(demand / (capacity - 1))
    for id, seconds in longest.items():
        assert seconds <= PATIENCE + ROUND * turns, id


def test_without_patience_the_longest_job_would_wait_on():
    arrivals = [1, 8]
    waits, _ = longest_waits(arrivals, 4, 40, "ours")
    assert waits["j0"] <= PATIENCE + ROUND * 5
    endless, _ = longest_waits(arrivals, 4, 40, "ours", patience=1e9)
    assert endless["j0"] > 1800
