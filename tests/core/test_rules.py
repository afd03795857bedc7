import math
import warnings
from dataclasses import astuple, dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.noise import Noise
from resilin.core.rules import (
    CLIP_POLICIES,
    LEGW,
    RULES,
    Factors,
    PowerRule,
    Scaling,
    WeakEvidenceWarning,
    clip_threshold,
    default_rule,
    get_rule,
    group_factors,
    rule_name,
    total_noise,
)

NAMED = [name for name in RULES if name != "legw"]


def one(rule, batch, noise, reference=32, elapsed=0.0):
    (factors,) = group_factors(
        rule, batch_size=batch, reference=reference, noise=[noise], elapsed=elapsed
    )
    return factors


@pytest.mark.parametrize("batch", [8, 32, 48, 256, 512])
@pytest.mark.parametrize("phi", [0.5, 32.0, 4000.0])
def test_the_named_rules_are_the_published_ones(batch, phi):
    noise, scale = Noise(1.0, phi), batch / 32
    gain = (phi / 32 + 1) / (phi / batch + 1)
    efficiency = (phi + 32) / (phi + batch)
    expected = {
        "constant": 1,
        "linear": scale,
        "sqrt": math.sqrt(scale),
        "adascale": gain,
        "sgdscale": gain,
        "adamscale": math.sqrt(gain),
        "surge": math.sqrt(scale) * efficiency,
    }
    for name, lr in expected.items():
        assert one(get_rule(name), batch, noise).lr == pytest.approx(lr), name
    # McCandlish's optimal rate e_max / (1 + phi / B), as a ratio, is AdaScale's gain.
    assert expected["adascale"] == pytest.approx((1 + phi / 32) / (1 + phi / batch))


@given(st.sampled_from(NAMED), st.floats(0, 1e6), st.floats(0, 1e6))
def test_every_rule_leaves_the_reference_batch_alone(name, sqr_norm, trace):
    factors = one(get_rule(name), 32, Noise(sqr_norm, trace))
    for value in astuple(factors):
        assert value == pytest.approx(1)


