import csv
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core._solver import Problem, Steps
from resilin.core.fit import NORMAL, Fitted, Prior, StepTime, fit
from resilin.core.goodput import best_goodput, best_plan, efficiency, goodput
from resilin.core.noise import Noise, gain
from resilin.core.plan import BatchBounds, PlanError
from resilin.core.throughput import PARAMETERS, SyncShape, ThroughputModel
from tests.examples import examples

DATA = Path(os.environ.get("RESILIN_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "pollux").is_dir(), reason=f"the measured step times are not at {DATA}"
)

MODEL = ThroughputModel(
    compute_start=0.05,
    compute_per_sample=0.002,
    local_sync=0.03,
    local_growth=0.001,
    host_sync=0.12,
    host_growth=0.002,
    overlap=1.8,
    ring=0.6,
)
PLACEMENTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 4), (2, 8), (3, 6), (4, 4), (4, 12)]
LOCAL = (8, 16, 32, 64, 128)
NOISE = Noise(sqr_norm=1.0, trace=500.0)
BOUNDS = BatchBounds(max_batch_size=4096, local_bsz_bounds=(16, 128))

models = st.builds(
    ThroughputModel,
    compute_start=st.floats(1e-6, 1e3),
    compute_per_sample=st.floats(0, 10),
    local_sync=st.floats(0, 1e3),
    local_growth=st.floats(0, 10),
    host_sync=st.floats(0, 1e3),
    host_growth=st.floats(0, 10),
    overlap=st.floats(1, 10),
    ring=st.floats(0, 1),
)
noises = st.none() | st.builds(Noise, st.floats(0, 1e6), st.floats(0, 1e12))


def measure(model, placements=PLACEMENTS, sizes=LOCAL, steps=(1, 3), spread=0.0, rng=None):
    """Steps as the model has them, or with relative errors of a placement and of each step."""
    found = []
    for hosts, replicas in placements:
        shared = spread * rng.standard_normal() if rng else 0.0
        for local_bsz in sizes:
            for num in steps:
                compute = float(model.compute_seconds(local_bsz))
                whole = float(model.step_seconds(hosts, replicas, local_bsz, num))
                error = np.exp(shared + (spread * rng.standard_normal() if rng else 0.0))
                found.append(
                    StepTime(
                        hosts=hosts,
                        replicas=replicas,
                        local_bsz=local_bsz,
                        compute_seconds=compute * error,
                        sync_seconds=max(0.0, whole - num * compute) * error,
                        accumulation_steps=num,
                    )
                )
    return found


def log_error(fitted, model, hosts, replicas, local_bsz):
    placement = (hosts, replicas, local_bsz)
    return np.log(fitted.model.step_seconds(*placement) / model.step_seconds(*placement))


# The model ------------------------------------------------------------------------------------


def test_the_published_form_is_the_model_without_ring():
    model = replace(MODEL, ring=0.0)
    compute, sync = 0.05 + 0.002 * 32, 0.12 + 0.002 * 6
    last = (compute**1.8 + sync**1.8) ** (1 / 1.8)
    assert model.step_seconds(4, 8, 32, 3) == pytest.approx(2 * compute + last)
    assert model.step_seconds(1, 1, 32, 3) == pytest.approx(3 * compute)
    assert model.step_seconds(1, 2, 32) == pytest.approx((compute**1.8 + 0.03**1.8) ** (1 / 1.8))


def test_arguments_broadcast():
    replicas = np.array([1, 2, 8])[:, None]
    hosts = np.array([1, 1, 2])[:, None]
    table = MODEL.step_seconds(hosts, replicas, [8, 16, 32, 64], 2)
    assert table.shape == (3, 4)
    for row, (host, count) in enumerate([(1, 1), (1, 2), (2, 8)]):
        for column, local_bsz in enumerate([8, 16, 32, 64]):
            assert table[row, column] == MODEL.step_seconds(host, count, local_bsz, 2)


