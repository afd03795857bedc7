"""What benchmarks conclude from their figures."""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ramp_figures as ramp
from benchmarks import rescale_figures as rescale
from benchmarks.accuracy_figures import Config, Result, changes, summarise
from benchmarks.accuracy_figures import verdict as accuracy_verdict
from benchmarks.chaos_live_figures import (
    both_commit,
    footprint_of,
    growth,
    growth_of_launcher,
    longest_wait,
    made_again,
    unequal,
)
from benchmarks.harness import finish
from benchmarks.ratios import Ratio, is_sharp, median_ratio, verdict

SHARP = Ratio(1.0005, 0.9985, 1.0025)


def test_interval_of_a_median_is_that_of_the_sign_test() -> None:
    # Tables of the sign test: the 1st and last of 6, the 2nd of 10, the 6th of 20 at 95%.
    assert median_ratio([3, 1, 2, 6, 5, 4]) == Ratio(3.5, 1, 6)
    assert median_ratio(range(1, 11)) == Ratio(5.5, 2, 9)
    assert median_ratio(range(1, 21)) == Ratio(10.5, 6, 15)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_too_few_values_have_no_interval(num: int) -> None:
    ratio = median_ratio([1.0] * num)
    assert (ratio.median, ratio.rounded) == (1.0, None)
    assert not is_sharp(ratio)
    assert verdict(ratio, 2.0, SHARP) == "undecided"


def test_intervals_contain_the_median_as_often_as_they_say() -> None:
    rng = random.Random(0)
    # Skewed, with a median of 1: a burst of noise makes a turn longer, never shorter.
    inside = 0
    for _ in range(2000):
        ratio = median_ratio([rng.lognormvariate(0, 0.5) for _ in range(25)])
        inside += ratio.low <= 1 <= ratio.high
    assert 0.95 <= inside / 2000 <= 0.97  # 0.957 for 25 values


def test_many_values_make_a_narrow_interval() -> None:
    rng = random.Random(0)
    values = [rng.gauss(1, 0.02) for _ in range(2000)]
    ratio = median_ratio(values)
    assert ratio.median == statistics.median(values)
    assert 0.0015 < ratio.width < 0.003


@pytest.mark.parametrize(
    ("control", "sharp"),
    [
        (SHARP, True),
        (Ratio(1.0, 0.997, 1.003), False),  # too wide
        (Ratio(1.006, 1.005, 1.007), False),  # surely not 1: the contenders were not equal
        (Ratio(0.994, 0.993, 0.995), False),
    ],
)
def test_control_that_can_decide_is_narrow_and_around_1(control: Ratio, sharp: bool) -> None:
    assert is_sharp(control) is sharp


@pytest.mark.parametrize(
    ("figure", "decided"),
    [
        (Ratio(1.01, 1.008, 1.012), "pass"),
        (Ratio(1.03, 1.025, 1.035), "fail"),
        (Ratio(1.02, 1.015, 1.025), "undecided"),  # it contains the limit
        (Ratio(1.01, 0.98, 1.04), "undecided"),
    ],
)
def test_figure_is_decided_where_its_interval_leaves_out_the_limit(
    figure: Ratio, decided: str
) -> None:
    assert verdict(figure, 1.02, SHARP) == decided


@pytest.mark.parametrize(
    "control", [Ratio(1.0, 0.98, 1.02), Ratio(1.02, 1.019, 1.021), Ratio(0.98, 0.979, 0.981)]
)
def test_without_a_sharp_control_only_what_is_far_above_the_limit_is_decided(
    control: Ratio,
) -> None:
    assert verdict(Ratio(1.0, 0.999, 1.001), 1.02, control) == "undecided"
    assert verdict(Ratio(1.03, 1.029, 1.031), 1.02, control) == "undecided"
    assert verdict(Ratio(1.3, 1.29, 1.31), 1.02, control) == "fail"


