from __future__ import annotations

from dataclasses import replace

import pytest

from resilin.cluster.backends.base import PartState, PartStatus
from resilin.cluster.controller import records as r
from resilin.cluster.controller.carry_out import MARGIN
from resilin.cluster.controller.changes import apply
from resilin.cluster.controller.rules import Rules, Start, Stop
from resilin.cluster.controller.state import Phase
from resilin.cluster.controller.step import step
from resilin.cluster.decision import Decision
from resilin.cluster.node import Allocation
from tests.cluster.controller.made import Even, node, state_of, submitted

RULES = Rules(logs="/logs")
A, B = node("a"), node("b")


class Cluster:
    """A backend that does what it is told at once, unless a test has it do something else."""

    def __init__(self, *jobs, nodes=(A, B), rules=RULES, policy=None):
        self.state = state_of(*jobs)
        self.nodes, self.rules, self.policy = list(nodes), rules, policy or Even()
        self.now, self.parts, self.told, self.acts = 100.0, {}, [], ()

    def turn(self, seconds=1.0, *, obeys=True):
        self.now += seconds
        taken = step(
            self.state, self.nodes, tuple(self.parts.values()), self.now, self.policy, self.rules
        )
        self.state, self.told, self.acts = taken.state, taken.troubles, taken.acts
        for act in taken.acts if obeys else ():
            if isinstance(act, Start):
                self.list(act.name, PartState.RUNNING, self.state.parts[act.name].node)
            elif act.name in self.parts and self.parts[act.name].state is PartState.RUNNING:
                self.end(act.name, 138)
        return [type(record).__name__ for record in taken.records]

    def list(self, name, state, place):
        self.parts.setdefault(name, PartStatus(name=name, state=state, node=place))

    def end(self, name, code):
        self.parts[name] = replace(self.parts[name], state=PartState.ENDED, code=code)

    def keep(self, record):
        self.state = apply(self.state, record)

    @property
    def running(self):
        return {part.name: part.node for part in self.state.parts.values() if part.asked is None}

    def phase(self, job):
        return self.state.phase(self.state.jobs[job], self.state.by_job().get(job, []))


def test_a_job_starts_on_all_its_nodes_and_finishes():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    assert cluster.acts == (Start("one-g1-1"), Start("one-g1-2"))
    assert cluster.phase("one") is Phase.RUNNING
    cluster.turn()
    assert cluster.acts == ()
    cluster.end("one-g1-1", 0)
    cluster.turn()
    assert cluster.phase("one") is Phase.FINISHED
    # The other part is about to end on its own; it is asked if it does not.
    assert cluster.acts == ()
    cluster.turn(RULES.finishing)
    assert cluster.acts == (Stop("one-g1-2", RULES.grace),)


def test_stops_come_first_and_a_start_waits_for_the_accelerator():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.keep(submitted("two", 101.0))
    cluster.turn(obeys=False)
    assert cluster.acts == (Stop("one-g1-2", RULES.grace),)
    cluster.turn(5.0, obeys=False)
    assert cluster.acts == (Stop("one-g1-2", RULES.grace - 5.0),)
    cluster.end("one-g1-2", 138)
    cluster.turn()
    assert cluster.acts == (Start("two-g2-1"),)
    assert cluster.running == {"one-g1-1": "a", "two-g2-1": "b"}


def test_a_stop_that_is_ignored_is_repeated_without_grace():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.keep(r.CancelAsked(time=cluster.now, job="one"))
    cluster.turn(obeys=False)
    assert {act.grace for act in cluster.acts} == {RULES.grace}
    cluster.turn(RULES.grace + MARGIN, obeys=False)
    assert {act.grace for act in cluster.acts} == {0.0}
    cluster.turn()
    cluster.turn()
    assert cluster.phase("one") is Phase.CANCELLED


def test_a_part_that_gets_no_machine_is_waited_for_and_then_withdrawn():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    cluster.turn(obeys=False)
    cluster.list("one-g1-1", PartState.PENDING, "a")
    cluster.turn(RULES.pending / 2, obeys=False)
    assert cluster.acts == ()
    cluster.turn(RULES.pending, obeys=False)
    assert cluster.acts == (Stop("one-g1-1", 0.0),)
    cluster.end("one-g1-1", None)
    cluster.turn(obeys=False)
    assert cluster.acts == (Start("one-g2-1"),)


def test_failures_without_progress_end_a_job_with_the_reason_and_the_log():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    waits = []
    for number in range(1, RULES.failures + 1):
        cluster.turn(1000.0)
        cluster.turn()
        assert cluster.running == {f"one-g{number}-1": "a"}
        cluster.end(f"one-g{number}-1", 1)
        cluster.turn()
        waits.append(cluster.state.jobs["one"].retry - cluster.now)
    assert waits[:-1] == [5.0, 10.0, 20.0, 40.0]
    assert cluster.phase("one") is Phase.FAILED
    why = cluster.state.jobs["one"].why
    assert why.startswith("it failed 5 times without progress: one-g5-1 on a ended with code 1")
    assert why.endswith("output: /logs/one-g5-1.log")
    assert cluster.running == {}