@given(models, st.integers(1, 3), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 9))
def test_more_of_anything_never_takes_less_time(model, hosts, replicas, local_bsz, steps):
    seconds = model.step_seconds(hosts, replicas, local_bsz, steps)
    assert np.isfinite(seconds)
    slack = 1 - 1e-12
    assert model.step_seconds(hosts, replicas + 1, local_bsz, steps) >= seconds * slack
    assert model.step_seconds(hosts, replicas, local_bsz + 1, steps) >= seconds * slack
    assert model.step_seconds(hosts, replicas, local_bsz, steps + 1) >= seconds
    # Overlap can hide all of the shorter part, and never makes it longer than one after the other.
    apart = replace(model, overlap=1.0).step_seconds(hosts, replicas, local_bsz, steps)
    assert steps * model.compute_seconds(local_bsz) * slack <= seconds <= apart / slack


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_start": 0.0}, r"compute_start \(0.0\) must be above 0"),
        ({"host_growth": -1.0}, r"host_growth \(-1.0\) must be at least 0"),
        ({"overlap": 11.0}, r"overlap \(11.0\) must be at most 10"),
        ({"ring": 1.5}, r"ring \(1.5\) must be at most 1"),
        ({"local_sync": float("nan")}, r"local_sync \(nan\) must be finite"),
    ],
)
def test_a_model_that_cannot_be_says_why(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)


# The fit --------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_the_jacobian_equals_finite_differences(seed):
    rng = np.random.default_rng(seed)
    placements = np.array(PLACEMENTS, float)
    steps = Steps(
        SyncShape.of(*placements.T), rng.uniform(1, 100, len(placements)), rng.integers(0, 4, 10)
    )
    logs = np.log(MODEL.parameters) + rng.normal(0, 0.5, (2, len(PARAMETERS)))
    logs[:, 6:] = np.log([rng.uniform(1.1, 9.9), rng.uniform(0.01, 0.99)])
    _, exact = steps.predict(logs)
    for index in range(len(PARAMETERS)):
        shift = np.zeros(len(PARAMETERS))
        shift[index] = 1e-5
        slope = (steps.predict(logs + shift)[0] - steps.predict(logs - shift)[0]) / 2e-5
        np.testing.assert_allclose(exact[:, index], slope, atol=1e-8)


def test_the_gradient_is_that_of_the_cost():
    rng = np.random.default_rng(0)
    steps = Steps(SyncShape.of(*np.array(PLACEMENTS, float).T), np.full(10, 32.0), np.zeros(10))
    truth = np.log(MODEL.parameters)[None]
    problem = Problem(
        steps,
        steps.predict(truth)[0][0] + rng.normal(0, 0.3, 20),
        rng.uniform(0.5, 2, 20),
        *Prior().rows(0.1, 32.0),
        noise=0.01,
        noise_weight=4.0,
    )
    variance = np.array([[0.01, 0.04]])

    def cost(logs):
        return problem._cost(logs, steps.predict(logs)[0] - problem.target, variance)[0]

    predicted, jacobian = steps.predict(truth)
    gradient, _ = problem._slopes(truth, variance, predicted - problem.target, jacobian)
    for index, value in enumerate(gradient[0]):
        shift = np.zeros((1, len(PARAMETERS)))
        shift[0, index] = 1e-5
        slope = (cost(truth + shift) - cost(truth - shift)) / 2e-5
        assert value == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_the_spread_of_normal_residuals_is_found():
    rng = np.random.default_rng(7)
    placements = [(1, 1 + count) for count in range(400)]
    steps = measure(MODEL, placements, [32], [1], spread=0.2 / np.sqrt(2), rng=rng)
    assert fit(steps).noise == pytest.approx(0.2, rel=0.1)