def test_undecided_figure_neither_passes_nor_fails(capsys: pytest.CaptureFixture[str]) -> None:
    figures, limits = {"a": 1.5, "b": 1.5}, {"a": 1.0, "b": 1.0}
    finish("some", figures, limits, check=True, undecided=["a", "b"])
    out, err = capsys.readouterr()
    assert json.loads(out)["undecided"] == ["a", "b"]
    assert json.loads(out)["missed"] == []
    assert "undecided: a is 1.5, limit 1" in err
    with pytest.raises(SystemExit, match=r"^b is 1\.5, limit 1$"):
        finish("some", figures, limits, check=True, undecided=["a"])


CONTEST = """
import json, time
import contest as module
from contest import contest

module.WARM_SECONDS = 0.01  # there is nothing to settle

def work(times, wall=0.0005):
    # Each contender has a process, and here a processor whose time is what is worked.
    spent = 0.0
    time.process_time = lambda: spent
    while True:
        spent += 0.001 * times
        time.sleep(wall * times)
        yield

def clock():
    # It does nothing; its clock must not run while the others do their work.
    for step, _ in enumerate(work(1, wall=0)):
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        if step == 100:
            own, all_of_it = time.perf_counter(), now
        if step == 300 and time.perf_counter() - own > 0.7 * (now - all_of_it):
            raise RuntimeError("its clock does not stand still")
        yield

def broken():
    yield
    raise ValueError("no more\\nof this")

outcome = contest(
    {"a": lambda: work(1), "b": lambda: work(1), "twice": lambda: work(2), "own": clock,
     "broken": broken},
    ("a", "b"), 1, 1.0,
)
print(json.dumps([outcome.ratio("twice", "a", "b").median, outcome.control.median,
                  outcome.errors, len(outcome.turns), sorted(outcome.turns[0])]))
"""


