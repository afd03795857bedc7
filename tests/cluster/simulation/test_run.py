"""Small clusters whose outcome can be computed by hand, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.job import JobSpec, Speeds
from resilin.cluster.node import Allocation
from resilin.cluster.policies.by_name import by_name
from resilin.cluster.simulation.run import Settings, simulate
from resilin.cluster.simulation.workload import GivenJob
from resilin.core.trace import CapacityTrace
from tests.examples import examples


def given_job(id: str, submitted: float, work: float, **options: Any) -> GivenJob:
    """A job with a goodput of its size, up to 8."""
    speeds = Speeds(kind="gpu", sizes=(1, 2, 4, 8), goodput=(1.0, 2.0, 4.0, 8.0))
    wishes = JobSpec(id=id, submitted=submitted, **{"max_replicas": 8, **options})
    return GivenJob(wishes=wishes, work=work, speeds=(speeds,))


class Script:
    """A policy that gives what it was told, from each time on."""

    name = "script"

    def __init__(self, *plan: tuple[float, dict[str, dict[str, int]]]) -> None:
        self._plan = plan
        self.seen: list[ClusterStatus] = []

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        self.seen.append(status)
        wanted = [each for start, each in self._plan if start <= status.now][-1]
        there = {job.spec.id for job in status.jobs}
        return Decision(
            allocations={
                id: Allocation(kind="gpu", shares=tuple(shares.items()))
                for id, shares in wanted.items()
                if id in there
            },
            memory={"count": memory.get("count", 0) + 1},
        )


def test_a_job_alone_starts_at_the_next_decision_and_pays_for_its_start():
    # It comes at 7, is decided on at 60, trains from 90 on: 4 per second for 100 seconds.
    found = simulate([given_job("a", 7.0, 400.0)], Script((0, {"a": {"node-000": 4}})))
    (job,) = found.jobs
    assert (job.started, job.finished, job.seconds) == (60.0, 190.0, 183.0)
    assert job.served == 4 * 130
    assert job.restarts == 0
    # 16 nodes of 4, from the first submission to the last end.
    assert found.capacity == 64 * 183


def test_a_change_costs_a_rescale_and_other_nodes_a_start():
    plan = Script(
        (0, {"a": {"node-000": 2}}),
        (120, {"a": {"node-000": 4}}),
        (180, {"a": {"node-001": 4}}),
        (240, {}),
        (300, {"a": {"node-001": 4}}),
    )
    found = simulate(
        [given_job("a", 0.0, 500.0)], plan, Settings(start_seconds=30, rescale_seconds=8)
    )
    (job,) = found.jobs
    # 60 to 120: 30 s x 2 = 60. To 180: 52 s x 4 = 208. To 240: 30 s x 4 = 120. Waits to 300.
    # Then 112 are left: 30 s, and 28 s at 4 a second.
    assert job.finished == 358.0
    assert job.restarts == 3
    assert [each.allocation.size for each in job.stretches] == [2, 4, 4, 4]
    assert [(each.start, each.end) for each in job.stretches][2:] == [
        (180.0, 240.0),
        (300.0, 358.0),
    ]
    seen = [status.jobs[0] for status in plan.seen]
    assert [each.done for each in seen] == [0.0, 60.0, 268.0, 388.0, 388.0]
    assert [each.waiting_since for each in seen] == [0.0, None, None, None, 240.0]
    assert [each.restarts for each in seen] == [0, 0, 1, 2, 2]
    assert {each.rescale_seconds for each in seen} == {8.0}


def test_the_order_of_nodes_alone_changes_nothing():
    plan = Script(
        (0, {"a": {"node-000": 4, "node-001": 4}}), (120, {"a": {"node-001": 4, "node-000": 4}})
    )
    (job,) = simulate([given_job("a", 0.0, 8000.0)], plan).jobs
    assert job.restarts == 0


def test_events_are_decided_on_within_a_grain():
    jobs = [given_job("a", 3.0, 100.0), given_job("b", 81.0, 100.0)]
    both = Script((0, {"a": {"node-000": 1}, "b": {"node-001": 1}}))
    found = simulate(jobs, both, Settings(events=True))
    # Decided at 10, and when b came and a ended; every 60 seconds otherwise.
    assert [status.now for status in both.seen] == [10.0, 70.0, 90.0, 140.0, 200.0]
    assert [job.started for job in found.jobs] == [10.0, 90.0]
    assert [job.finished for job in found.jobs] == [140.0, 220.0]


def test_memory_is_handed_from_decision_to_decision():
    class Counts(Script):
        def decide(self, status, memory):
            self.last = super().decide(status, memory)
            return self.last

    policy = Counts((0, {"a": {"node-000": 1}}))
    found = simulate([given_job("a", 0.0, 300.0)], policy)
    assert policy.last.memory == {"count": found.decisions} == {"count": 6}


def test_ends_are_told_as_asked():
    def totals(**options):
        policy = Script((0, {"a": {"node-000": 8}}))
        jobs = [given_job("a", 0.0, 100.0), given_job("b", 0.0, 100.0)]
        with pytest.raises(ValueError, match="node-000 has 4 accelerators too few"):
            simulate(jobs, policy, Settings(**options))
        return [job.total for job in policy.seen[0].jobs]

    assert totals(end="known") == [100.0, 100.0]
    assert totals(end="unknown") == [None, None]
    first, second = totals(end="wrong")
    assert first != second
    assert totals(end="wrong") == [first, second]
    assert totals(end="wrong", seed=1) != [first, second]
    assert totals(end="wrong", error=0.0) == [100.0, 100.0]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"node-000": 5}, "node-000 has 1 accelerators too few"),
        ({"node-999": 1}, "node-999 must be one of the nodes"),
        ({"node-000": 1}, "gave a 1 accelerators: it must have from 2 to 8"),
        ({"node-000": 4, "node-001": 4, "node-002": 1}, "gave a 9 accelerators"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_an_error(shares, message):
    with pytest.raises(ValueError, match=message):
        simulate([given_job("a", 0.0, 10.0, min_replicas=2)], Script((0, {"a": shares})))


def test_a_policy_that_starves_everyone_is_given_up():
    with pytest.raises(ValueError, match=r"no job has had an accelerator for 604800 seconds: a"):
        simulate([given_job("a", 0.0, 10.0)], Script((0, {})), Settings(interval=3600))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end": "perhaps"}, "end"),
        ({"interval": 0}, "interval"),
        ({"interval": 45, "events": True}, "multiple of grain"),
        ({"rescale_seconds": -1}, "rescale_seconds"),
        ({"adapts": "mood"}, "adapts"),
    ],
)
def test_settings_that_make_no_sense_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_a_workload_without_jobs_is_an_error():
    with pytest.raises(ValueError, match="at least one job"):
        simulate([], Script((0, {})))


@st.composite
def workloads(draw: st.DrawFn) -> list[GivenJob]:
    jobs = []
    for index in range(draw(st.integers(1, 6))):
        least = draw(st.sampled_from([1, 1, 2, 4]))
        jobs.append(
            given_job(
                f"j{index}",
                float(draw(st.integers(0, 600))),
                float(draw(st.integers(1, 4000))),
                min_replicas=least,
                max_replicas=max(least, draw(st.sampled_from([1, 4, 8]))),
                priority=draw(st.integers(0, 1)),
            )
        )
    return sorted(jobs, key=lambda job: job.wishes.submitted)


@pytest.mark.parametrize("name", ["fifo", "tiresias", "optimus", "pollux", "sia", "ours"])
@given(workloads(), st.integers(0, 5))
@examples(12)
def test_on_a_spot_market_no_job_keeps_a_node_that_left_and_all_finish(name, jobs, seed):
    trace = CapacityTrace.spot(16, 3600.0, seed=seed, min_replicas=8, mean_hold=120.0, end="repeat")
    rules = Settings(nodes=4, per_node=4, trace=trace, notice=30.0, seed=seed)

    class Watched:
        """The policy, and the nodes that were up when it decided."""

        def __init__(self) -> None:
            self.name = name
            self._policy = by_name(name)
            self.up: list[tuple[float, set[str]]] = []

        def decide(self, status, memory):
            self.up.append((status.now, {node.name for node in status.nodes}))
            return self._policy.decide(status, memory)

    watched = Watched()
    found = simulate(jobs, watched, rules)
    assert len(found.jobs) == len(jobs)
    for job in found.jobs:
        assert job.finished > job.started >= job.submitted
        for stretch in job.stretches:
            during = [up for now, up in watched.up if stretch.start <= now < stretch.end]
            assert all(node in up for up in during for node, _ in stretch.allocation.shares)
    used = sum(job.served for job in found.jobs)
    assert 0 < used <= found.capacity
    # All that was served was served in the stretches.
    spans = sum((s.end - s.start) * s.allocation.size for j in found.jobs for s in j.stretches)
    assert used == pytest.approx(spans)
    assert simulate(jobs, Watched(), rules) == found


@given(workloads())
@examples(12)
def test_no_two_jobs_ever_share_an_accelerator(jobs):
    found = simulate(jobs, by_name("ours"), Settings(nodes=2, events=True))
    stretches = [stretch for job in found.jobs for stretch in job.stretches]
    for time in {stretch.start for stretch in stretches}:
        at_once = [each for each in stretches if each.start <= time < each.end]
        for node in ("node-000", "node-001"):
            assert sum(dict(each.allocation.shares).get(node, 0) for each in at_once) <= 4
