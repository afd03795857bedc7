import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.noise import (
    Noise,
    NoiseAverage,
    NoiseSample,
    default_horizon,
    from_micro_batches,
    from_sums,
    gain,
)

SPLITS = [
    (64, 32, 16, 8),
    (100, 4, 4, 4),
    (33, 32, 32, 32),
    (1, 1, 1, 125),
    (5, 3),
    (7, 7, 7, 1, 1, 1, 2, 30),
    (40, 24),
]
TRIALS = 20_000

# A gradient of 12 coordinates with unequal variances: the truth that the estimators must find.
MEAN = np.linspace(-1, 1, 12) / 4
VARIANCE = np.linspace(0.1, 4, 12)
TRUTH = Noise(sqr_norm=float(MEAN @ MEAN), trace=float(VARIANCE.sum()))


def micro_gradients(sizes, rng, trials=TRIALS):
    """Mean gradients of micro-batches, shape (trials, micro-batches, coordinates)."""
    spread = np.sqrt(VARIANCE / np.array(sizes)[:, None])
    return MEAN + spread * rng.standard_normal((trials, len(sizes), len(MEAN)))


def norms(gradients, weights):
    each = (gradients**2).sum(-1)
    mean = np.einsum("i,tid->td", np.asarray(weights), gradients)
    return each, (mean**2).sum(-1)


def z_score(values, truth):
    values = np.asarray(values)
    return (values.mean() - truth) / (values.std(ddof=1) / math.sqrt(len(values)))


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("weighting", ["samples", "plain mean"])
def test_micro_batch_estimates_are_unbiased_for_unequal_sizes(sizes, weighting):
    rng = np.random.default_rng(sizes)
    share = np.array(sizes) / sum(sizes)
    weights = share if weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
    gradients = micro_gradients(sizes, rng)
    samples = [
        from_micro_batches(sizes, each, mean, weights=None if weighting == "samples" else weights)
        for each, mean in zip(*norms(gradients, weights), strict=True)
    ]
    assert abs(z_score([s.trace for s in samples], TRUTH.trace)) < 3
    assert abs(z_score([s.sqr_norm for s in samples], TRUTH.sqr_norm)) < 3


@pytest.mark.parametrize("sizes", [s for s in SPLITS if max(s) > 1.5 * min(s)], ids=str)
def test_assuming_equal_micro_batches_fails_the_same_test(sizes):
    # What AdaptDL and FairScale compute: every micro-batch is taken to have the mean size.
    rng = np.random.default_rng(sizes)
    n = len(sizes)
    each, mean = norms(micro_gradients(sizes, rng), np.full(n, 1 / n))
    trace = (each.mean(-1) - mean) * n / (n - 1) * sum(sizes) / n
    assert z_score(trace, TRUTH.trace) > 3
    if sizes == (64, 32, 16, 8):
        assert trace.mean() / TRUTH.trace == pytest.approx(1.76, abs=0.03)
    if sizes == (100, 4, 4, 4):
        assert trace.mean() / TRUTH.trace == pytest.approx(5.32, abs=0.1)


def test_the_variance_of_the_trace_does_not_depend_on_the_split():
    rng = np.random.default_rng(0)
    for sizes in ((64, 32, 16, 8), (30, 30, 30, 30)):
        share = np.array(sizes) / sum(sizes)
        each, mean = norms(micro_gradients(sizes, rng), share)
        traces = [from_micro_batches(sizes, e, m).trace for e, m in zip(each, mean, strict=True)]
        theory = math.sqrt(2 * (VARIANCE**2).sum() / (len(sizes) - 1))
        assert np.std(traces) == pytest.approx(theory, rel=0.05)


def test_sums_and_lists_agree():
    sizes, rng = (9, 5, 2), np.random.default_rng(3)
    share = np.array(sizes) / 16
    each, mean = (x[0] for x in norms(micro_gradients(sizes, rng, 1), share))
    by_list = from_micro_batches(sizes, each, mean)
    by_sums = from_sums(
        batch_size=16,
        num_micro_batches=3,
        weighted_sqr_norm=float(share @ each),
        mean_sqr_norm=float(mean),
    )
    explicit = from_micro_batches(sizes, each, mean, weights=share)
    for other in (by_sums, explicit):
        assert other.trace == pytest.approx(by_list.trace, rel=1e-12)
        assert other.sqr_norm == pytest.approx(by_list.sqr_norm, rel=1e-12)
        assert other.batch_size == pytest.approx(16)


