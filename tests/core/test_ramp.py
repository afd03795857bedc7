import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.noise import NoiseAverage, from_micro_batches
from resilin.core.ramp import FEWEST, NoiseRamp, lower_phi, student

ascending = st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True).map(sorted)
bounds = st.one_of(st.none(), st.floats(0, 8192), st.just(math.inf))


@given(ascending, st.lists(bounds, max_size=20))
def test_it_grows_one_size_at_a_time_and_only_below_the_bound(sizes, seen):
    ramp = NoiseRamp(sizes)
    size = ramp.sizes[0]
    for bound in seen:
        after = ramp.next(size, bound)
        assert after in ramp.sizes
        place = ramp.sizes.index(size)
        larger = ramp.sizes[place + 1 : place + 2]
        may_grow = bool(larger) and bound is not None and bound > larger[0]
        assert after == (larger[0] if may_grow else size)
        size = after


@given(ascending, st.integers(1, 5000))
def test_a_ramp_with_other_sizes_resumes_below_what_was_reached(sizes, reached):
    size = NoiseRamp(sizes).resume(reached)
    assert size in sizes
    assert size <= reached or size == sizes[0]
    assert not [other for other in sizes if size < other <= reached]


def measured(rng, signal, *, num, sizes=(8, 8), dims=400, horizon=1e9, groups=1):
    """Averages of noise after `num` steps: gradients with covariance 1 in each dimension."""
    averages = [NoiseAverage(horizon=horizon)] * groups
    total = sum(sizes)
    for _ in range(num):
        # What the groups have in common must not count twice as evidence.
        parts = [signal + rng.standard_normal(dims) / math.sqrt(b) for b in sizes]
        mean = sum(b * g for b, g in zip(sizes, parts, strict=True)) / total
        sample = from_micro_batches(sizes, [float(g @ g) for g in parts], float(mean @ mean))
        averages = [average.update(sample) for average in averages]
    return averages


@pytest.mark.parametrize(
    ("sizes", "num", "horizon", "groups"),
    [
        ((8, 8), 9, 1e9, 1),
        ((8, 8), 50, 1e9, 1),
        ((64, 32, 16, 8), 20, 1e9, 1),
        ((8, 8), 100, 320, 1),
        ((8, 8), 20, 1e9, 3),
    ],
)
def test_the_bound_is_below_the_truth_as_often_as_it_says(sizes, num, horizon, groups):
    rng = np.random.default_rng(0)
    dims, trials = 400, 400
    signal = np.full(dims, 0.2)
    truth = dims / float(signal @ signal)
    got = [
        lower_phi(measured(rng, signal, num=num, sizes=sizes, horizon=horizon, groups=groups))
        for _ in range(trials)
    ]
    # 5% of 400 are 20; 4 standard errors more are 37.
    assert sum(bound > truth for bound in got) <= 37
    # And it says something: a bound of 0 would always hold.
    assert np.median(got) > 0.4 * truth


def test_with_more_measurements_it_comes_near():
    rng = np.random.default_rng(1)
    signal = np.full(400, 0.2)
    few, many = (lower_phi(measured(rng, signal, num=num)) for num in (10, 1000))
    assert few < many < 25
    assert many > 21


def test_gradients_without_signal_have_no_limit_and_those_without_noise_have_no_room():
    rng = np.random.default_rng(2)
    assert lower_phi(measured(rng, np.zeros(400), num=200)) > 500
    exact = NoiseAverage(horizon=1e9)
    for _ in range(20):
        exact = exact.update(from_micro_batches((8, 8), (4.0, 4.0), 4.0))
    assert lower_phi([exact]) == 0


def test_nothing_is_concluded_from_few_measurements():
    rng = np.random.default_rng(3)
    signal = np.full(400, 0.2)
    assert lower_phi([NoiseAverage(horizon=1.0)]) is None
    assert lower_phi([]) is None
    assert lower_phi(measured(rng, signal, num=FEWEST - 1)) is None
    assert lower_phi(measured(rng, signal, num=FEWEST + 1)) is not None
    # An average that forgets within four steps never has as many.
    assert lower_phi(measured(rng, signal, num=100, horizon=32)) is None


def test_the_measurements_of_a_state_without_a_spread_count_as_one():
    rng = np.random.default_rng(4)
    (old,) = measured(rng, np.full(400, 0.2), num=500)
    state = {name: value for name, value in old.state().items() if "sqr_weight" not in name}
    state = {name: value for name, value in state.items() if "spread" not in name}
    restored = NoiseAverage.from_state(state)
    assert restored.noise == old.noise
    assert restored.errors is None
    assert NoiseAverage.from_state(old.state()) == old
    later = restored.update(from_micro_batches((8, 8), (70.0, 60.0), 40.0))
    assert later.errors.dof < 0.1


@pytest.mark.parametrize(
    ("probability", "dof", "quantile"),
    # From published tables.
    [
        (0.975, 7, 2.365),
        (0.975, 30, 2.042),
        (0.95, 9, 1.833),
        (0.75, 8, 0.706),
        (0.995, 7, 3.499),
        (0.975, 6, 2.447),
    ],
)
def test_quantiles_of_student(probability, dof, quantile):
    assert student(probability, dof) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoiseRamp(()), "needs at least one size"),
        (lambda: NoiseRamp((0, 1)), r"batch size \(0\) must be at least 1"),
        (lambda: NoiseRamp((8, 8)), r"size 8 of a ramp must be above the one before \(8\)"),
        (lambda: NoiseRamp((8,), confidence=1), r"confidence \(1\) must be at least 0.5 and below"),
        (lambda: NoiseRamp((8,), confidence=math.nan), "must be finite"),
    ],
)
def test_settings_out_of_range_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
