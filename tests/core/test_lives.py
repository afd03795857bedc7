"""When a job that keeps failing is given up, in numbers."""

import pytest

from resilin.core.lives import EARLY, MOST_FRUITLESS, Life, Lives


def after(*lives):
    state = Lives()
    for life in lives:
        state = state.after(life)
    return state


def life(began, ended, seconds=100.0):
    return Life(seconds=seconds, shows=True, began=began, ended=ended)


@pytest.mark.parametrize("seconds", [1.0, 31.0, 4000.0])
def test_lives_that_end_at_one_step_are_counted_however_long_they_are(seconds):
    # The first one has made 20 steps.
    lives = [life(0, 20, seconds)] + [life(20, 20, seconds)] * MOST_FRUITLESS
    assert after(*lives).hopeless
    assert not after(*lives[:-1]).hopeless
    assert after(*lives).best == 20


def test_steps_that_are_made_again_are_not_new():
    assert after(*[life(10, 20)] * (MOST_FRUITLESS + 1)).hopeless
    # Nor are those of a fault that is not always at the very same step.
    assert after(*[life(10, 20), life(10, 19)] * 3).hopeless


def test_one_new_step_is_worth_another_life():
    lives = [life(step, step + 1) for step in range(50)]
    assert after(*lives).fruitless == 0
    stuck = [life(50, 50)] * (MOST_FRUITLESS - 1)
    assert after(*lives, *stuck, life(50, 51)).fruitless == 0


def test_what_was_lost_with_a_machine_is_new_when_it_is_made_again():
    lives = [life(0, 1000), life(1000, 1000), life(500, 600), life(600, 650), life(650, 700)]
    assert after(*lives).fruitless == 0


def test_a_script_that_shows_nothing_is_given_up_only_where_it_fails_early():
    early, late = Life(seconds=EARLY - 1), Life(seconds=EARLY)
    assert after(*[early] * MOST_FRUITLESS).hopeless
    assert after(*[late] * 50).fruitless == 0
    assert after(*[early] * (MOST_FRUITLESS - 1), late).fruitless == 0


def test_a_script_that_never_comes_to_its_first_step_is_given_up():
    slow = Life(seconds=4000.0, shows=True)
    assert after(*[slow] * MOST_FRUITLESS).hopeless
    # And one that has trained before, and fails at its start now.
    silent = Life(seconds=4000.0)
    assert after(life(0, 9), *[silent] * MOST_FRUITLESS).hopeless


def test_a_life_without_a_step_is_known():
    assert life(20, 20).without_step
    assert not life(20, 21).without_step
    # A script that reports no steps may make some, unless it ends early.
    assert Life(seconds=EARLY - 1).without_step
    assert not Life(seconds=EARLY).without_step
    assert Life(seconds=EARLY, shows=True).without_step
