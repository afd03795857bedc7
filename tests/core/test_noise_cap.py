import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.noise import Noise
from resilin.core.noise_cap import MOVE, NoiseCap

references = st.integers(1, 512)
offers = st.integers(1, 10**5)
scales = st.floats(1e-3, 1e7)


@given(references, offers, scales)
def test_it_takes_as_many_reference_batches_as_a_step_is_worth(reference, offered, phi):
    size = NoiseCap(reference).observe(phi).limit(offered)
    assert min(offered, reference) <= size <= offered
    if offered <= reference:
        assert size == offered
        return
    steps, rest = divmod(size, reference)
    gain = Noise(1.0, phi).gain(offered, reference)
    assert rest == 0
    assert steps <= gain * (1 + 1e-9) < steps + 1 + 1e-6


@given(references, offers, offers, scales, scales)
def test_more_noise_or_a_larger_offer_never_lowers_it(reference, first, second, low, high):
    small, large = sorted((first, second))
    low, high = sorted((low, high))
    quiet, noisy = NoiseCap(reference, low), NoiseCap(reference, high)
    assert quiet.limit(large) <= noisy.limit(large)
    if small >= reference:
        assert noisy.limit(small) <= noisy.limit(large)


@given(references, offers)
def test_at_the_ends_of_the_noise(reference, offered):
    cap = NoiseCap(reference)
    assert cap.limit(offered) == min(reference, offered)
    assert cap.observe(0.0).limit(offered) == min(reference, offered)
    whole = max(offered // reference * reference, min(reference, offered))
    assert cap.observe(math.inf).limit(offered) == whole
    assert cap.observe(math.nan) == cap


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), offers)
def test_small_fluctuations_change_nothing(moves, offered):
    cap = NoiseCap(16).observe(100.0)
    for move in moves:
        assert cap.observe(100.0 * MOVE ** (0.99 * move)) is cap
    assert cap.observe(100.0 * MOVE**1.01).phi > 100 * MOVE
    assert cap.observe(100.0 / MOVE**1.01).phi < 100 / MOVE


def test_it_survives_a_file():
    for phi in (None, 3.7, math.inf):
        cap = NoiseCap(8) if phi is None else NoiseCap(8).observe(phi)
        assert NoiseCap(**json.loads(json.dumps(asdict(cap), allow_nan=False))) == cap


def test_settings_out_of_range_are_errors():
    with pytest.raises(ValueError, match=r"reference \(0\) must be at least 1"):
        NoiseCap(0)
    with pytest.raises(ValueError, match=r"phi \(0.0\) must be above 0"):
        NoiseCap(8, 0.0)
    with pytest.raises(ValueError, match=r"the offered batch size \(0\) must be at least 1"):
        NoiseCap(8).limit(0)
