"""The step-time profile: robust, fading, bounded, and the same after a checkpoint."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.fit import StepTime, fit
from resilin.core.profile import HALF_LIFE, MAX_KEYS, WINDOW, StepProfile
from tests.examples import examples

STEP = StepTime(hosts=1, replicas=2, local_bsz=32, compute_seconds=0.1, sync_seconds=0.02)

step_times = st.builds(
    lambda local_bsz, steps, compute, sync: replace(
        STEP,
        local_bsz=local_bsz,
        accumulation_steps=steps,
        compute_seconds=compute,
        sync_seconds=sync,
    ),
    st.sampled_from([8, 16, 32.5]),
    st.integers(1, 2),
    st.floats(1e-3, 10),
    st.none() | st.floats(0, 10),
)
profiles = st.lists(step_times, max_size=40).map(lambda times: observe(StepProfile(), times))


def observe(profile, times):
    for time in times:
        profile = profile.observe(time)
    return profile


def only(profile):
    (step,) = profile.observations()
    return step


def test_an_empty_profile_knows_nothing():
    assert StepProfile().observations() == ()
    assert StepProfile().largest_batch(1) == 0


def test_each_key_has_one_observation_and_a_profile_is_a_value():
    first = StepProfile().observe(STEP)
    times = [
        replace(STEP, hosts=2),
        replace(STEP, replicas=4),
        replace(STEP, local_bsz=16),
        replace(STEP, accumulation_steps=3),
        STEP,
    ]
    later = observe(first, times)
    assert len(later.observations()) == 5
    assert only(first) == STEP
    assert later == observe(first, times)
    assert hash(later) == hash(observe(first, times))


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("num", [1, 4])
def test_hiccups_hardly_move_it(factor, num):
    rng = np.random.default_rng(0)
    normal = [
        replace(STEP, compute_seconds=0.1 * math.exp(0.02 * jitter))
        for jitter in rng.standard_normal(30)
    ]
    hiccup = replace(STEP, compute_seconds=0.1 * factor, sync_seconds=0.02 * factor)
    times = [*normal[:20], *[hiccup] * num]
    step = only(observe(StepProfile(), times))
    assert step.compute_seconds == pytest.approx(0.1, rel=0.05)
    assert step.sync_seconds == pytest.approx(0.02)
    # And it ages nothing: hiccups are no change of conditions.
    assert step.weight > 0.95 * WINDOW


def test_a_lasting_change_is_believed_after_half_a_window():
    slow = replace(STEP, compute_seconds=0.5)
    profile = observe(StepProfile(), [STEP] * 50)
    assert only(observe(profile, [slow] * (WINDOW // 2))).compute_seconds == 0.1
    assert only(observe(profile, [slow] * (WINDOW // 2 + 1))).compute_seconds == 0.5


def weight_of(profile, local_bsz):
    (weight,) = (t.weight for t in profile.observations() if t.local_bsz == local_bsz)
    return weight


def test_other_keys_fade_as_steps_are_observed():
    profile = observe(StepProfile(), [replace(STEP, local_bsz=8)] * 20)
    fresh = weight_of(profile, 8)
    assert fresh == pytest.approx(WINDOW, rel=0.01)
    profile = observe(profile, [STEP] * int(HALF_LIFE))
    assert weight_of(profile, 8) == pytest.approx(fresh / 2)
    assert weight_of(profile, 32) == pytest.approx(WINDOW, rel=0.01)


def test_a_jump_of_the_key_in_use_makes_all_others_fade_at_once():
    profile = observe(StepProfile(), [replace(STEP, local_bsz=8)] * 20 + [STEP] * 20)
    slow = [replace(STEP, compute_seconds=0.2)] * WINDOW
    assert weight_of(observe(profile, slow[:2]), 8) > 8
    after = observe(profile, slow)
    assert weight_of(after, 8) < 0.2
    assert weight_of(observe(after, slow), 32) > 8


def test_old_news_about_a_key_does_not_make_what_is_newer_fade():
    profile = observe(StepProfile(), [STEP] * 20)
    profile = observe(profile, [replace(STEP, local_bsz=8)] * (2 * int(HALF_LIFE)))
    # Conditions had changed while another key was in use.
    back = observe(profile, [replace(STEP, compute_seconds=0.3)] * WINDOW)
    assert weight_of(back, 8) > 8


def test_the_median_follows_a_slow_drift():
    times = [replace(STEP, compute_seconds=0.1 * 1.005**i) for i in range(200)]
    step = only(observe(StepProfile(), times))
    assert step.compute_seconds == pytest.approx(times[-1].compute_seconds, rel=0.05)


def test_a_wait_that_was_measured_now_and_then_is_kept():
    times = [replace(STEP, sync_seconds=None)] * 5 + [STEP] + [replace(STEP, sync_seconds=None)]
    assert only(observe(StepProfile(), times)).sync_seconds == 0.02
    assert only(observe(StepProfile(), times[:5])).sync_seconds is None


def test_its_size_is_bounded_and_the_least_informative_go_first():
    often = [replace(STEP, local_bsz=0.5)] * WINDOW
    once = [replace(STEP, local_bsz=size) for size in range(1, 2 * MAX_KEYS)]
    profile = observe(StepProfile(), often + once)
    sizes = [step.local_bsz for step in profile.observations()]
    assert len(sizes) == MAX_KEYS
    assert sizes == [0.5, *range(MAX_KEYS + 1, 2 * MAX_KEYS)]
    assert len(json.dumps(profile.state())) < 200 * MAX_KEYS


def test_the_largest_batch_is_that_of_the_same_number_of_replicas():
    profile = observe(StepProfile(), [STEP, replace(STEP, accumulation_steps=3, local_bsz=20)])
    profile = profile.observe(replace(STEP, replicas=8, local_bsz=64))
    assert profile.largest_batch(2) == 120
    assert profile.largest_batch(8) == 512
    assert profile.largest_batch(4) == 0


@examples(50)
@given(profiles, st.lists(step_times, max_size=5))
def test_a_checkpoint_restores_all_of_it(profile, later):
    restored = StepProfile.from_state(json.loads(json.dumps(profile.state())))
    assert restored == profile
    assert observe(restored, later) == observe(profile, later)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(clock=-1), r"clock \(-1.0\) must be at least 0"),
        (lambda state: state.update(clock=0.5), r"time of a measurement \(1.0\) must be at most"),
        (lambda s: s["windows"][0]["measured"][0].__setitem__(1, 0), r"compute_seconds \(0.0\)"),
        (lambda s: s["windows"][0]["key"].__setitem__(0, 3), r"replicas \(2\) must be at least ho"),
        (lambda s: s["windows"][0].update(measured=[]), "has 0 measurements; it must have 1 to 9"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong(change, message):
    state = StepProfile().observe(STEP).state()
    change(state)
    with pytest.raises(ValueError, match=message):
        StepProfile.from_state(state)


def test_what_it_gives_can_be_fitted():
    rng = np.random.default_rng(3)
    profile = StepProfile()
    for local_bsz in np.repeat([8, 16, 32, 64], 9):
        seconds = (0.05 + 0.002 * local_bsz) * math.exp(0.05 * rng.standard_normal())
        profile = profile.observe(replace(STEP, local_bsz=local_bsz, compute_seconds=seconds))
    fitted = fit(profile.observations())
    assert fitted.model.compute_seconds(24) == pytest.approx(0.098, rel=0.05)
