"""The autoscaler as state -> state, over plain numbers."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.autoscale import EVERY, FIRST, AutoscaleState, Votes
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.time_share import TimeSpent
from resilin.core.tuner import Decision, Tuner

BOUNDS = BatchBounds(256, (4, 64))
TUNER = Tuner(reference=16, bounds=BOUNDS)
START = AutoscaleState(batch_size=16)


def decision(size, *, explores=False):
    return Decision(batch_size=size, reason="", candidates=(), explores=explores)


def sums(replicas, *, seconds=0.0, sync=0.0, batch_size=0, explores=False, measured=None):
    return Votes(
        batch_size=batch_size,
        explores=float(explores),
        measured=replicas if measured is None else measured,
        seconds=replicas * seconds,
        sync_seconds=replicas * sync,
    )


def step(state, replicas=2, ran=None, hosts=1, **said):
    return state.observe(sums(replicas, **said), ran=ran, hosts=hosts, replicas=replicas)


def test_decisions_are_due_after_a_few_steps_and_then_regularly():
    state, due = START, []
    for number in range(1, 3 * EVERY):
        state = step(state)
        if state.due:
            due.append(number)
    period = EVERY - FIRST
    assert due[:2] == [FIRST, EVERY]
    assert due[2:] == list(range(EVERY + period, 3 * EVERY, period))


def test_a_proposal_takes_effect_on_all_and_counts_anew():
    state = START
    for _ in range(7):
        state = step(state)
    state = step(state, batch_size=32, explores=True)
    assert (state.batch_size, state.exploring, state.since) == (32, True, 1)
    # It stays a trial for as long as the leading replica says so.
    assert step(state, explores=True).exploring
    assert not step(state).exploring


def test_other_replicas_count_anew():
    state = START
    for _ in range(FIRST - 1):
        state = step(state, replicas=2)
    state = step(state, replicas=3)
    assert (state.since, state.replicas, state.due) == (1, 3, False)


def test_a_step_teaches_the_means_of_all_replicas():
    plan = BatchPlan(24, 2, max_local_bsz=4)
    state = step(START, ran=plan, seconds=0.5, sync=0.2)
    (seen,) = state.profile.observations()
    assert (seen.replicas, seen.local_bsz, seen.accumulation_steps) == (2, 4.0, 3)
    assert seen.compute_seconds == pytest.approx(0.1)
    assert seen.sync_seconds == pytest.approx(0.2)
    assert state.trials == TimeSpent(seconds=0.5)
    trial = step(state, ran=plan, seconds=0.25, explores=True)
    assert trial.trials.spent == 0.25
    assert trial.trials.share == pytest.approx(1 / 3)


def test_one_replica_waits_for_nobody():
    state = step(START, replicas=1, ran=BatchPlan(16, 1), seconds=0.5, sync=0.2)
    (seen,) = state.profile.observations()
    assert seen.sync_seconds is None


@pytest.mark.parametrize(
    ("ran", "measured"), [(None, 2), (BatchPlan(16, 2), 1), (BatchPlan(16, 3), 2)]
)
def test_a_step_that_not_all_have_measured_teaches_nothing(ran, measured):
    state = step(START, ran=ran, measured=measured, seconds=1.0)
    assert state.profile == START.profile
    assert state.trials == START.trials
    assert state.since == 1


def test_votes_say_what_a_replica_knows():
    trial = replace(START, exploring=True)
    assert START.votes(None, None, 0.1, leads=True) == (0, 0, 0, 0, 0)
    assert START.votes(decision(32), 0.5, None, leads=True) == (32, 0, 1, 0.5, 0)
    assert START.votes(decision(32, explores=True), 0.5, 0.1, leads=True) == (32, 1, 1, 0.5, 0.1)
    assert trial.votes(None, 0.5, 0.1, leads=True) == (0, 1, 1, 0.5, 0.1)
    assert trial.votes(None, 0.5, 0.1, leads=False) == (0, 0, 1, 0.5, 0.1)


@given(st.data())
def test_all_replicas_hold_the_same_state(data):
    """Replica 0 leads and decides; the others only count. After each ballot all agree."""
    replicas = data.draw(st.integers(1, 3))
    states = [START] * replicas
    proposed = None
    for _ in range(data.draw(st.integers(1, 3 * EVERY))):
        seconds = data.draw(st.floats(0.01, 1.0))
        plan = BatchPlan(BOUNDS.nearest(states[0].batch_size, replicas), replicas, 64)
        votes = [
            state.votes(proposed if rank == 0 else None, seconds, 0.0, leads=rank == 0)
            for rank, state in enumerate(states)
        ]
        said = Votes(*(sum(each) for each in zip(*votes, strict=True)))
        if said.batch_size:
            proposed = None
        states = [s.observe(said, ran=plan, hosts=1, replicas=replicas) for s in states]
        assert all(state == states[0] for state in states)
        if states[0].due:
            size = BOUNDS.nearest(states[0].batch_size, replicas)
            explores = data.draw(st.booleans())
            new = data.draw(st.sampled_from([size, 16, 24, 48]))
            states[0] = replace(states[0], exploring=states[0].exploring and explores)
            proposed = decision(new, explores=explores) if new != size else None


def test_a_decision_is_that_of_the_tuner():
    state = START
    plan = BatchPlan(16, 2, max_local_bsz=64)
    for _ in range(FIRST):
        state = step(state, ran=plan, seconds=0.1, sync=0.01)
    noise = Noise(1.0, 1e4)
    after, chosen = state.decide(TUNER, noise=noise, hosts=1, batch_size=16)
    assert chosen == TUNER.decide(
        profile=state.profile, noise=noise, hosts=1, replicas=2, batch_size=16, explored=0.0
    )
    assert 16 < chosen.batch_size <= 32
    # It takes effect when it comes back in the sums of a step.
    assert after == state
    trial = replace(state, exploring=True)
    assert trial.decide(TUNER, noise=noise, hosts=1, batch_size=16)[0].exploring == chosen.explores


def test_what_was_learned_survives():
    state = START
    plan = BatchPlan(16, 2, max_local_bsz=64)
    for _ in range(9):
        state = step(state, ran=plan, seconds=0.1, explores=True, batch_size=32)
    kept = json.loads(json.dumps(state.state()))
    assert sorted(kept) == ["batch_size", "explored", "profile", "seconds"]
    restored = AutoscaleState.from_state(kept)
    assert (restored.batch_size, restored.trials) == (32, state.trials)
    assert restored.profile == state.profile
    # It decides after a few steps again.
    assert (restored.since, restored.exploring) == (0, False)
