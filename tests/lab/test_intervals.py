import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from resilin.lab.intervals import Interval, mean_interval, paired_interval, t_quantile


@given(st.floats(0.001, 0.9999), st.integers(1, 60))
def test_quantiles_are_those_of_scipy(probability, degrees):
    expected = stats.t.ppf(probability, degrees)
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_many_degrees_come_to_the_normal_distribution():
    assert t_quantile(0.975, 10_000) == pytest.approx(1.96, abs=1e-3)
    assert t_quantile(0.5, 7) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("probability", "degrees"), [(0, 1), (1, 1), (1.5, 1), (math.nan, 1), (0.9, 0), (0.9, 1.5)]
)
def test_other_quantiles_are_refused(probability, degrees):
    with pytest.raises(ValueError, match="must be"):
        t_quantile(probability, degrees)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.sampled_from([0.8, 0.95, 0.99]))
def test_an_interval_is_that_of_scipy(values, level):
    found = mean_interval(values, level)
    assert found.num == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    expected = stats.sem(values) * stats.t.ppf((1 + level) / 2, len(values) - 1)
    assert found.half == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_one_value_has_a_mean_and_no_interval():
    found = mean_interval([3.0])
    assert (found.mean, found.num) == (3.0, 1)
    assert math.isnan(found.half)
    assert math.isnan(mean_interval([]).mean)


def test_what_is_not_a_number_makes_the_mean_none():
    found = mean_interval([1.0, math.nan, math.inf])
    assert math.isnan(found.mean)
    assert found.num == 3


def test_pairs_cancel_what_they_share():
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 100, 5)
    values = shared + 1 + rng.normal(0, 0.1, 5)
    difference = paired_interval(list(values), list(shared))
    assert difference.mean == pytest.approx(1, abs=0.2)
    assert difference.half < 0.3 < mean_interval(list(values)).half
    expected = stats.ttest_rel(values, shared).confidence_interval(0.95)
    assert difference.mean - difference.half == pytest.approx(expected.low)
    assert paired_interval([2.0, 3.0], [1.0, 2.0]) == Interval(1.0, 0.0, 2)
    with pytest.raises(ValueError, match=r"\(2\) and others \(1\)"):
        paired_interval([1.0, 2.0], [1.0])
