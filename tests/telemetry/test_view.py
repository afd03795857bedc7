import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from resilin.core import events
from resilin.telemetry.history import MOST, History
from resilin.telemetry.status import Status
from resilin.telemetry.view import ASCII_BLOCKS, BLOCKS, View, sparkline
from tests.telemetry.told import told_run


def status_of(told, name="job-17"):
    status = Status(name)
    status.take(told)
    return status


def shown(status, now, *, width=80, height=24, encoding="utf-8", note=""):
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=buffer, width=width, height=height, color_system=None)
    console.print(View(status, now, height=height, note=note))
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)


def test_a_status_says_where_the_run_is():
    told = told_run()
    status = status_of(told)
    now = told[-1].time + 2
    assert status.state(now) == "running"
    # 39 steps at a gain of 1, 81 at 1.5; the last 30 s are at 1.5 steps a second.
    assert status.steps_done == pytest.approx(39 + 81 * 1.5)
    assert status.fraction == pytest.approx(160.5 / 400)
    assert status.goodput == pytest.approx(150)
    assert status.throughput == pytest.approx(200)
    assert status.seconds_left == pytest.approx((400 - 160.5) / 1.5)
    assert status.efficiency == pytest.approx(0.75)
    assert status.noise_scale == pytest.approx(250)
    assert status.metrics == {"accuracy": 0.75}
    assert status.counts["rescale"] == status.counts["fault"] == 1
    assert status.generation == 1


@pytest.mark.parametrize("clock", ["progress", "samples", "tokens"])
def test_the_length_of_a_run_is_measured_by_the_clock_of_its_rule(clock):
    told = [replace(e, clock=clock) if e.name == "start" else e for e in told_run()]
    status = status_of(told)
    # 20,100 samples are 201 reference steps, of which the last came at 2 a second.
    done, rate = (160.5, 1.5) if clock == "progress" else (201, 2)
    assert status.fraction == pytest.approx(done / 400)
    assert status.seconds_left == pytest.approx((400 - done) / rate)


def test_no_rate_is_taken_across_a_restart():
    told = told_run(62, fault_at=61)
    assert status_of(told[:-2]).goodput is None
    assert status_of(told_run(63, fault_at=61)).goodput == pytest.approx(150)


def test_a_run_whose_last_epoch_is_over_is_finished():
    told = told_run()
    end = {"time": told[-1].time, "step": 120, "generation": 1, "samples": 1, "progress": 399.0}
    assert status_of([*told, events.EpochEvent(**end, epoch=2)]).state(0) == "running"
    status = status_of([*told, events.EpochEvent(**end, epoch=3)])
    assert status.state(told[-1].time + 1e6) == "finished"
    assert status.fraction == 1
    assert status.seconds_left is None
    assert "finished after" in shown(status, told[-1].time + 1e6)


def test_a_run_that_tells_nothing_is_silent_and_one_without_events_is_waited_for():
    told = told_run()
    text = shown(status_of(told), told[-1].time + 300)
    assert "silent for 5 min 00 s" in text
    assert Status("x").state(0) == "waiting"
    assert "waiting for events" in shown(Status("x"), 0)


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("worker_hung", "hung", "hung 5.0 s ago"),
        ("stopped", "stopped", "stopped after"),
        ("gave_up", "gave up", "gave up after"),
        ("left", "ended", "ended early after"),
    ],
)
def test_how_a_run_ended_is_its_state_until_it_makes_a_step(kind, state, words):
    status = Status("x")
    status.take(told_run(total=None))
    now = status.last + 5
    end = events.FaultEvent(
        time=status.last, step=120, generation=1, kind=kind, detail="by SIGTERM"
    )
    status.take([end])
    assert status.state(now) == state
    assert words in shown(status, now)
    other = events.FaultEvent(
        time=status.last, step=120, generation=1, kind="machine_left", detail=""
    )
    status.take([other])
    assert status.state(now) == state
    status.take([replace(status.step, step=121)])
    assert status.state(now) == "running"


def test_the_length_of_a_run_may_be_unknown():
    status = status_of(told_run(total=None))
    assert status.fraction is None
    assert "of an unknown total" in shown(status, 1200)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_the_view_fits_the_screen(width, height):
    told = told_run() + [
        events.FaultEvent(time=1200.0 + i, step=9, kind="out_of_memory", detail="x" * 300)
        for i in range(80)
    ]
    text = shown(status_of(told), told[-1].time, width=width, height=height, note="damage " * 40)
    lines = text.splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    for words in (
        "200 = 1 x 50 x 4",
        "1 on 1 host, generation 1",
        "0.15 = 0.1 x 1.5",
        "250 samples",
    ):
        assert words in text
    assert "160.5 of 400 reference steps, 2 min 40 s left" in text
    assert "75%" in text


