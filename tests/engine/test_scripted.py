"""Members change between any two steps, or die in the middle of one: each sample is used once.

The engine is scripted, the rest is real; see `scripted`.
"""

import gc
import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import resilin
from resilin.core.membership import change
from resilin.core.stream import Ownership
from resilin.training.data.cursor import SampleCursor
from tests.engine.scripted import Event, Numbers, World, times_due, times_used, training
from tests.examples import examples

STEADY = Event()
"""Fewer than the tests of the core have: each example trains a job."""


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("resilin").setLevel(logging.ERROR)
    yield
    logging.getLogger("resilin").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """Lets each model look for its schedulers only among the objects that these tests make."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(size, events, *, num_samples=41, batch_size=6, epochs=2, **options):
    """Runs a history, with steady steps after it; no sample may be missing, or used twice."""
    script = training(num_samples, batch_size, epochs, shuffle=True, tail="straddle", **options)
    world = World(script, size)
    try:
        world.run(itertools.chain(events, itertools.repeat(STEADY, 10_000)))
        assert times_used(world) == times_due(world)
        assert min(times_used(world).values()) >= epochs
        (steps,) = {replica.job.clock.steps for replica in world.replicas}
        assert steps == len(world.used)
    finally:
        world.end()
    return world


@st.composite
def histories(draw):
    """How many replicas there are at first, and what happens before and in each step."""
    size = now = draw(st.integers(1, 4))
    events = []
    for _ in range(draw(st.integers(0, 14))):
        leaving = draw(st.sets(st.integers(0, now - 1), max_size=now - 1)) if now > 1 else set()
        joining = draw(st.integers(0, 4 - (now - len(leaving))))
        if draw(st.booleans()):
            leaving, joining = set(), 0
        now += joining - len(leaving)
        lost = set()
        if now > 1 and draw(st.integers(0, 3)) == 0:
            lost = draw(st.sets(st.integers(0, now - 1), min_size=1, max_size=now - 1))
        batch_size = draw(st.none() | st.integers(4, 20))
        events.append(Event(leaving, joining, batch_size, lost))
        now -= len(lost)
    return size, events


@examples(60)
@given(histories(), st.integers(1, 50), st.integers(4, 12), st.none() | st.integers(1, 5))
def test_each_sample_is_used_once_whatever_happens(history, num_samples, batch_size, limit):
    size, events = history
    sizes = {"num_samples": num_samples, "batch_size": batch_size, "max_local_bsz": limit}
    run(size, events, **sizes)


# What went wrong in each where a joiner had another batch size than the others.
SET_BEFORE_THE_LOOP = {
    "some samples are missing": (1, [Event((), 0, 14), Event((), 1), Event({1})], 35, 8),
    "cursors differ": (1, [Event((), 0, 11), Event((), 1)], 10, 10),
    "others leave later": (2, [Event((), 2, 14), STEADY, Event({0}, 1), Event({1, 2})], 35, 8),
}
SET_IN_THE_LOOP = {
    "one ends later": (1, [STEADY, Event((), 0, 5), Event((), 1, 10)], 20, 10),
    "after a loss": (
        2,
        [Event((), 0, 4, {0}), STEADY, Event((), 1, 12), Event({0}, 0, 9), Event((), 1, 18)],
        32,
        7,
    ),
}
CASES = {**SET_BEFORE_THE_LOOP, **SET_IN_THE_LOOP}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_joiner_has_the_batch_size_of_the_others(case):
    size, events, num_samples, batch_size = case
    run(size, events, num_samples=num_samples, batch_size=batch_size)


GROW = [STEADY, Event(joining=1), STEADY, Event(joining=2)]
SHRINK = [STEADY, Event(leaving={0}), STEADY, Event(leaving={1})]
REPLACE = [event for n in (0, 1, 2) for event in (STEADY, Event(leaving={n}, joining=1))]
KILLS = [STEADY, Event(lost={0}), Event(joining=1), Event(lost={1}), Event(lost={0}), STEADY]
ALL = [Event({2}, 1, 9), Event({0}, 1, 4), Event(lost={1}, batch_size=11), Event(joining=1)]


@pytest.mark.parametrize("events", [GROW, SHRINK, REPLACE, KILLS, ALL])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_workers_that_fetch_ahead(events, num_workers):
    world = run(3, events, num_workers=num_workers, max_local_bsz=2)
    assert world.failed == sum(bool(event.lost) for event in events)


def test_the_same_members_anew_are_another_generation():
    # As after a connection that broke with nobody gone: a step fails, and the next one is theirs.
    world = World(training(20, 5, 1), 2)
    try:
        assert world._step(())
        world.roster = change(world.roster)
        for replica in world.replicas:
            replica.engine.lost = True
        world.run(itertools.repeat(STEADY, 100))
    finally:
        world.end()
    assert sorted(times_used(world)) == list(range(20))


def test_a_step_that_failed_moves_nothing_and_is_issued_again():
    world = World(training(20, 4, 1, shuffle=True), 2)
    try:
        assert world._step(())
        survivor = world.replicas[1]
        before = survivor.job.clock, survivor.loader.state_dict()["cursor"]
        assert before[1] == 4
        assert world._step({0})
        assert (survivor.job.clock, survivor.loader.state_dict()["cursor"]) == before
        assert world._step(())
        assert survivor.job.clock.steps == 2
        # Alone now, it has all of the step in which the other one died.
        (part,) = world.used[-1]
        assert len(part) == 4
    finally:
        world.end()


def test_the_proof_can_fail(monkeypatch):
    # A step of 5 over 2 replicas ends in the middle of a round of both.
    events = [STEADY, Event(leaving={0}, joining=1, batch_size=3), STEADY]
    run(2, events, batch_size=5)
    saved = SampleCursor.state_dict

    def by_number(self, membership):
        # Survivors look at the number of replicas alone, and a joiner begins at the cursor.
        if self._dealt is None or self._dealt.replicas != membership.num_replicas:
            self._dealt = Ownership(self.position, membership.num_replicas)
        return self._dealt

    def without(self):
        return {name: value for name, value in saved(self).items() if name != "dealt"}

    monkeypatch.setattr(SampleCursor, "deal", by_number)
    monkeypatch.setattr(SampleCursor, "state_dict", without)
    with pytest.raises(AssertionError):
        run(2, events, batch_size=5)


def test_nobody_joins_within_a_step_of_two_loaders():
    begun = []

    def script(replica):
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", cross_check="off")
        one, two = (
            resilin.AdaptiveDataLoader(Numbers(8), 4, fingerprint=name) for name in ("one", "two")
        )

        def loop():
            for _ in resilin.remaining_epochs_until(1):
                for (a, x), (b, y) in zip(one, two, strict=True):
                    model(torch.cat([x, y])).mean().backward()
                    begun.append(replica.engine.begun)
                    yield [*a.tolist(), *b.tolist()]
                    optimizer.step()
                    optimizer.zero_grad()
                    yield "made"

        return loop()

    world = World(script, 1)
    world.run(itertools.repeat(STEADY, 10))
    assert begun == [1, 2]
