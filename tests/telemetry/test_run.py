import dataclasses
import math
import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.events import (
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    StartEvent,
    StepEvent,
    UnknownEvent,
)
from resilin.telemetry.columns import Columns, Steps
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import Damage
from resilin.telemetry.run import Run
from tests.examples import examples


def start(time=0.0, step=0, generation=0, **changes):
    facts = {
        "reference": 32,
        "replicas": 1,
        "hosts": 1,
        "rule": "adascale",
        "optimizer": "SGD",
        "total_steps": 1000.0,
    }
    return StartEvent(time=time, step=step, generation=generation, **{**facts, **changes})


def step(number, time=None, progress=None, **changes):
    facts = {
        "generation": 0,
        "epoch": 0,
        "replicas": 1,
        "batch_size": 64,
        "local_bsz": 64,
        "accumulation_steps": 1,
        "samples": 64 * number,
        "scale": 2.0,
        "gain": 1.5,
        "lr_factor": 1.5,
    }
    return StepEvent(
        time=float(number) if time is None else time,
        step=number,
        progress=1.5 * number if progress is None else progress,
        **{**facts, **changes},
    )


def test_each_kind_of_event_has_its_place():
    others = {
        "rescales": RescaleEvent(time=1.0, step=1, replicas_before=1, replicas=2, reason=""),
        "faults": FaultEvent(time=1.0, step=1, kind="", detail=""),
        "checkpoints": CheckpointEvent(time=1.0, step=1, action="saved", path=""),
        "decisions": DecisionEvent(time=1.0, step=1, batch_size_before=1, batch_size=1, reason=""),
        "epochs": EpochEvent(time=1.0, step=1, epoch=0, samples=1, progress=1.0),
    }
    damage = [Damage("events-a.jsonl", 3, "not a JSON line")]
    events = [start(), *others.values(), UnknownEvent(time=1.0, step=1, kind="new"), step(2)]
    run = Run.from_events(events, name="mine", damage=damage)
    assert (run.name, run.damage) == ("mine", tuple(damage))
    assert run.start == start()
    assert run.reference == 32
    for name, event in others.items():
        assert getattr(run, name) == (event,)
    assert len(run.steps) == 1
    assert run.duration == 2.0


def test_columns_are_the_fields_of_a_step():
    told = [step(1, lr=0.1, trace=6.0, sqr_norm=2.0, loss=0.5, seconds=0.25), step(2)]
    run = Run.from_events(told)
    for column in dataclasses.fields(Steps):
        values = getattr(run.steps, column.name)
        assert values.dtype == np.float64
        assert values.flags.c_contiguous
        expected = [getattr(event, column.name) for event in told]
        expected = [math.nan if value is None else value for value in expected]
        np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(run.noise_scale, [3.0, np.nan])
    np.testing.assert_allclose(run.learning_rate, [0.15, np.nan])


def test_the_columns_of_a_long_run_are_whole():
    run = Run.from_events(step(number) for number in range(10_000))
    np.testing.assert_array_equal(run.steps.step, np.arange(10_000))
    assert run.kept().all()


def test_an_empty_run():
    run = Run.from_events([])
    assert (run.start, run.reference, run.duration) == (None, None, 0.0)
    assert len(run.steps) == len(run.goodput) == len(run.noise_scale) == len(run.kept()) == 0
    assert run.metrics == {}


def test_goodput_is_progress_in_reference_samples_per_second_however_few_steps_are_told():
    run = Run.from_events([start(), step(1), step(2), step(10), step(11, time=12.0)])
    # Reference 32, one step per second, worth 1.5; the last took two seconds.
    np.testing.assert_allclose(run.goodput, [np.nan, 48.0, 48.0, 24.0])


def test_goodput_is_not_known_across_generations_or_without_a_reference():
    told = [step(1), step(2), step(3, generation=1), step(4, generation=1)]
    np.testing.assert_allclose(
        Run.from_events([start(), *told]).goodput, [np.nan, 48.0, np.nan, 48.0]
    )
    assert np.isnan(Run.from_events(told).goodput).all()


def test_noise_without_a_signal_has_no_scale():
    run = Run.from_events([step(1, trace=1.0, sqr_norm=0.0), step(2, trace=1.0, sqr_norm=-1.0)])
    assert np.isnan(run.noise_scale).all()


def test_steps_that_a_later_generation_did_again_do_not_count():
    # Generation 1 goes on from step 4, and is told of from step 6 on; so does not know of 7.
    first = [start(), *(step(n) for n in range(1, 8))]
    second = [
        start(20.0, 4, 1),
        *(step(n, time=20.0 + n, generation=1) for n in (6, 8, 9)),
    ]
    run = Run.from_events(first + second)
    assert run.steps.step[run.kept()].tolist() == [1, 2, 3, 4, 6, 8, 9]
    # Without the start, the first step that is told says it.
    run = Run.from_events(event for event in first + second if isinstance(event, StepEvent))
    assert run.steps.step[run.kept()].tolist() == [1, 2, 3, 4, 5, 6, 8, 9]


def test_a_start_alone_undoes_what_it_begins_before():
    run = Run.from_events([start(), step(1), step(2), step(3), start(9.0, 1, 1)])
    assert run.kept().tolist() == [True, False, False]


def test_a_worker_that_is_started_again_without_state_replaces_what_was_there():
    again = [start(100.0, resumed=True), step(1, time=101.0), step(2, time=102.0)]
    run = Run.from_events([start(), step(1), step(2), step(3), *again])
    assert run.kept().tolist() == [False, False, False, True, True]


def test_a_dying_generation_that_still_writes_does_not_win():
    run = Run.from_events([start(), step(1), start(2.0, 1, 1), step(2, generation=1), step(3)])
    assert run.kept().tolist() == [True, True, False]


