"""Who holds up a job, in numbers."""

import math
from dataclasses import replace

import pytest

from resilin.core.hang import (
    FIRST_STEPS,
    LONGEST,
    MOST_SEEN,
    PATIENCE,
    USUAL_STEPS,
    Phase,
    Seen,
    Sign,
    find,
    limit,
    look,
)

TIMEOUT = 10.0


class Replicas:
    """Replicas whose counts are moved by hand, and somebody who looks at them each second."""

    def __init__(self, num, step=0.1):
        self.signs = [Sign(rank=r, beats=0, begun=0, phase=Phase.START) for r in range(num)]
        self.seen = look(Seen(), self.signs, 0.0)
        self.step = step

    def set(self, rank, **fields):
        old = self.signs[rank]
        beats = old.beats + 1 if "phase" in fields or "begun" in fields else old.beats
        self.signs[rank] = replace(old, **{"beats": beats, **fields})

    def all(self, phase, **fields):
        for rank in range(len(self.signs)):
            self.set(rank, phase=phase, **fields)

    def wait(self, seconds=1.0, *, frozen=(), elapsed=None):
        """Time goes by, in which nobody does anything but live."""
        while seconds > 0:
            part = min(1.0, seconds)
            for rank, sign in enumerate(self.signs):
                if rank not in frozen:
                    self.signs[rank] = replace(sign, alive=sign.alive + 1)
            self.seen = look(self.seen, self.signs, part if elapsed is None else elapsed)
            seconds -= part
        return self

    def train(self, steps):
        for _ in range(steps):
            for rank, sign in enumerate(self.signs):
                self.set(rank, phase=Phase.STEP, begun=sign.begun + 1)
            self.wait(self.step)
            self.all(Phase.WAITING)
            self.all(Phase.AFTER)
        return self

    def found(self, **options):
        return find(self.seen, self.signs, TIMEOUT, **options)


@pytest.fixture
def job():
    return Replicas(3).train(20)


def test_the_one_that_has_not_come_to_the_reduction_is_guilty(job):
    job.train(1)
    for rank in (0, 2):
        job.set(rank, phase=Phase.WAITING, begun=22)
    job.set(1, phase=Phase.STEP, begun=22)
    job.wait(0.5)
    assert job.wait(TIMEOUT - 0.5).found() is None
    found = job.wait(1).found()
    assert (found.guilty, found.told_apart, found.limit) == ((1,), True, TIMEOUT)
    assert TIMEOUT <= found.quiet < TIMEOUT + 2


def test_one_that_is_in_an_earlier_step_is_guilty(job):
    job.set(1, phase=Phase.AFTER)
    for rank in (0, 2):
        job.set(rank, phase=Phase.WAITING, begun=21)
    assert job.wait(TIMEOUT + 1).found().guilty == (1,)


def test_who_has_reached_nothing_but_all_the_same_place_cannot_be_told_apart(job):
    job.all(Phase.STEP, begun=21)
    found = job.wait(TIMEOUT + 1).found()
    assert (found.guilty, found.told_apart) == ((0, 1, 2), False)


def test_while_anybody_gets_on_nobody_is_guilty(job):
    for _ in range(100):
        job.set(0, phase=Phase.BETWEEN)
        assert job.wait(5).found() is None


def test_two_that_are_stopped_are_both_guilty_whatever_they_were_doing(job):
    job.all(Phase.BETWEEN)
    for rank in (0, 2):
        job.set(rank, stopped=True)
    assert job.wait(TIMEOUT - 1, frozen=(0, 2)).found() is None
    assert job.wait(2, frozen=(0, 2)).found().guilty == (0, 2)


def test_one_that_is_stopped_is_not_the_one_that_is_behind(job):
    # It had come to the reduction, and does not read what the others send.
    job.all(Phase.WAITING, begun=21)
    job.set(1, stopped=True)
    job.wait(TIMEOUT + 1, frozen=(1,))
    assert job.found().guilty == (1,)