def test_per_sample_gradients_are_the_case_of_size_one():
    rng = np.random.default_rng(4)
    gradients = MEAN + np.sqrt(VARIANCE) * rng.standard_normal((64, len(MEAN)))
    each, mean = (gradients**2).sum(-1), gradients.mean(0)
    sample = from_micro_batches([1] * 64, each, float(mean @ mean))
    assert sample.trace == pytest.approx(gradients.var(axis=0, ddof=1).sum())
    assert sample.dof == 63


def test_a_training_set_sampled_without_replacement():
    rng = np.random.default_rng(5)
    data = MEAN + np.sqrt(VARIANCE) * rng.standard_normal((60, len(MEAN)))
    truth, with_set, without = float((data.mean(0) ** 2).sum()), [], []
    sizes = (20, 12, 8)
    for _ in range(8000):
        batch = data[rng.permutation(60)[:40]]
        parts = [p.mean(0) for p in np.split(batch, np.cumsum(sizes)[:-1])]
        each, mean = [float(p @ p) for p in parts], batch.mean(0)
        for population, results in ((60, with_set), (None, without)):
            sample = from_micro_batches(sizes, each, float(mean @ mean), population=population)
            results.append(sample.sqr_norm)
    assert abs(z_score(with_set, truth)) < 3
    assert abs(z_score(without, truth)) > 3


def run(average, sizes, num_steps, rng):
    share = np.array(sizes) / sum(sizes)
    for each, mean in zip(*norms(micro_gradients(sizes, rng, num_steps), share), strict=True):
        average = average.update(from_micro_batches(sizes, each, mean))
    return average