def test_progress_forgives_failures():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    for number in range(1, 2 * RULES.failures):
        cluster.turn(1000.0)
        cluster.turn()
        hints = {"progress": {"progress": float(number)}}
        cluster.keep(r.Hinted(time=cluster.now, job="one", hints=hints))
        cluster.end(f"one-g{number}-1", 1)
        cluster.turn()
        assert cluster.state.jobs["one"].failures == 1
    assert cluster.phase("one") is Phase.WAITING


def test_one_step_of_progress_does_not_forgive_all_later_failures():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    cluster.keep(r.Hinted(time=0.0, job="one", hints={"progress": {"progress": 1.0}}))
    for number in range(1, RULES.failures + 1):
        cluster.turn(1000.0)
        cluster.turn()
        cluster.end(f"one-g{number}-1", 1)
        cluster.turn()
        assert cluster.state.jobs["one"].failures == min(number, RULES.failures - 1)
    assert cluster.phase("one") is Phase.FAILED


def test_parts_that_fail_together_are_one_failure():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.end("one-g1-1", 1)
    cluster.turn()
    cluster.end("one-g1-2", 1)
    cluster.turn()
    assert cluster.state.jobs["one"].failures == 1
    cluster.turn(10.0)
    assert cluster.running == {"one-g2-1": "a", "one-g2-2": "b"}


def test_a_lost_part_is_no_failure_and_only_it_is_started_again():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.end("one-g1-2", None)
    cluster.turn()
    assert cluster.state.jobs["one"].failures == 0
    assert cluster.running == {"one-g1-1": "a", "one-g1-3": "b"}
    assert cluster.state.jobs["one"].life == 1


def test_a_lost_node_costs_its_part_and_nothing_else():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.nodes.remove(B)
    cluster.end("one-g1-2", None)
    cluster.turn()
    assert cluster.running == {"one-g1-1": "a"}
    assert cluster.acts == ()
    cluster.nodes.append(B)
    cluster.turn()
    assert cluster.running == {"one-g1-1": "a", "one-g1-3": "b"}


def test_a_backend_that_forgets_its_nodes_for_a_moment_stops_nobody():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    known, cluster.nodes = cluster.nodes, []
    cluster.turn(RULES.absent / 3)
    cluster.turn(RULES.absent / 3)
    assert cluster.acts == ()
    cluster.nodes = known
    cluster.turn()
    assert cluster.running == {"one-g1-1": "a", "one-g1-2": "b"}
    cluster.nodes = []
    cluster.turn()
    cluster.turn(RULES.absent)
    assert len(cluster.acts) == 2  # by now they are gone


def test_a_part_that_is_not_listed_for_a_moment_is_not_given_up():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    cluster.turn()
    cluster.turn()
    known, cluster.parts = cluster.parts, {}
    cluster.turn(RULES.absent / 2)
    cluster.turn(RULES.absent / 2)
    assert cluster.acts == ()
    cluster.parts = known
    cluster.turn()
    cluster.parts = {}
    cluster.turn()
    cluster.turn(RULES.absent)
    assert cluster.running == {"one-g2-1": "a"}
    assert cluster.state.jobs["one"].failures == 0


def test_an_answer_that_is_late_does_not_revive_a_part():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    cluster.turn()
    cluster.turn()
    late = dict(cluster.parts)
    cluster.end("one-g1-1", 1)
    cluster.turn()
    now, cluster.parts = cluster.parts, late
    assert "Announced" not in cluster.turn()
    cluster.parts = now
    cluster.turn(10.0)
    assert cluster.running == {"one-g2-1": "a"}
    assert cluster.state.jobs["one"].failures == 1


def test_a_part_of_a_known_job_that_nobody_announced_is_adopted_and_replaced():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[node("a", 2)])
    cluster.list("one-g7-3", PartState.RUNNING, "a")
    cluster.turn(obeys=False)
    assert cluster.state.parts["one-g7-3"].accelerators == 2  # as many as it may have
    assert cluster.acts == (Stop("one-g7-3", RULES.grace),)
    cluster.end("one-g7-3", 138)
    cluster.turn()
    assert cluster.acts == (Start("one-g8-1"),)


def test_a_part_of_a_former_life_that_comes_back_is_ended_without_saving():
    cluster = Cluster(submitted("one", max_replicas=1))
    cluster.turn()
    cluster.turn()
    lost = cluster.parts.pop("one-g1-1")  # its node is cut off from the network
    cluster.nodes.remove(A)
    cluster.turn()
    cluster.turn(RULES.absent)
    assert cluster.running == {"one-g2-1": "b"}
    cluster.nodes.append(A)
    cluster.parts[lost.name] = lost
    cluster.turn(obeys=False)
    assert cluster.acts == (Stop("one-g1-1", 0.0),)
    assert cluster.running == {"one-g2-1": "b"}


