"""Random histories of the pure step function, in a world that is crashed, late, and forgetful."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.backends.base import PartState, PartStatus
from resilin.cluster.controller import records as r
from resilin.cluster.controller.changes import apply
from resilin.cluster.controller.learn import PART
from resilin.cluster.controller.rules import Rules, Start
from resilin.cluster.controller.state import State
from resilin.cluster.controller.step import step
from resilin.cluster.policies.by_name import by_name
from tests.cluster.controller.made import Even, node, state_of, submitted
from tests.examples import examples

RULES = Rules(interval=20.0, grace=10.0, lead=15.0, pending=60.0, absent=30.0, backoff=2.0)
LATEST = 8.0
"""Seconds by which an act is late at most; a list is as late again. Both are below `absent`."""
NODES = (node("a", 2), node("b", 2), node("c", 1), node("d", 3))


@dataclass
class Process:
    """A part as it is, whatever anybody knows."""

    job: str
    life: int
    node: str
    accelerators: int
    leaves: float | None = None
    code: int | None = None
    ended: bool = False
    pending: bool = False


@dataclass
class World:
    """A backend, and all that can go wrong between it and the controller."""

    dice: random.Random
    now: float = 1000.0
    down: set[str] = field(default_factory=set)
    processes: dict[str, Process] = field(default_factory=dict)
    late: list[tuple[float, str, tuple[object, ...]]] = field(default_factory=list)
    past: list[tuple[float, tuple[PartStatus, ...]]] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)
    faults: bool = True

    def start(self, name: str, job: str, life: int, place: str, accelerators: int) -> None:
        if name in self.processes or place in self.down:
            return  # the former is found, the latter an error
        pending = self.faults and self.dice.random() < 0.1
        self.processes[name] = Process(job, life, place, accelerators, pending=pending)
        self.started[name] += 1

    def stop(self, name: str, grace: float) -> None:
        process = self.processes.get(name)
        if process is not None and not process.ended:
            takes = self.now + self.dice.uniform(0, grace)
            process.leaves = takes if process.leaves is None else min(process.leaves, takes)

    def act(self, kind: str, given: tuple[object, ...]) -> None:
        """An act: done now, twice, later, or, as an error, not at all."""
        fate = self.dice.random() if self.faults else 1.0
        if fate < 0.1:
            return
        if fate < 0.3:
            self.late.append((self.now + self.dice.uniform(0, LATEST), kind, given))
            return
        for _ in range(2 if fate < 0.4 else 1):
            getattr(self, kind)(*given)

    def list(self) -> tuple[PartStatus, ...]:
        found = tuple(
            PartStatus(
                name=name,
                state=PartState.ENDED
                if each.ended
                else PartState.PENDING
                if each.pending
                else PartState.RUNNING,
                node=each.node,
                code=each.code,
            )
            for name, each in self.processes.items()
        )
        self.past = [(at, told) for at, told in self.past if at >= self.now - LATEST]
        self.past.append((self.now, found))
        return self.dice.choice(self.past)[1] if self.faults else found

    def nodes(self) -> tuple[object, ...]:
        if self.faults and self.dice.random() < 0.05:
            return ()  # it forgets them all for once
        return tuple(each for each in NODES if each.name not in self.down)

    def pass_time(self) -> None:
        self.now += self.dice.uniform(0.5, 6.0)
        due = sorted((each for each in self.late if each[0] <= self.now), key=lambda each: each[0])
        self.late = [each for each in self.late if each[0] > self.now]
        for _, kind, its in due:
            getattr(self, kind)(*its)
        for process in self.processes.values():
            if process.leaves is not None and process.leaves <= self.now and not process.ended:
                process.ended, process.code = True, 138
            if process.pending and (not self.faults or self.dice.random() < 0.5):
                process.pending = False

    def trouble(self, jobs: set[str]) -> set[str]:
        """Something happens to a part or to a node; jobs that finish are returned."""
        alive = [each for each in self.processes.values() if not each.ended and not each.pending]
        fate = self.dice.random()
        if fate < 0.1 and alive:
            one = self.dice.choice(alive)
            one.ended, one.code = True, 1
        elif fate < 0.115 and alive:
            one = self.dice.choice(alive)
            for each in alive:
                if each.job == one.job and each.life == one.life:
                    each.ended, each.code = True, 0
            return {one.job}
        elif fate < 0.2:
            lost = self.dice.choice(NODES).name
            self.down.add(lost)
            for each in self.processes.values():
                if each.node == lost and not each.ended:
                    each.ended, each.code = True, None
        elif fate < 0.4 and self.down:
            self.down.discard(self.dice.choice(sorted(self.down)))
        return set()

    def check(self) -> None:
        alive = [each for each in self.processes.values() if not each.ended]
        lives: dict[str, set[int]] = {}
        used: Counter[str] = Counter()
        for each in alive:
            lives.setdefault(each.job, set()).add(each.life)
            used[each.node] += each.accelerators
        twice = {job: its for job, its in lives.items() if len(its) > 1}
        assert not twice, f"two lives at once: {twice}"
        places = Counter((each.job, each.node) for each in alive)
        assert not places or max(places.values()) == 1, f"two parts on one node: {places}"
        most = {each.name: each.accelerators for each in NODES}
        over = {name: count for name, count in used.items() if count > most[name]}
        assert not over, f"more accelerators in use than there are: {over}"
        assert not self.started or max(self.started.values()) == 1


class History:
    """A controller in such a world, whose journal is all that survives its crashes."""

    def __init__(self, dice: random.Random, policy: object) -> None:
        self.dice, self.policy = dice, policy
        self.world = World(dice)
        self.state = state_of()
        self.finished: set[str] = set()

    def keep(self, records: tuple[r.Record, ...]) -> None:
        for record in records:
            self.state = apply(self.state, record)

    def turn(self, *, crashes: bool) -> None:
        world = self.world
        taken = step(self.state, world.nodes(), world.list(), world.now, self.policy, RULES)
        if crashes and self.dice.random() < 0.2:
            # Killed at a line of the journal; or, past the last one, at an act.
            lines = self.dice.randint(0, len(taken.records))
            self.keep(taken.records[:lines])
            acts = self.dice.randint(0, len(taken.acts)) if lines == len(taken.records) else 0
        else:
            self.keep(taken.records)
            assert self.state == taken.state
            acts = len(taken.acts)
        for act in taken.acts[:acts]:
            if isinstance(act, Start):
                part = self.state.parts[act.name]
                found = PART.fullmatch(act.name)
                assert found[1] == part.job
                given = (act.name, part.job, part.life, part.node, part.accelerators)
                world.act("start", given)
            else:
                world.act("stop", (act.name, act.grace))

    def change(self, number: int) -> None:
        """A user or an operator wants something."""
        fate, now = self.dice.random(), self.world.now
        active = [name for name, job in self.state.jobs.items() if job.active]
        if fate < 0.25:
            if number >= 6:
                return
            least = self.dice.choice((1, 1, 2))
            most = self.dice.choice((least, 4, 8))
            name = f"j{len(self.state.jobs)}"
            record = submitted(name, now, min_replicas=least, max_replicas=most)
            self.keep((record,))
        elif fate < 0.256 and active:
            self.keep((r.CancelAsked(time=now, job=self.dice.choice(active)),))
        elif fate < 0.32:
            place = self.dice.choice(NODES).name
            at = self.dice.choice((None, now, now + 60.0))
            self.keep((r.Drained(time=now, node=place, at=at),))


POLICIES = {"even": Even, "ours": lambda: by_name("ours"), "fifo": lambda: by_name("fifo")}


@pytest.mark.parametrize("name", POLICIES)
@examples(60)
@given(seed=st.integers(0, 2**32 - 1), rounds=st.integers(1, 60))
def test_no_history_starts_a_job_twice_or_loses_one(name, seed, rounds):
    history = History(random.Random(seed), POLICIES[name]())
    world = history.world
    history.keep((submitted("first", world.now), submitted("second", world.now)))
    for _ in range(rounds):
        history.change(len(history.state.jobs))
        world.pass_time()
        world.check()
        history.finished |= world.trouble(set(history.state.jobs))
        world.check()
        history.turn(crashes=True)
        world.check()
    # Calm returns: all is carried out, and nobody is forgotten.
    world.faults = False
    world.down.clear()
    for drained in list(history.state.drains):
        history.keep((r.Drained(time=world.now, node=drained, at=None),))
    for _ in range(120):
        world.pass_time()
        history.turn(crashes=False)
        world.check()
    settled(history.state, world)


def settled(state: State, world: World) -> None:
    assert set(state.jobs) >= {"first", "second"}
    alive: dict[str, dict[str, int]] = {}
    for process in world.processes.values():
        if not process.ended:
            alive.setdefault(process.job, {})[process.node] = process.accelerators
    for name, job in state.jobs.items():
        if job.outcome == r.FINISHED:
            codes = [each.code for each in world.processes.values() if each.job == name]
            assert 0 in codes, f"{name} has not finished"
        if job.outcome == r.FAILED:
            codes = [each.code for each in world.processes.values() if each.job == name]
            assert codes.count(1) >= RULES.failures
        wanted = state.wanted.get(name)
        if job.outcome is None and wanted is not None:
            assert alive.get(name) == dict(wanted.shares), f"{name} is not carried out"
        else:
            assert name not in alive, f"{name} ({job.outcome}) still runs"
        assert not job.cancelled or job.outcome is not None
    waiting = [job for job in state.jobs.values() if job.active]
    assert not waiting or state.wanted, "nobody runs"