def test_the_view_names_the_last_events_with_their_age():
    text = shown(status_of(told_run()), 1000 + 120 + 10 + 30)
    assert "decision   batch 100 -> 200: it learns faster" in text
    assert "rescale    2 -> 1 replicas after 10 s: resumed from memory" in text
    assert "fault      worker_lost on replica 1: killed by SIGKILL" in text
    assert "30 s ago      checkpoint saved /ckpt/9 in 0.5 s, 5MB" in text


def test_decisions_leave_room_for_what_matters_more():
    kept = {"batch_size_before": 8, "batch_size": 8, "reason": "keeps 8"}
    grown = {"batch_size_before": 8, "batch_size": 9, "reason": "tries 9"}
    told = told_run()
    for i in range(300):
        change = grown if i % 3 == 0 else kept
        told.append(events.DecisionEvent(time=1200.0 + i, step=i, **change))
    status = status_of(told)
    names = [event.name for event in status.last_events(8)]
    assert names == ["fault", "rescale", *["decision"] * 6]
    # Of the decisions to keep it, one for each time that it was changed.
    assert [event.reason for event in status.last_events(8)[-4:]] == ["tries 9", "keeps 8"] * 2
    assert status.last_events(1)[0].name == "rescale"
    assert len(status.last_events(1000)) < 200


def test_words_of_others_have_no_effect_on_the_terminal():
    nasty = events.FaultEvent(
        time=1200.0, step=1, kind="[red]x[/red]", detail="\x1b[2J\x07\nnext \x9b31m", replica=None
    )
    text = shown(status_of([*told_run(), nasty], name="\x1b]0;owned\x07"), 1201)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\x9b" not in text
    assert "[red]x[/red]: ?[2J? next ?31m" in text


def test_a_terminal_without_unicode_gets_ascii():
    assert shown(status_of(told_run()), 1200, encoding="ascii").isascii()
    assert not shown(status_of(told_run()), 1200).isascii()


def test_absurd_numbers_are_shown_and_not_stumbled_over():
    base = next(event for event in told_run() if isinstance(event, events.StepEvent))
    start = told_run()[0]
    for value in (0.0, -1.0, math.inf, -math.inf, math.nan, 1e308):
        for field in ("time", "progress", "scale", "gain", "lr", "sqr_norm", "seconds", "loss"):
            other = replace(base, **{"time": base.time + 1, field: value})
            for told in ([start, base, other], [other, base], [start, other, replace(base)]):
                status = status_of(told)
                shown(status, 1100.0)
                json.dumps(status.as_dict(1100.0), allow_nan=False)
    for field in ("step", "samples", "batch_size", "epoch", "generation", "replicas"):
        status = status_of([start, base, replace(base, time=1002.0, **{field: 10**400})])
        shown(status, 1100.0)
        status.as_dict(1100.0)
    huge = replace(start, reference=10**400, total_steps=math.inf)
    shown(status_of([huge, base, replace(base, time=1002.0)]), 1100.0)


def test_a_history_keeps_the_course_of_a_long_run():
    history = History()
    for second in range(100_000):
        history.add(1e9 + second, 1.0 if second < 50_000 else 3.0)
    means = history.means(100)
    assert len(means) == 100
    assert means[:45] == [1.0] * 45
    assert means[55:] == [3.0] * 45
    assert len(history.means(10 * MOST)) == 10 * MOST


def test_a_history_holds_the_last_value_where_nothing_was_told():
    history = History()
    for time, value in ((0.0, 2.0), (100.0, 8.0), (5.0, None), (6.0, math.nan), (-50.0, 4.0)):
        history.add(time, value)
    means = history.means(20)
    assert means[:19] == [3.0] * 19
    assert means[19] == 8.0
    assert History().means(20) == []


def test_sparklines_reach_from_the_lowest_to_the_highest_block():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert sparkline([7, 0], ASCII_BLOCKS) == "#_"
    assert sparkline([5, 5, 5]) == BLOCKS[0] * 3
    assert sparkline([-1e308, 1e308]) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([]) == ""


def test_a_job_that_begins_anew_in_the_same_directory_is_another_run():
    told = told_run()
    status = status_of([*told, replace(told[0], time=told[-1].time + 60)])
    assert status.step is None
    assert status.began == told[-1].time + 60
    assert status.counts == {"start": 1}


@pytest.mark.parametrize(
    ("told", "words"),
    [((), "-"), ((3, 0), "no completed step"), ((12,), "12 completed steps")],
)
def test_the_view_says_what_a_lost_worker_costs(told, words):
    run = told_run()
    run += [events.RiskEvent(time=run[-1].time, step=9, steps=steps) for steps in told]
    status = status_of(run)
    assert re.search(rf"at risk +{words} ", shown(status, run[-1].time))
    assert status.as_dict(0)["at_risk"] == (told[-1] if told else None)