@given(
    st.floats(0, 2),
    st.floats(0, 2),
    st.integers(1, 31),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_below_the_reference_rates_go_down(p, q, batch, sqr_norm, trace):
    lr = one(PowerRule(p, q), batch, Noise(sqr_norm, trace)).lr
    scale = batch / 32
    assert scale**p * (1 - 1e-9) <= lr <= scale ** (p - q) * (1 + 1e-9)


def test_without_an_estimate_adaptive_rules_do_not_speed_up():
    assert one(get_rule("adascale"), 256, None).lr == 1
    assert one(get_rule("adascale"), 16, None).lr == 0.5
    assert one(get_rule("adamscale"), 256, None) == Factors()


def test_time_constants_follow_the_clock():
    noise = Noise(1.0, 96.0)  # gain 4 x 128/224 at scale 4... in reference units
    gain = noise.gain(128, 32)
    adam = one(get_rule("adamscale"), 128, noise)
    assert adam.beta_power == pytest.approx(gain)
    assert adam.ema_power == pytest.approx(gain)
    # lr * wd per reference step is held: lr' wd' = gain * lr wd.
    assert adam.lr * adam.weight_decay == pytest.approx(gain)

    static = one(get_rule("sqrt"), 128, noise)
    assert static.ema_power == 4
    assert static.lr * static.weight_decay == pytest.approx(4)
    assert static.beta_power == 1

    sgd = one(get_rule("adascale"), 128, noise)
    assert (sgd.beta_power, sgd.weight_decay, sgd.eps, sgd.momentum_power) == (1, 1, 1, 1)
    assert sgd.ema_power == pytest.approx(gain)
    # sgdscale differs in the momentum alone.
    assert one(get_rule("sgdscale"), 128, noise) == replace(sgd, momentum_power=sgd.ema_power)
    linear = one(PowerRule(1, momentum=True), 128, noise)
    assert (linear.lr, linear.momentum_power) == (4, 4)

    malladi = one(PowerRule(0.5, betas=True, eps=True), 128, noise)
    assert (malladi.beta_power, malladi.eps) == (4, 0.5)


def test_a_time_constant_is_kept_over_any_sequence_of_batches():
    # A moving average with decay 0.9 per reference step forgets as much over 12 reference
    # steps, however they are cut.
    rule, remembered = get_rule("linear"), 1.0
    for batch in (32, 64, 96, 16, 16, 32, 128):
        remembered *= 0.9 ** one(rule, batch, None).ema_power
    assert remembered == pytest.approx(0.9**12)


def test_groups_have_their_own_rate_and_share_the_clock():
    noisy, quiet = Noise(0.1, 100.0), Noise(10.0, 1.0)
    rule = get_rule("adamscale")
    a, b = group_factors(rule, batch_size=256, reference=32, noise=[noisy, quiet])
    assert a.lr == pytest.approx(math.sqrt(noisy.gain(256, 32)))
    assert b.lr == pytest.approx(math.sqrt(quiet.gain(256, 32)))
    both = (noisy + quiet).gain(256, 32)
    assert a.beta_power == b.beta_power == pytest.approx(both)
    sgd = group_factors(get_rule("sgdscale"), batch_size=256, reference=32, noise=[noisy, quiet])
    assert [f.lr for f in sgd] == pytest.approx([noisy.gain(256, 32), quiet.gain(256, 32)])
    assert [f.momentum_power for f in sgd] == pytest.approx([both, both])
    assert total_noise([None, quiet]) == quiet
    assert total_noise([None]) is None


def test_legw_warms_up_over_scale_times_as_many_samples():
    rule = LEGW(warmup=10)
    assert one(rule, 128, None, elapsed=0).lr == pytest.approx(2 * 4 / 40)
    assert one(rule, 128, None, elapsed=16).lr == pytest.approx(2 * 20 / 40)
    assert one(rule, 128, None, elapsed=36).lr == pytest.approx(2)
    assert one(rule, 128, None, elapsed=1000).lr == pytest.approx(2)
    assert one(rule, 32, None, elapsed=4).lr == pytest.approx(0.5)
    # The number of optimizer steps in the warm-up is the same at every scale.
    for batch in (8, 32, 320):
        scale = batch / 32
        rates = [one(rule, batch, None, elapsed=step * scale).lr for step in range(12)]
        assert [rate < math.sqrt(scale) * 0.999 for rate in rates] == [True] * 9 + [False] * 3


def test_each_rule_has_its_clock():
    clocks = {name: get_rule(name).clock for name in NAMED}
    assert clocks == {
        "constant": "samples",
        "linear": "samples",
        "sqrt": "samples",
        "adascale": "progress",
        "sgdscale": "progress",
        "adamscale": "progress",
        "muonscale": "progress",
        "surge": "progress",
    }
    for name in NAMED:
        assert get_rule(name).adaptive == (clocks[name] == "progress")
    assert PowerRule(0.5, 0.5, clock="tokens").clock == "tokens"
    assert (LEGW(5).clock, LEGW(5).adaptive) == ("samples", False)
    # A static rate on the progress clock still needs the noise, to know the gain.
    assert PowerRule(0.5, clock="progress").adaptive


def test_users_pass_rules_of_their_own():
    @dataclass(frozen=True)
    class Cautious:
        clock: str = "samples"
        adaptive: bool = False

        def factors(self, scaling: Scaling) -> Factors:
            return Factors(lr=min(2.0, scaling.scale))

    rule = get_rule(Cautious())
    assert one(rule, 320, None).lr == 2
    assert get_rule("legw", warmup=7) == LEGW(7)


def test_rules_have_names_that_every_process_writes_alike():
    class Own:
        clock, adaptive = "samples", False

        def factors(self, scaling: Scaling) -> Factors:
            return Factors()

    for name in NAMED:
        assert rule_name(get_rule(name)) == name
    assert rule_name(LEGW(7)) == "LEGW(warmup=7)"
    assert rule_name(Own()).endswith("<locals>.Own")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: get_rule("cubic"), ValueError, "'cubic'.*must be one of constant, linear"),
        (lambda: get_rule("legw"), ValueError, "rule 'legw'.*warmup"),
        (lambda: get_rule("linear", warmup=3), ValueError, "rule 'linear'.*warmup"),
        (
            lambda: get_rule(PowerRule(1), warmup=3),
            ValueError,
            "can only be passed with a rule name",
        ),
        (lambda: get_rule(3.5), TypeError, "not a scaling rule"),
        (lambda: PowerRule(-1), ValueError, r"p \(-1.0\) must be at least 0"),
        (lambda: PowerRule(1, clock="steps"), ValueError, "must be one of samples, tokens"),
        (lambda: LEGW(0), ValueError, r"warmup \(0.0\) must be above 0"),
        (lambda: Scaling(0, 1, 1), ValueError, r"scale \(0.0\)"),
        (lambda: clip_threshold(0, 1), ValueError, "max_norm"),
        (lambda: clip_threshold(1, 1, "never"), ValueError, "'never'.*must be one of loosen"),
    ],
)
def test_errors_name_the_value_and_the_rule(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_defaults_by_optimizer():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_rule("SGD") == get_rule("adascale")
        assert default_rule("Adam") == default_rule("AdamW") == get_rule("adamscale")
    for weak in ("Adafactor", "Lion"):
        with pytest.warns(WeakEvidenceWarning, match=weak):
            assert default_rule(weak) == PowerRule(0.5, 0.5)
    for has_betas, name in ((False, "muonscale"), (True, "adamscale")):
        with pytest.warns(WeakEvidenceWarning, match=f"Muon, {name}"):
            assert default_rule("Muon", has_betas=has_betas) == get_rule(name)
    with pytest.warns(WeakEvidenceWarning, match="Muon, muonscale"):
        assert default_rule("Muon") == get_rule("muonscale")
    with pytest.raises(ValueError, match="no default rule for optimizer 'LBFGS'"):
        default_rule("LBFGS")


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping(max_norm, gain):
    fixed, invariant, loosen = (
        clip_threshold(max_norm, gain, policy) for policy in ("fixed", "invariant", "loosen")
    )
    assert fixed == max_norm
    assert invariant * math.sqrt(gain) == pytest.approx(max_norm)
    assert loosen == max(fixed, invariant) == clip_threshold(max_norm, gain)
    assert set(CLIP_POLICIES) == {"fixed", "invariant", "loosen"}