def test_contest_tells_who_takes_twice_as_long_and_who_cannot_run() -> None:
    # In a process of its own, because it forks.
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    ran = subprocess.run(
        [sys.executable, "-c", CONTEST],
        env={"PYTHONPATH": str(benchmarks)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    twice, control, errors, turns, ran_on = json.loads(ran.stdout)
    assert (twice, control) == (pytest.approx(2), pytest.approx(1))
    assert errors == {"broken": "ValueError: no more of this"}
    assert turns >= 6
    assert ran_on == ["a", "b", "own", "twice"]


DEFAULT = Config("friedman", "sgd", "sgdscale", "8x")


def runs(config: Config, *scores: float, samples: int = 1000) -> list[Result]:
    return [Result(config, i, score, 0.1, 0.2, 10, samples, 1.0) for i, score in enumerate(scores)]


def test_differences_of_accuracy_are_paired_by_seed() -> None:
    reference = runs(DEFAULT.reference, 90, 80, 70, samples=500)
    row = summarise(runs(DEFAULT, 89, 79), reference)
    # The seeds differ by ten points, and each of them has lost one: there is no error.
    assert (row.d, row.d_se, row.num_seeds) == (-1, 0, 2)
    assert (row.score, row.samples_ratio) == (84, 2)
    with pytest.raises(AssertionError):
        summarise(runs(DEFAULT, 89, 79)[::-1], reference)


@pytest.mark.parametrize(
    ("scores", "missed"),
    [
        ((90.0, 91.0, 92.0), []),
        ((89.0, 91.1, 91.9), []),  # -0.37 +- 0.32
        ((89.0, 90.0, 91.1), ["friedman_sgd_8x_errors_below_before"]),
    ],
)
def test_default_must_not_be_below_the_old_rule_on_a_held_out_task(
    scores: tuple[float, ...], missed: list[str]
) -> None:
    old = DEFAULT._replace(rule="before")
    results = {DEFAULT: runs(DEFAULT, *scores), old: runs(old, 90, 91.1, 92, samples=2000)}
    found = changes(results)
    assert found[old].samples_ratio == 0.5
    figures, limits = accuracy_verdict({}, found, quick=False)
    assert [key for key in limits if not figures[key] <= limits[key]] == missed


def test_a_part_of_the_plan_has_the_limits_of_that_part() -> None:
    config = Config("digits", "sgd", "sgdscale", "16x")
    lost = {config: summarise(runs(config, 89, 79), runs(config.reference, 90, 80))}
    figures, limits = accuracy_verdict(lost, {}, quick=False)
    assert (figures, limits) == (
        {"digits_sgd_sgdscale_16x_points_lost": 1},
        {"digits_sgd_sgdscale_16x_points_lost": 0.65},
    )


def _run(name: str, seed: int, reached: tuple[float, float] | None) -> ramp.Run:
    return ramp.Run(name, seed, (), reached, 8, 0.0)


def test_a_target_is_reached_between_two_evaluations() -> None:
    points = [
        ramp.Point(10, 80, 10, 3.0),
        ramp.Point(20, 160, 20, 2.0),
        ramp.Point(30, 480, 30, 1.0),
    ]
    assert ramp.crossing(points, 1.75) == (22.5, 240)
    assert ramp.crossing(points, 3.5) == (10, 80)
    assert ramp.crossing(points, 1.0) == (30, 480)
    assert ramp.crossing(points, 0.5) is None


def test_ramps_are_paired_by_seed_and_failures_are_counted() -> None:
    runs = [_run("constant", 0, (100, 800)), _run("constant", 1, (50, 400))]
    runs += [_run("doubling", 0, (50, 1600)), _run("doubling", 1, (20, 400))]
    runs += [_run("ramp", 0, None), _run("ramp", 1, (30, 400))]
    figures = ramp.summarise(runs)
    assert figures["doubling_steps_ratio"] == pytest.approx(0.45)
    assert figures["doubling_samples_ratio"] == pytest.approx(1.5)
    low, high = figures["doubling_steps_ratio_low"], figures["doubling_steps_ratio_high"]
    assert low is not None
    assert high is not None
    assert low < 0.4 < 0.5 < high
    assert (figures["doubling_never"], figures["ramp_never"]) == (0, 1)
    assert figures["ramp_steps_ratio"] == pytest.approx(0.6)


# Live jobs under faults ----------------------------------------------------------------------


def done(pid: int, step: int, generation: int = 0, **facts: object) -> dict[str, object]:
    when = float(10 * generation + step)
    common = {"event": "done", "time": when, "replicas": 2, "checksum": step}
    return {**common, "pid": pid, "step": step, "generation": generation, **facts}


def test_a_step_of_all_that_is_made_again_is_lost_and_one_of_some_is_not() -> None:
    whole = [done(pid, step) for pid in (1, 2) for step in (1, 2)]
    assert made_again(whole) == 0
    # Process 2 died in step 3, which process 1 alone has completed, and makes again.
    again = [*whole, done(1, 3), done(1, 3, 1, replicas=1)]
    assert made_again(again) == 0
    assert made_again([*again, done(1, 2, 1, replicas=1)]) == 1


def test_replicas_are_compared_within_a_generation() -> None:
    lines = [done(1, 1), done(2, 1), done(1, 2, checksum=7), done(3, 2, 1, checksum=8)]
    assert unequal(lines) == 0
    assert unequal([*lines, done(2, 2, checksum=9)]) == 1


def test_a_wait_counts_without_the_time_to_notice_its_cause() -> None:
    lines = [done(1, 1), done(1, 2), done(1, 3, 1), {"event": "built", "time": 0.0, "pid": 1}]
    assert longest_wait(lines, []) == 11.0
    assert longest_wait(lines, [(2.5, 4.0), (50.0, 9.0)]) == 7.0


def test_growth_is_that_of_the_process_with_most_generations() -> None:
    sizes = {"threads": 10, "descriptors": 30, "ports": 3}
    lines = [done(1, g, g, memory=100 + g, **sizes) for g in range(10)]
    lines += [done(2, g, g, memory=100 + 50 * g, **sizes) for g in range(4)]
    lines += [done(1, 20 + g, 20 + g, replicas=9, memory=900, **sizes) for g in range(8)]
    figures = growth(lines)  # type: ignore[arg-type]
    grown = {"memory_growth_mb": 5, "thread_growth": 0, "descriptor_growth": 0, "port_growth": 0}
    assert figures == {"generations": 18, **grown}
    launcher = growth_of_launcher(
        [{"pid": 1, "memory": 50, **sizes, "threads": n} for n in range(12)]
        + [{"pid": 2, "memory": 500, **sizes, "threads": 50}] * 4
    )
    assert launcher["launcher_thread_growth"] == 7
    assert launcher["launcher_port_growth"] == 0


def test_two_groups_that_make_the_same_steps_are_found() -> None:
    before = [done(pid, step) for pid in (1, 2, 3) for step in (1, 2)]
    # Process 3 was cut off. It may have had the step that the others have not.
    apart = [*before, done(3, 3), done(1, 3, 1), done(2, 3, 1)]
    assert both_commit(apart) == 0
    assert both_commit([*apart, done(3, 4)]) == 1
    # Process 1 made a step that it had already.
    assert both_commit([*apart, done(1, 3)]) == 1


def test_the_footprint_of_a_process_has_its_ports() -> None:
    before = footprint_of("self")
    with socket.create_server(("127.0.0.1", 0)):
        after = footprint_of("self")
    assert after["ports"] == before["ports"] + 1
    assert after["descriptors"] == before["descriptors"] + 1
    assert min(after.values()) > 0


# Changes of members --------------------------------------------------------------------------


def mark(pid: int, event: str, when: float, **facts: object) -> dict[str, object]:
    return {"pid": pid, "event": event, "time": when, **facts}


def made(pid: int, *times: float, first: int = 1) -> list[dict[str, object]]:
    return [mark(pid, "step", when, step=first + i) for i, when in enumerate(times)]


def test_a_live_change_ends_with_the_slowest_of_those_that_stay() -> None:
    lines = made(1, 1.0, 2.0, 3.0, 4.1, 6.0, 7.0, 8.0) + made(2, 1.0, 2.0, 3.0, 6.5, 7.0, 8.0)
    # Process 1 has committed a step after the fault in the old generation: that is no recovery.
    for pid, noticed in ((1, 4.2), (2, 4.5)):
        lines += [mark(pid, "noticed", noticed), mark(pid, "formed", 4.6)]
        lines += [mark(pid, "healed", 4.8), mark(pid, "wrapped", 5.0)]
    lines.sort(key=lambda line: line["time"])  # type: ignore[arg-type, return-value]
    assert rescale.has_continued(lines, 4.0, {1, 2})
    change = rescale.continued(lines, 4.0, {1, 2})
    assert change.seconds == pytest.approx(2.5)
    assert change.phases == pytest.approx(
        {"noticed": 0.5, "formed": 0.1, "healed": 0.2, "wrapped": 0.2, "step": 1.5}
    )
    assert change.wrapped == pytest.approx(0.5)
    # Usual steps take 1 s; process 2 made none for 3.5 s.
    assert (change.step_seconds, change.stall) == pytest.approx((1.0, 2.5))


def test_a_live_change_is_not_over_before_all_have_made_steps() -> None:
    lines = made(1, 1.0, 2.0, 6.0, 7.0, 8.0)
    lines += [mark(1, "noticed", 4.0), mark(1, "wrapped", 5.0)]
    assert rescale.has_continued(lines, 3.0, {1})
    assert not rescale.has_continued(lines, 4.5, {1})
    assert not rescale.has_continued(lines, 3.0, {1, 2})


def test_a_restart_ends_with_the_slowest_new_process_and_counts_what_is_made_again() -> None:
    lines = made(1, 1.0, 2.0, 3.0) + made(2, 1.0, 2.0, 3.0) + made(9, 0.5)
    for pid, late in ((3, 0.0), (4, 0.5)):
        events = ("launch", "import", "group", "build", "restore")
        lines += [mark(pid, event, 5.0 + i + late) for i, event in enumerate(events)]
        lines += made(pid, 10.0 + late, 11.0 + late, first=3)
    change = rescale.restarted(lines, 3.5, known={1, 2, 9}, before={1, 2})
    assert change.seconds == pytest.approx(7.0)
    assert change.phases["launch"] == pytest.approx(2.0)
    assert sum(change.phases.values()) == pytest.approx(change.seconds)
    # Step 3 of both is made again; the gap is from 3.0 to 10.5, and a usual step takes 1 s.
    assert (change.redone, change.stall) == (1, pytest.approx(6.5))