def test_the_variance_settles_where_the_cost_is_least():
    steps = Steps(SyncShape.of(*np.array(PLACEMENTS, float).T), np.full(10, 32.0), np.zeros(10))
    residual = np.random.default_rng(1).standard_t(4, (1, 20)) * 0.2
    problem = Problem(
        steps, np.zeros(20), np.ones(20), *Prior().rows(0.1, 32.0), noise=0.01, noise_weight=4.0
    )
    logs, variance = np.log(MODEL.parameters)[None], np.full((1, 2), 0.01)
    for _ in range(100):
        variance = problem._variance(residual, variance)
    least = problem._cost(logs, residual, variance)
    for factor in ([0.98, 1.0], [1.02, 1.0], [1.0, 0.98], [1.0, 1.02]):
        assert problem._cost(logs, residual, variance * factor) > least


@pytest.mark.parametrize("overlap", [1.0, 1.5, 3.0, 8.0])
@pytest.mark.parametrize("ring", [0.1, 0.5, 1.0])
def test_exact_measurements_give_the_model_back(overlap, ring):
    model = replace(MODEL, overlap=overlap, ring=ring)
    fitted = fit(measure(model), Prior(noise=1e-4))
    hosts, replicas = np.array(PLACEMENTS).T[:, :, None]
    assert np.abs(log_error(fitted, model, hosts, replicas, LOCAL)).max() < 2e-3
    assert np.abs(log_error(fitted, model, 8, np.arange(8, 33)[:, None], LOCAL)).max() < 0.02
    assert fitted.model.compute_start == pytest.approx(model.compute_start, rel=1e-3)
    assert fitted.model.compute_per_sample == pytest.approx(model.compute_per_sample, rel=1e-3)
    assert fitted.model.overlap == pytest.approx(overlap, rel=0.05)


def test_no_other_start_finds_a_better_optimum():
    minimize = pytest.importorskip("scipy.optimize").minimize
    steps = measure(MODEL, PLACEMENTS[:6], spread=0.1, rng=np.random.default_rng(5))
    prior = Prior()
    fitted = fit(steps, prior)
    arrays = np.array([(s.hosts, s.replicas, s.local_bsz, s.accumulation_steps) for s in steps]).T
    times = np.log([[s.compute_seconds for s in steps], [s.step_seconds for s in steps]])
    weight = np.full(2 * len(steps), 1 / (1 + 0.5 * 9))
    typical = np.exp([times[0].mean(), np.log(arrays[2]).mean()])
    problem = Problem(
        Steps(SyncShape.of(*arrays[:2]), arrays[2], arrays[3] - 1),
        times.reshape(-1),
        weight,
        *prior.rows(*typical),
        noise=prior.noise**2,
        noise_weight=prior.noise_weight,
    )

    def cost(point):
        logs, variance = point[None, :8], np.exp(point[None, 8:])
        residual = problem.steps.predict(logs)[0] - problem.target
        return problem._cost(logs, residual, variance)[0]

    scales = np.array([fitted.compute_noise, fitted.noise]) / NORMAL
    found = np.log([*fitted.model.parameters, *scales**2])
    bounds = [(-40, 25)] * 6 + [(0, np.log(10)), (np.log(1e-3), 0)] + [(-20, 5)] * 2
    rng = np.random.default_rng(0)
    others = [
        minimize(cost, found + rng.normal(0, 0.7, 10), method="L-BFGS-B", bounds=bounds).fun
        for _ in range(5)
    ]
    assert cost(found) < min(others) + 1e-3


def test_the_same_measurements_in_any_order_give_the_same_model():
    steps = measure(MODEL, spread=0.1, rng=np.random.default_rng(2))
    assert fit(steps).model == fit(steps).model
    backward = fit(steps[::-1])
    np.testing.assert_allclose(backward.model.parameters, fit(steps).model.parameters, rtol=1e-4)


def test_a_weight_counts_as_often_as_it_says():
    steps = measure(MODEL, spread=0.1, rng=np.random.default_rng(3))
    once = [replace(step, weight=3.0) for step in steps[:20]] + steps[20:]
    often = steps[:20] * 3 + steps[20:]
    np.testing.assert_allclose(fit(once).model.parameters, fit(often).model.parameters, rtol=1e-4)
    ignored = [*steps, replace(steps[0], compute_seconds=1e3, weight=0.0)]
    assert fit(ignored).model == fit(steps).model


