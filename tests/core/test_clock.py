import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.clock import (
    Budget,
    Clock,
    Reference,
    Schedule,
    scheduler_steps,
    step_scale,
)
from resilin.core.stream import SampleStream


def test_the_measures_advance_together():
    clock = Clock().advance(samples=64, scale=2, gain=1.5, tokens=640)
    clock = clock.advance(samples=7, scale=1, gain=1.0)
    assert clock == Clock(steps=2, samples=71, tokens=640, progress=2.5, sample_steps=3)
    reference = Reference(32, tokens_per_step=320)
    assert clock.read("progress", reference) == 2.5
    assert clock.read("samples", reference) == 3
    assert clock.read("tokens", reference) == 2


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 5), st.booleans())
def test_at_the_reference_batch_the_clock_counts_as_a_plain_loop(n, batch, epochs, drop):
    # A plain loop steps its scheduler once per batch, short last batches included.
    tail = "drop" if drop and batch <= n else "short"
    stream, clock, cursor, reference, steps = SampleStream(n), Clock(), 0, Reference(batch), 0
    per_epoch = n // batch if tail == "drop" else math.ceil(n / batch)
    while steps < per_epoch * epochs:
        span = stream.batch(cursor, batch, tail=tail)
        scale = step_scale(len(span), batch, batch)
        assert scale == 1
        after = clock.advance(
            samples=len(span),
            scale=scale,
            gain=1.0,
            sample_steps=stream.reference_steps(span.stop, batch, tail=tail)
            - stream.reference_steps(cursor, batch, tail=tail),
        )
        for name in ("samples", "progress"):
            now, then = clock.read(name, reference), after.read(name, reference)
            assert scheduler_steps(now, then) == 1
        clock, cursor, steps = after, span.stop, steps + 1
    assert clock.read("progress", reference) == steps


@given(
    st.integers(1, 400),
    st.integers(1, 40),
    st.lists(st.integers(1, 200), min_size=1, max_size=9),
    st.sampled_from(["short", "straddle", "drop"]),
)
def test_however_an_epoch_is_cut_it_counts_the_steps_of_the_reference_run(n, ref, sizes, tail):
    stream, clock, cursor = SampleStream(n), Clock(), 0
    while cursor < n:
        batch = sizes[clock.steps % len(sizes)]
        if tail == "drop" and batch > n - cursor % n:
            cursor += n - cursor % n
            continue
        span = stream.batch(cursor, batch, tail=tail)
        readings = [stream.reference_steps(p, ref, tail=tail) for p in (cursor, span.stop)]
        clock = clock.advance(
            samples=len(span),
            scale=step_scale(len(span), batch, ref),
            gain=1.0,
            sample_steps=readings[1] - readings[0],
        )
        cursor = span.stop
    if tail == "short":
        assert clock.read("samples", Reference(ref)) == pytest.approx(math.ceil(n / ref))
    elif tail == "straddle":
        assert clock.read("samples", Reference(ref)) == pytest.approx(cursor / ref)
    else:
        assert stream.reference_steps(n, ref, tail=tail) == n // ref
        # What the reference run drops counts for nothing, also where it was used.
        assert clock.read("samples", Reference(ref)) <= n // ref + 1e-9


def test_a_short_last_batch_has_at_most_the_planned_scale():
    assert step_scale(64, 64, 32) == 2
    assert step_scale(70, 256, 32) == 3
    assert step_scale(5, 16, 32) == 0.5
    assert step_scale(40, 48, 32) == 1.5


@given(st.lists(st.floats(0.01, 20), max_size=60))
def test_a_scheduler_is_stepped_once_per_whole_reference_step(gains):
    clock, calls, reference = Clock(), 0, Reference(1)
    for gain in gains:
        after = clock.advance(samples=1, scale=1, gain=gain)
        now = scheduler_steps(clock.progress, after.progress)
        assert abs(now - gain) < 1.00001
        calls += now
        clock = after
    assert calls == math.floor(clock.read("progress", reference) + 1e-6)


def test_a_shrunk_batch_steps_the_scheduler_seldom_and_rounding_loses_no_step():
    clock, pattern = Clock(), []
    for _ in range(30):
        after = clock.advance(samples=1, scale=1, gain=0.1)
        pattern.append(scheduler_steps(clock.progress, after.progress))
        clock = after
    assert pattern == ([0] * 9 + [1]) * 3
    assert scheduler_steps(0.0, 8.0) == 8


def test_schedules_are_written_for_the_reference_run():
    reference = Reference(32, steps_per_epoch=10)
    clock = Clock(steps=7, samples=6400, progress=50.0, sample_steps=200.0)
    for unit, by_samples, by_progress in (
        ("steps", 200, 50),
        ("epochs", 20, 5),
        ("samples", 6400, 1600),
    ):
        identity = Schedule(lambda time: time, unit=unit)
        assert identity.now(clock, reference) == by_samples
        identity = Schedule(lambda time: time, unit=unit, clock="progress")
        assert identity.now(clock, reference) == by_progress


def test_a_budget_ends_by_length_or_by_cost():
    reference = Reference(32)
    budget = Budget(100, max_samples=5000)
    assert budget.spent(Clock(samples=4999, progress=99.9), reference) is None
    assert "100 of 100 reference steps" in budget.spent(Clock(progress=100.0), reference)
    reason = budget.spent(Clock(samples=5000, progress=60.0), reference)
    assert "5000 of at most 5000 samples" in reason
    assert "60 of 100" in reason
    assert budget.limit(Clock(samples=4990), 64) == 10
    assert budget.limit(Clock(samples=10), 64) == 64
    assert Budget(100).limit(Clock(samples=10**9), 64) == 64
    assert Budget(3, clock="samples").spent(Clock(sample_steps=3.0), reference)


def test_state_round_trips_through_json():
    clock = Clock().advance(samples=3, scale=0.5, gain=0.1, tokens=17.5)
    assert Clock.from_state(json.loads(json.dumps(clock.state()))) == clock


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Clock().advance(samples=0, scale=1, gain=1.0), r"samples \(0\)"),
        (lambda: Clock().advance(samples=1, scale=1, gain=0.0), r"gain \(0.0\) must be above 0"),
        (
            lambda: Clock().advance(samples=1, scale=1, gain=1, sample_steps=-1.0),
            r"sample_steps \(-1.0\) must be at least 0",
        ),
        (lambda: Clock().read("tokens", Reference(1)), "needs tokens_per_step"),
        (lambda: Clock().read("steps", Reference(1)), "must be one of samples, tokens"),
        (lambda: Reference(0), r"reference batch size \(0\)"),
        (lambda: Reference(1, steps_per_epoch=0), "steps_per_epoch"),
        (lambda: scheduler_steps(2.0, 1.0), "moved backwards from 2.0 to 1.0"),
        (lambda: step_scale(9, 8, 8), r"9 samples exceeds its planned batch \(8\)"),
        (lambda: Schedule(abs, unit="epochs").now(Clock(), Reference(1)), "steps_per_epoch"),
        (lambda: Schedule(abs, unit="days"), "'days'.*must be one of steps, epochs"),
        (lambda: Budget(0), "reference_steps"),
        (lambda: Budget(1, max_samples=0), r"max_samples \(0\)"),
    ],
)
def test_errors_name_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()