def test_a_part_of_nobody_is_reported_and_its_node_is_left_alone():
    cluster = Cluster(submitted("one"))
    cluster.list("stranger-g1-1", PartState.RUNNING, "a")
    cluster.turn()
    assert cluster.acts == (Start("one-g1-1"),)
    assert cluster.running == {"one-g1-1": "b"}
    (told,) = cluster.told
    assert told.startswith("part stranger-g1-1 on a belongs to no job that is known here")


def test_a_drained_node_is_left_in_time():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.keep(r.Drained(time=cluster.now, node="b", at=cluster.now + 1000.0))
    cluster.turn()
    assert cluster.acts == ()
    cluster.turn(1000.0 - RULES.lead)
    assert cluster.acts == (Stop("one-g1-2", RULES.grace),)
    cluster.turn()
    cluster.turn(2000.0)
    assert cluster.running == {"one-g1-1": "a"}
    cluster.keep(r.Drained(time=cluster.now, node="b", at=None))
    cluster.turn()
    assert cluster.running == {"one-g1-1": "a", "one-g1-3": "b"}


def test_another_number_on_the_same_node_is_another_part_after_the_first_one():
    cluster = Cluster(submitted("one"), nodes=[node("a", 4)])
    cluster.turn()
    cluster.turn()
    cluster.keep(submitted("two", 101.0))
    cluster.turn(obeys=False)
    assert cluster.acts == (Stop("one-g1-1", RULES.grace),)
    cluster.end("one-g1-1", 138)
    cluster.turn()
    assert {part.name: part.accelerators for part in cluster.state.parts.values()} == {
        "one-g2-1": 2,
        "two-g3-1": 2,
    }


def test_a_job_of_a_fixed_size_begins_again_on_another_number_of_nodes():
    cluster = Cluster(submitted("one", min_replicas=2, max_replicas=2))
    cluster.turn()
    cluster.turn()
    assert cluster.state.jobs["one"].hosts == 2
    cluster.nodes = [A, node("b", 2)]
    cluster.policy = Fixed({"one": (("b", 2),)})
    cluster.turn(RULES.interval)
    assert len(cluster.acts) == 2
    cluster.turn()
    cluster.turn()
    assert cluster.state.jobs["one"].hosts == 1
    assert cluster.running == {"one-g2-1": "b"}


class Fixed:
    """A policy that always says the same."""

    name = "fixed"

    def __init__(self, shares):
        self.shares = shares

    def decide(self, status, memory):
        return Decision(
            allocations={
                name: Allocation(kind="cpu", shares=each) for name, each in self.shares.items()
            }
        )


class Failing:
    name = "failing"

    def decide(self, status, memory):
        raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (Fixed({"one": (("a", 2),)}), "a has 1 accelerators too few"),
        (Fixed({"one": (("x", 1),)}), "must not run on kind cpu"),
        (Fixed({"two": (("a", 1),)}), "two must be one of the jobs that have not ended"),
        (Fixed({"one": (("a", 1), ("b", 65))}), "size of one (66) must be from 1 to 64"),
        (Failing(), "ZeroDivisionError: by zero"),
    ],
)
def test_a_policy_that_fails_changes_nothing(policy, told):
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn()
    cluster.policy = policy
    cluster.turn(RULES.interval)
    assert told in cluster.told[0]
    assert cluster.acts == ()
    assert cluster.running == {"one-g1-1": "a", "one-g1-2": "b"}


def test_a_job_never_gets_less_than_its_minimum_whatever_the_policy_says():
    cluster = Cluster(submitted("one", min_replicas=2))
    cluster.turn()
    cluster.turn()
    cluster.policy = Fixed({"one": (("a", 1),)})
    cluster.turn(RULES.interval)
    assert "size of one (1) must be from 2 to 64" in cluster.told[0]
    assert cluster.acts == ()


def test_a_job_with_too_few_nodes_left_is_stopped_also_if_the_policy_fails():
    cluster = Cluster(submitted("one", min_replicas=2))
    cluster.turn()
    cluster.turn()
    cluster.policy = Failing()
    cluster.nodes.remove(B)
    cluster.end("one-g1-2", None)
    cluster.turn()
    assert cluster.acts == (Stop("one-g1-1", RULES.grace),)


def test_the_loss_of_the_rendezvous_store_is_no_failure_of_its_jobs():
    cluster = Cluster(submitted("one", max_replicas=1), nodes=[A])
    cluster.turn()
    cluster.turn()
    cluster.keep(r.Met(time=cluster.now, endpoint="127.0.0.1:1", number=2))
    cluster.end("one-g1-1", 1)
    cluster.turn()
    assert cluster.state.jobs["one"].failures == 0
    cluster.turn(RULES.backoff)
    assert cluster.running == {"one-g2-1": "a"}


def test_memory_of_the_policy_is_kept_and_forgotten_with_another_one():
    cluster = Cluster(submitted("one"))
    cluster.turn()
    cluster.turn(RULES.interval)
    cluster.turn(RULES.interval)
    assert cluster.state.decision.memory == {"rounds": 3}
    assert cluster.state.decision.generation == 1
    cluster.policy = type("Other", (Even,), {"name": "other"})()
    cluster.turn()
    assert cluster.state.decision.memory == {"rounds": 1}