def test_a_hiccup_hardly_counts():
    steps = measure(MODEL, spread=0.03, rng=np.random.default_rng(4))
    slow = replace(steps[50], sync_seconds=40.0)
    clean, disturbed = fit(steps), fit([*steps[:50], slow, *steps[51:]])
    hosts, replicas = np.array(PLACEMENTS).T[:, :, None]
    assert np.abs(log_error(disturbed, clean.model, hosts, replicas, LOCAL)).max() < 0.05


def test_without_a_measured_wait_the_compute_time_is_still_learned():
    steps = [replace(step, sync_seconds=None) for step in measure(MODEL)]
    fitted = fit(steps)
    assert fitted.model.compute_seconds(50) == pytest.approx(MODEL.compute_seconds(50), rel=0.01)
    assert fitted.spread(4, 8, 32) > fit(measure(MODEL)).spread(4, 8, 32) + 0.1


def test_one_measurement_is_enough_and_known_to_be_little():
    one = measure(MODEL, [(1, 1)], [32], [1])
    fitted = fit(one)
    assert np.abs(log_error(fitted, MODEL, 1, 1, 32)) < 0.05
    alone = fitted.spread(1, 1, 32)
    # The belief says that a reduction takes time; it is not taken to be free until it is seen.
    assert fitted.model.step_seconds(2, 2, 32) > 1.2 * fitted.model.step_seconds(1, 1, 32)
    assert alone < fitted.spread(1, 1, 512) < 1.5
    assert alone < fitted.spread(1, 2, 32) < fitted.spread(2, 2, 32) < fitted.spread(16, 64, 32)
    # Each kind of placement that is seen becomes known.
    more = fit(one + measure(MODEL, [(2, 2)], [32], [1]))
    assert more.spread(2, 2, 32) < 0.7 * fitted.spread(2, 2, 32)


def test_a_belief_can_be_given():
    one = measure(MODEL, [(1, 1)], [32], [1])
    slow = fit(one, Prior(host_sync=(50.0, 0.1), host_over_local=(3.0, 5.0)))
    typical = one[0].compute_seconds
    assert slow.model.host_sync == pytest.approx(50 * typical, rel=0.1)


def test_intervals_cover_what_was_not_seen():
    rng = np.random.default_rng(0)
    prior = Prior()
    inside = []
    for _ in range(60):
        draw = {
            name: belief[0] * np.exp(belief[1] * rng.standard_normal())
            for name, belief in asdict(prior).items()
            if isinstance(belief, tuple)
        }
        host_sync = 0.2 * draw["host_sync"] / 2
        model = ThroughputModel(
            compute_start=0.06,
            compute_per_sample=0.14 / 32,
            local_sync=host_sync / draw["host_over_local"],
            local_growth=host_sync / draw["host_over_local"] * draw["growth"],
            host_sync=host_sync,
            host_growth=host_sync * draw["growth"],
            overlap=float(np.clip(draw["overlap"], 1, 10)),
            ring=min(1.0, draw["ring"]),
        )
        seen = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 3)]
        fitted = fit(measure(model, seen, steps=[1], spread=0.07, rng=rng), prior)
        for hosts, replicas in [(2, 8), (4, 8), (4, 16), (8, 32)]:
            low, high = fitted.interval(hosts, replicas, 32)
            new = model.step_seconds(hosts, replicas, 32) * np.exp(0.1 * rng.standard_normal())
            inside.append(low <= new <= high)
    assert 0.82 < np.mean(inside) < 0.97


def test_wider_levels_give_wider_intervals():
    fitted = fit(measure(MODEL, spread=0.1, rng=np.random.default_rng(6)))
    middle = fitted.model.step_seconds(4, 8, LOCAL)
    last = np.zeros(len(LOCAL))
    for level in (0.1, 0.5, 0.9, 0.99):
        low, high = fitted.interval(4, 8, LOCAL, level=level)
        np.testing.assert_allclose(low * high, middle**2)
        assert (np.log(high / low) > last).all()
        last = np.log(high / low)
    with pytest.raises(ValueError, match=r"level \(1.5\) must be between 0 and 1"):
        fitted.interval(1, 1, 8, level=1.5)