def test_the_average_stays_right_across_a_change_of_scale():
    # 8 micro-batches, then 32. Averages are in units of one sample: nothing is converted.
    reference, before, after = 4, (4,) * 8, (4,) * 32
    truth = TRUTH.gain(sum(after), reference)
    right, peer = [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        average = run(NoiseAverage(horizon=1e6), before, 300, rng)
        right.append(average.noise.gain(sum(after), reference))
        # FairScale's set_scale multiplies the variance by old scale / new scale.
        rescaled = Noise(average.noise.sqr_norm, average.noise.trace * len(before) / len(after))
        peer.append(rescaled.gain(sum(after), reference))
        if seed < 20:
            later = run(average, after, 50, rng).noise.gain(sum(after), reference)
            assert later == pytest.approx(truth, rel=0.15)
    assert abs(z_score(right, truth)) < 3
    assert abs(z_score(peer, truth)) > 3


def test_pooling_by_degrees_of_freedom_beats_a_plain_mean():
    pooled, plain = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        average, traces = NoiseAverage(horizon=1e9), []
        for sizes in ((8,) * 2, (8,) * 16) * 4:
            share = np.array(sizes) / sum(sizes)
            each, mean = (x[0] for x in norms(micro_gradients(sizes, rng, 1), share))
            sample = from_micro_batches(sizes, each, mean)
            average = average.update(sample)
            traces.append(sample.trace)
        pooled.append(average.trace_sum / average.trace_weight)
        plain.append(np.mean(traces))
    assert np.std(pooled) < 0.6 * np.std(plain)
    assert abs(z_score(pooled, TRUTH.trace)) < 3


def test_only_the_average_is_clipped():
    average = NoiseAverage(horizon=1e9)
    for sqr_norm in (-1.0, 3.0):
        average = average.update(NoiseSample(sqr_norm, 1.0, batch_size=10, dof=1))
    assert average.noise.sqr_norm == pytest.approx(1.0)
    assert average.update(NoiseSample(-9.0, -9.0, batch_size=10, dof=1)).noise == Noise(0.0, 0.0)


def test_weight_decays_by_samples_not_by_updates():
    sample = NoiseSample(1.0, 1.0, batch_size=10, dof=1)
    once = NoiseAverage(horizon=100).update(sample).update(sample, elapsed=40)
    assert once.trace_weight == pytest.approx(1 + math.exp(-0.4))
    assert once.sqr_norm_weight == pytest.approx(10 + 10 * math.exp(-0.4))
    assert NoiseAverage(horizon=100).update(sample).noise == Noise(1.0, 1.0)


def test_state_round_trips_through_json():
    average = NoiseAverage(horizon=100).update(NoiseSample(0.1, 0.7, batch_size=10, dof=3))
    assert NoiseAverage.from_state(json.loads(json.dumps(average.state()))) == average


positive = st.floats(1e-6, 1e6)


@given(positive, positive, st.integers(1, 10**6), st.integers(1, 10**6))
def test_gain_lies_between_one_and_the_scale(sqr_norm, trace, batch, reference):
    noise, scale = Noise(sqr_norm, trace), batch / reference
    r = noise.gain(batch, reference)
    assert min(1, scale) * (1 - 1e-12) <= r <= max(1, scale) * (1 + 1e-12)
    assert r == pytest.approx(scale * float(noise.efficiency(batch, reference)))
    # r = (T/B0 + |G|^2) / (T/B + |G|^2)
    direct = (trace / reference + sqr_norm) / (trace / batch + sqr_norm)
    assert r == pytest.approx(direct, rel=1e-9)


def test_gain_at_the_ends():
    assert Noise(0.0, 1.0).gain(80, 10) == pytest.approx(8)
    assert Noise(1.0, 0.0).gain(80, 10) == pytest.approx(1)
    assert Noise(0.0, 0.0).gain(80, 10) == pytest.approx(1)
    assert Noise(0.0, 0.0).gain(5, 10) == pytest.approx(0.5)
    assert gain(None, 80, 10) == 1
    assert gain(None, 5, 10) == 0.5
    assert gain(Noise(1.0, 10.0), 80, 10) == Noise(1.0, 10.0).gain(80, 10)
    assert Noise(2.0, 10.0).phi == 5
    assert Noise(0.0, 10.0).phi == math.inf
    assert math.isnan(Noise(0.0, 0.0).phi)


def test_efficiency_is_vectorised():
    noise, sizes = Noise(1.0, 100.0), np.array([[10, 100], [1000, 10_000]])
    expected = (100 + 10) / (100 + sizes)
    assert noise.efficiency(sizes, 10) == pytest.approx(expected)


def test_parameter_groups_add_up():
    rng = np.random.default_rng(7)
    sizes, split = (6, 3, 1), 5
    share = np.array(sizes) / 10
    gradients = micro_gradients(sizes, rng, 1)
    parts = [gradients[..., :split], gradients[..., split:], gradients]
    first, second, whole = (
        from_micro_batches(sizes, *(x[0] for x in norms(part, share))) for part in parts
    )
    assert first.trace + second.trace == pytest.approx(whole.trace)
    assert first.sqr_norm + second.sqr_norm == pytest.approx(whole.sqr_norm)
    assert Noise(1.0, 2.0) + Noise(3.0, 4.0) == Noise(4.0, 6.0)


def test_default_horizon():
    assert default_horizon(32) == 32_000
    assert default_horizon(32, total_steps=625) == pytest.approx(32 * 31.25)
    assert default_horizon(32, total_steps=1e6) == 32_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_micro_batches([8], [1.0], 1.0), "at least two micro-batches.*1 sizes"),
        (lambda: from_micro_batches([8, 8], [1.0], 1.0), "2 sizes and 1 norms"),
        (lambda: from_micro_batches([8, 0], [1.0, 1.0], 1.0), "must be above 0"),
        (lambda: from_micro_batches([8, 8], [1, 1], 1.0, weights=[1, 1]), "that sum to 1"),
        (lambda: Noise(-1.0, 0.0), r"sqr_norm \(-1.0\) must be at least 0"),
        (lambda: Noise(1.0, math.nan), r"trace \(nan\) must be finite"),
        (lambda: NoiseAverage(horizon=0), r"horizon \(0.0\) must be above 0"),
        (lambda: Noise(1.0, 1.0).gain(0, 8), r"batch_size \(0\) must be above 0"),
        (
            lambda: NoiseAverage(horizon=1).update(NoiseSample(math.inf, 0, 1, 1)),
            "sqr_norm of the noise sample .*finite",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()
