import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core import _exact
from resilin.core.momentum import ScaledMomentum, scaled_momentum

MOMENTA = st.floats(0, 1)
POWERS = st.floats(0.01, 500)


@given(st.fractions(0, 1, max_denominator=1000), st.integers(1, 12), st.floats(-1, 1))
def test_one_step_makes_the_buffer_of_several_reference_steps(momentum, power, dampening):
    # In fractions, without rounding: b <- mu b + (1 - d) g, repeated.
    start, gradient = Fraction(3, 7), Fraction(-2, 3)
    buffer = start
    for _ in range(power):
        buffer = momentum * buffer + (1 - Fraction(dampening)) * gradient
    scaled = scaled_momentum(float(momentum), dampening, power)
    by_dampening = scaled.momentum * start + (1 - scaled.dampening) * gradient
    by_gradient = scaled.momentum * start + (1 - dampening) * scaled.gradient * gradient
    assert float(by_dampening) == pytest.approx(float(buffer), rel=1e-12, abs=1e-12)
    assert float(by_gradient) == pytest.approx(float(buffer), rel=1e-12, abs=1e-12)


@given(MOMENTA, st.floats(-1, 1))
def test_a_reference_step_is_untouched(momentum, dampening):
    assert scaled_momentum(momentum, dampening, 1.0) == ScaledMomentum(momentum, dampening, 1.0)


@given(MOMENTA, POWERS, POWERS)
def test_a_step_may_be_cut_anywhere(momentum, first, second):
    one, two = scaled_momentum(momentum, 0.0, first), scaled_momentum(momentum, 0.0, second)
    whole = scaled_momentum(momentum, 0.0, first + second)
    assert one.momentum * two.momentum == pytest.approx(whole.momentum, rel=1e-12, abs=1e-37)
    assert two.momentum * one.gradient + two.gradient == pytest.approx(whole.gradient, rel=1e-12)


@given(st.floats(0, 0.999999), st.floats(-1, 0.9), POWERS)
def test_the_buffer_keeps_its_scale(momentum, dampening, power):
    scaled = scaled_momentum(momentum, dampening, power)
    limit = (1 - scaled.dampening) / (1 - scaled.momentum)
    assert limit == pytest.approx((1 - dampening) / (1 - momentum), rel=1e-7)
    # Nesterov's step along c g + mu' b has the limit g / (1 - mu), too.
    nesterov = scaled.gradient + scaled.momentum / (1 - momentum)
    assert nesterov == pytest.approx(1 / (1 - momentum), rel=1e-9)


@given(POWERS)
def test_nothing_jumps_where_the_quotient_has_no_value(power):
    assert scaled_momentum(0.0, 0.0, power).gradient == 1
    assert scaled_momentum(1.0, 0.0, power).gradient == power
    for near in (1 - 2**-53, 1 + 2**-52, 1 - 1e-12):
        assert scaled_momentum(near, 0.0, power).gradient == pytest.approx(power, rel=1e-8)


@given(st.floats(0.01, 0.99), st.floats(-1, 1))
def test_nothing_jumps_at_the_reference_batch(momentum, dampening):
    for power in (1 - 1e-9, 1 + 1e-9):
        scaled = scaled_momentum(momentum, dampening, power)
        assert scaled.momentum == pytest.approx(momentum, abs=1e-8)
        assert scaled.dampening == pytest.approx(dampening, abs=1e-8)
        assert scaled.gradient == pytest.approx(1, abs=1e-8)


def test_a_momentum_never_becomes_none():
    # 0.9^1e6 is 0 as a float, which SGD takes for "no momentum": it would step along g instead of
    # along the buffer, with a tenth of the length.
    scaled = scaled_momentum(0.9, 0.0, 1e6)
    assert 0 < scaled.momentum < 1e-37
    assert 1 - scaled.dampening == pytest.approx(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 0.0, 2.0), r"momentum \(-0.1\) must be at least 0"),
        ((0.9, math.nan, 2.0), r"dampening \(nan\) must be finite"),
        ((0.9, 0.0, 0.0), r"power \(0.0\) must be above 0"),
    ],
)
def test_errors_name_the_value_and_the_rule(arguments, message):
    with pytest.raises(ValueError, match=message):
        scaled_momentum(*arguments)


@given(st.floats(1e-6, 2), st.floats(-50, 50))
def test_powers_are_those_of_the_machine_but_for_the_last_bits(base, exponent):
    assert _exact.power(base, exponent) == pytest.approx(base**exponent, rel=1e-13)


@given(st.floats(1e-6, 2), st.integers(1, 40))
def test_geometric_sums(base, terms):
    exact = sum(Fraction(base) ** k for k in range(terms))
    power, total = _exact.geometric(base, terms)
    assert total == pytest.approx(float(exact), rel=1e-15)
    assert power == _exact.power(base, terms)