step_times = st.builds(
    lambda hosts, more, **rest: StepTime(hosts=hosts, replicas=hosts + more, **rest),
    hosts=st.integers(1, 10**4),
    more=st.integers(0, 10**5),
    local_bsz=st.floats(1e-3, 1e9),
    compute_seconds=st.floats(1e-9, 1e6),
    sync_seconds=st.none() | st.floats(0, 1e6),
    accumulation_steps=st.integers(1, 10**4),
    weight=st.floats(1e-6, 1e9),
)


@examples(100)
@given(st.lists(step_times, min_size=1, max_size=8))
def test_any_measurements_give_a_finite_model(steps):
    fitted = fit(steps)
    assert isinstance(fitted, Fitted)
    assert np.isfinite(fitted.covariance).all()
    low, high = fitted.interval([1, 1, 64], [1, 8, 512], [1, 32, 1024], [1, 2, 9])
    assert (low > 0).all()
    assert (low < high).all()
    assert not np.isnan(high).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit([]), "need at least one observation"),
        (lambda: replace(STEP, replicas=1), r"replicas \(1\) must be at least hosts \(2\)"),
        (lambda: replace(STEP, compute_seconds=0), r"compute_seconds \(0.0\) must be above 0"),
        (lambda: replace(STEP, sync_seconds=-1), r"sync_seconds \(-1.0\) must be at least 0"),
        (lambda: replace(STEP, accumulation_steps=0), r"accumulation_steps \(0\)"),
        (lambda: Prior(ring=(0.5, 0.0)), r"spread of ring \(0.0\) must be above 0"),
        (lambda: Prior(noise=0.0), r"noise \(0.0\) must be above 0"),
    ],
)
def test_what_cannot_be_fitted_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


STEP = StepTime(hosts=2, replicas=2, local_bsz=8, compute_seconds=0.1)


