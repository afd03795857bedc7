import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.time_share import TimeSpent, interval, is_within

costs = st.floats(0.0, 1e4)
shares = st.floats(1e-3, 1.0)


@given(costs, shares)
def test_runs_take_at_most_their_share_and_come_as_often_as_that_allows(cost, share):
    steps = interval(cost, share)
    assert steps >= 1
    assert cost / steps <= share * (1 + 1e-9) or steps == 1
    assert steps == 1 or cost / (steps - 1) > share * (1 - 1e-9)


def test_an_interval_may_have_an_end():
    assert interval(0.5, 0.02) == 25
    assert interval(1e9, 0.02, longest=256) == 256
    assert interval(0.0, 0.02, longest=256) == 1


@given(st.floats(0, 100), st.floats(0, 1000), shares, st.floats(0, 1))
def test_what_was_spent_is_compared_with_the_share_of_the_time(spent, seconds, share, free):
    assert is_within(spent, seconds, share, free=free) == (spent < free + share * seconds)


def test_a_budget_of_nothing_allows_nothing():
    assert not is_within(0.0, 100.0, 0.0)
    assert is_within(0.0, 0.0, 0.005, free=0.1)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=20))
def test_times_add_up(steps):
    time = TimeSpent()
    for seconds, counts in steps:
        time = time.add(seconds, spent=seconds * counts)
    total = math.fsum(seconds for seconds, _ in steps)
    spent = math.fsum(seconds for seconds, counts in steps if counts)
    assert time.seconds == pytest.approx(total)
    assert time.share == pytest.approx(spent / total if total else 0.0)