def test_one_that_goes_on_after_a_stop_starts_anew(job):
    job.set(1, stopped=True)
    job.wait(TIMEOUT - 1, frozen=(1,))
    job.set(1, stopped=False, phase=Phase.STEP)
    assert job.wait(TIMEOUT - 2).found() is None


@pytest.mark.parametrize("phase", [Phase.START, Phase.DONE])
def test_before_and_after_the_training_there_is_no_limit(job, phase):
    job.set(1, phase=phase)
    assert job.wait(10_000).found() is None
    assert limit(job.seen, job.signs, TIMEOUT) == math.inf
    # The others wait for it, in a step or not.
    job.set(0, phase=Phase.WAITING)
    assert job.wait(10_000).found() is None


@pytest.mark.parametrize("phase", list(Phase))
def test_a_process_that_gives_no_sign_of_life_is_found_in_any_phase(job, phase):
    job.all(phase)
    job.wait(PATIENCE * TIMEOUT + 2, frozen=(2,))
    assert job.found().guilty == (2,)


def test_a_debugger_stops_the_watch(job):
    job.all(Phase.STEP)
    job.set(1, debugged=True)
    assert job.wait(100_000).found() is None


@pytest.mark.parametrize("evaluating", [Phase.BETWEEN, None])
def test_an_evaluation_has_more_time(job, evaluating):
    if evaluating is None:  # in the middle of the loop body
        job.set(1, phase=Phase.AFTER, evaluating=True)
    else:
        job.set(1, phase=evaluating)
    job.set(0, phase=Phase.WAITING, begun=21)
    job.set(2, phase=Phase.WAITING, begun=21)
    assert job.wait(PATIENCE * TIMEOUT - 2).found() is None
    assert job.wait(4).found().guilty == (1,)


def test_the_first_steps_have_more_time():
    job = Replicas(2).train(FIRST_STEPS)
    job.set(0, phase=Phase.WAITING)
    job.set(1, phase=Phase.STEP)
    assert job.wait(PATIENCE * TIMEOUT - 2).found() is None
    assert job.wait(4).found().guilty == (1,)


def test_long_steps_have_more_time():
    job = Replicas(2, step=7.0).train(10)
    job.all(Phase.STEP)
    job.wait(30)
    allowed = limit(job.seen, job.signs, TIMEOUT)
    assert allowed == pytest.approx(USUAL_STEPS * job.seen.usual_step)
    assert 100 < allowed < 160


def test_a_long_pause_that_ended_by_itself_allows_for_others(job):
    job.all(Phase.AFTER)
    job.wait(TIMEOUT)
    job.train(400)
    job.all(Phase.STEP)
    job.wait(1)
    assert limit(job.seen, job.signs, TIMEOUT) == pytest.approx(LONGEST * job.seen.longest)
    assert job.seen.longest >= TIMEOUT - 1
    assert job.wait(2 * TIMEOUT).found() is None


def test_time_that_nobody_has_seen_does_not_count(job):
    # A machine that was suspended for an hour, once between all looks.
    job.all(Phase.STEP)
    job.wait(1)
    job.wait(1, elapsed=3600.0)
    assert job.seen.quiet <= 2 + MOST_SEEN
    assert job.wait(1, elapsed=-3600.0).seen.quiet <= 2 + MOST_SEEN
    assert job.found() is None


def test_those_that_all_wait_leave_it_to_the_agent_that_sees_the_missing_one(job):
    job.all(Phase.WAITING, begun=21)
    job.wait(TIMEOUT + 1)
    assert job.found(others_exist=True).guilty == ()
    # Nobody did anything about it: its whole machine may be the one that hangs.
    job.wait(TIMEOUT)
    assert job.found(others_exist=True).guilty == (0, 1, 2)
    # Without others it is a deadlock among themselves.
    assert job.found().guilty == (0, 1, 2)


def test_nobody_to_look_at_is_no_hang():
    assert find(look(Seen(), [], 1e6), [], TIMEOUT) is None


def test_a_life_begins_anew_with_other_replicas(job):
    job.wait(TIMEOUT)
    job.signs = job.signs[:2]
    job.wait(1)
    assert job.seen.quiet == 0