@needs_data
def test_few_replicas_tell_of_many_on_measured_steps():
    with (DATA / "pollux/traces/imagenet/placements.csv").open() as file:
        rows = [
            (len(row["placement"]), sum(map(int, row["placement"])), int(row["local_bsz"]),
             float(row["step_time"]), float(row["sync_time"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip
    seen = [
        StepTime(hosts=n, replicas=k, local_bsz=m, compute_seconds=t - s, sync_seconds=s)
        for n, k, m, t, s in rows
        if k <= 4
    ]
    hosts, replicas, local_bsz, seconds, _ = np.array([row for row in rows if row[1] > 4]).T
    fitted = fit(seen)
    error = np.abs(np.log(fitted.model.step_seconds(hosts, replicas, local_bsz) / seconds))
    assert np.median(error) < 0.1
    low, high = fitted.interval(hosts, replicas, local_bsz)
    assert 0.8 < ((low <= seconds) & (seconds <= high)).mean() < 0.99


# Goodput --------------------------------------------------------------------------------------


@given(noises, st.floats(1, 1e6), st.floats(1, 1e6))
def test_efficiency_is_gain_over_scale(noise, batch_size, reference):
    expected = gain(noise, batch_size, reference) / (batch_size / reference)
    assert efficiency(noise, batch_size, reference) == pytest.approx(expected)


@given(models, noises, st.integers(1, 64), st.integers(1, 512), st.integers(1, 8))
def test_goodput_is_reference_samples_gained_per_second(model, noise, replicas, local_bsz, steps):
    reference = 96.0
    value = goodput(model, noise, reference, 1, replicas, local_bsz, steps)
    seconds = model.step_seconds(1, replicas, local_bsz, steps)
    worth = reference * gain(noise, replicas * local_bsz * steps, reference)
    assert value == pytest.approx(worth / seconds)
    assert np.isfinite(value)


def test_noise_decides_which_batch_is_best():
    calm, noisy = Noise(1.0, 10.0), Noise(1.0, 1e12)
    small = best_plan(MODEL, calm, 64, BOUNDS, 1, 4)
    large = best_plan(MODEL, noisy, 64, BOUNDS, 1, 4)
    assert small.plan.global_batch_size < large.plan.global_batch_size == 4096
    # A batch below the reference is taken only where it is allowed.
    assert small.plan.global_batch_size >= 64
    lower = best_plan(MODEL, calm, 512, BOUNDS, 1, 4, min_batch_size=64)
    assert 64 <= lower.plan.global_batch_size < 512
    assert best_plan(MODEL, None, 512, BOUNDS, 1, 4).plan.global_batch_size == 512


bounds_strategy = st.builds(
    lambda largest, lower, width, accumulate: BatchBounds(
        max(largest, lower), (lower, lower + width), accumulate
    ),
    st.integers(1, 5000),
    st.integers(0, 64),
    st.integers(1, 200),
    st.booleans(),
)


@given(models, noises, bounds_strategy, st.integers(1, 40), st.integers(1, 3000))
def test_every_candidate_can_be_planned_within_the_bounds(
    model, noise, bounds, replicas, reference
):
    lower, upper = bounds.local_bsz_bounds
    try:
        choice = best_plan(model, noise, reference, bounds, 2, replicas)
    except PlanError:
        # Nothing was overlooked: neither end of what is allowed can be planned.
        for size in {min(reference, bounds.max_batch_size), bounds.max_batch_size}:
            assert not bounds.possible_replicas(size, [replicas])
        assert best_goodput(model, noise, reference, bounds, 2, replicas) == 0
        return
    assert choice.plan.global_batch_size <= bounds.max_batch_size
    assert choice.goodput == max(candidate.goodput for candidate in choice.candidates)
    sizes = [candidate.batch_size for candidate in choice.candidates]
    assert sizes == sorted(set(sizes))
    for candidate in choice.candidates:
        plan = bounds.plan(candidate.batch_size, replicas)
        split = (candidate.local_bsz, candidate.accumulation_steps)
        assert (plan.batch_size, plan.steps) == split
        assert lower <= plan.batch_size <= upper
    assert best_goodput(model, noise, reference, bounds, 2, replicas) == choice.goodput


@pytest.mark.parametrize("replicas", [1, 3, 7, 16])
@pytest.mark.parametrize("trace", [50.0, 1e3, 1e5])
def test_the_grid_misses_little(replicas, trace):
    noise = Noise(1.0, trace)
    choice = best_plan(MODEL, noise, 100, BOUNDS, 4, replicas)
    best = 0.0
    for size in range(100, 4097):
        if BOUNDS.possible_replicas(size, [replicas]):
            plan = BOUNDS.plan(size, replicas)
            seconds = MODEL.step_seconds(4, replicas, plan.batch_size, plan.steps)
            best = max(best, float(size * efficiency(noise, size, 100) / seconds))
    assert choice.goodput > 0.99 * best


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (BatchBounds(), r"max_batch_size \(None\) must be set"),
        (BatchBounds(None, (8, 64)), r"max_batch_size \(None\) must be set"),
        (BatchBounds(100, (60, 64)), "2 replicas cannot be scheduled"),
        (BatchBounds(140, (64, 65)), r"no global batch from 140 to 140 .* over 2 replicas"),
    ],
)
def test_bounds_that_leave_no_choice_say_why(bounds, message):
    with pytest.raises(ValueError, match=message):
        best_plan(MODEL, NOISE, 200, bounds, 1, 2)


def test_the_micro_batch_alone_can_limit_the_batch():
    bounds = BatchBounds(None, (8, 64), gradient_accumulation=False)
    choice = best_plan(MODEL, Noise(1.0, 1e6), 32, bounds, 1, 4)
    assert choice.plan.global_batch_size == 256
    assert choice.plan.steps == 1