def test_the_numbers_of_the_user_are_series():
    run = Run.from_events(
        [
            MetricsEvent(time=0.0, step=0, values={"accuracy": 0.1}),
            step(2, metrics={"perplexity": 9.0}),
            step(4, metrics={"perplexity": 8.0}),
            MetricsEvent(time=5.0, step=3, values={"accuracy": 0.5, "recall": 0.25}),
            MetricsEvent(time=6.0, step=9, values={"accuracy": 0.75}),
        ]
    )
    assert sorted(run.metrics) == ["accuracy", "perplexity", "recall"]
    accuracy = run.metrics["accuracy"]
    assert accuracy.time.tolist() == [0.0, 5.0, 6.0]
    assert accuracy.step.tolist() == [0.0, 3.0, 9.0]
    assert accuracy.value.tolist() == [0.1, 0.5, 0.75]
    # Between steps 2 and 4 by their progress; behind the last one told, it is the last known.
    assert accuracy.progress.tolist() == [0.0, 4.5, 6.0]
    assert run.metrics["perplexity"].progress.tolist() == [3.0, 6.0]


def test_a_series_without_any_step_has_no_progress():
    run = Run.from_events([MetricsEvent(time=5.0, step=3, values={"accuracy": 0.5})])
    assert np.isnan(run.metrics["accuracy"].progress).all()
    assert run.duration == 0.0


def test_points_of_a_series_can_be_done_again_too():
    values = {"accuracy": 0.5}
    run = Run.from_events(
        [
            start(),
            MetricsEvent(time=1.0, step=10, values=values),
            MetricsEvent(time=2.0, step=20, values=values),
            start(3.0, 10, 1),
            MetricsEvent(time=4.0, step=20, generation=1, values=values),
        ]
    )
    assert run.kept(run.metrics["accuracy"]).tolist() == [True, False, True]


def test_a_whole_number_of_any_length_is_a_number():
    run = Run.from_events(
        [start(reference=10**400), step(1, samples=10**400), step(2, samples=-(10**400))]
    )
    assert run.steps.samples.tolist() == [math.inf, -math.inf]
    assert len(run.goodput) == 2
    columns = Columns(2)
    columns.append((None, 2**70))
    np.testing.assert_array_equal(np.concatenate(columns.arrays()), [np.nan, 2.0**70])


def test_a_run_is_loaded_from_its_directory(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "digits", "replica-0")
    for event in (start(), step(1), step(2)):
        log.write(event)
    log.close()
    with open(tmp_path / "digits" / "events-replica-0.jsonl", "a") as file:
        file.write("what is this\n")
    monkeypatch.chdir(tmp_path / "digits")
    run = Run.load(".")
    assert run.name == "digits"
    assert run.steps.step.tolist() == [1.0, 2.0]
    (damage,) = run.damage
    assert str(damage).startswith("events-replica-0.jsonl, line 4: not a JSON line")


INTS = [0, 1, 2, 3, -1, 7, 2**53 + 1, 2**63, -(2**64), 10**308, 10**400]
FLOATS = [0.0, 1.0, 2.0, 3.5, -1.0, -0.0, 5e-324, 1e-300, 1e308, -1e308]
FLOATS += [math.inf, -math.inf, math.nan]
WIDTH = 20


def wild_event(choices):
    """An event whose numbers the bytes choose: much faster than a strategy for each of them."""
    drawn = iter(choices)

    def one_of(values):
        return values[next(drawn) % len(values)]

    head = {"time": one_of(FLOATS), "step": one_of(INTS), "generation": one_of(INTS)}
    kind = one_of(["step", "step", "start", "metrics", "epoch"])
    metrics = {one_of(["a", "", "loss"]): one_of(FLOATS)} if one_of([0, 1]) else {}
    if kind == "start":
        return start(**head, reference=one_of(INTS), total_steps=one_of([None, *FLOATS]))
    if kind == "metrics":
        return MetricsEvent(**head, values=metrics)
    if kind == "epoch":
        return EpochEvent(**head, epoch=one_of(INTS), samples=one_of(INTS), progress=one_of(FLOATS))
    return step(
        head.pop("step"),
        **head,
        metrics=metrics,
        **{name: one_of(INTS) for name in ("batch_size", "samples", "replicas")},
        **{name: one_of(FLOATS) for name in ("progress", "scale", "lr_factor")},
        **{name: one_of([None, *FLOATS]) for name in ("lr", "sqr_norm", "trace", "loss")},
    )


def use(run):
    """Everything that a view or a report asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = len(run.steps)
        assert len(run.goodput) == len(run.noise_scale) == len(run.learning_rate) == count
        assert run.kept().shape == (count,)
        for series in run.metrics.values():
            assert len(series) == len(series.progress) == len(run.kept(series))
        assert run.duration >= 0


@examples(1000)
@given(st.binary(min_size=5 * WIDTH, max_size=5 * WIDTH))
def test_no_sequence_of_events_makes_a_run_fail_or_warn(choices):
    starts = range(0, len(choices), WIDTH)
    events = [wild_event(choices[i : i + WIDTH]) for i in starts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run.from_events(events)
    use(run)


def test_a_job_that_begins_anew_in_the_same_directory_is_another_run():
    yesterday = [start(), step(1), step(2), FaultEvent(time=3.0, step=2, kind="x", detail="y")]
    today = [start(time=9.0), step(1, time=10.0), step(2, time=11.0)]
    goes_on = [start(time=12.0, step=2, generation=1, resumed=True), step(3, time=13.0)]
    run = Run.from_events([*yesterday, *today, *goes_on])
    assert run.steps.time.tolist() == [10.0, 11.0, 13.0]
    assert [event.resumed for event in run.starts] == [False, True]
    assert run.faults == ()
