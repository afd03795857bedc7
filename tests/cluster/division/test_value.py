"""The numbers that make a value."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from resilin.cluster.division.constraints import allowed, largest_sizes
from resilin.cluster.division.table import Rows, build, goodput_row, measured_ratios
from resilin.cluster.division.value import (
    NOTHING,
    Urgency,
    fair_goodput,
    goodput_values,
    restart_factor,
    seconds_left,
    weights,
)
from resilin.cluster.job import Speeds
from resilin.cluster.menu import menus
from tests.cluster.statuses import hosts, job, on, speeds


def table_of(*jobs, nodes=None, forced=frozenset(), rows=None):
    return build(jobs, menus(nodes or hosts(4)), set(forced), rows or Rows())


def column(table, size):
    return int(np.flatnonzero(table.columns.sizes == size)[0])


def test_what_is_left_is_counted_at_the_fair_share():
    table = table_of(job("a", done=1000.0, total=5000.0), job("b", done=1000.0, total=None))
    fair = fair_goodput(table, table.may)
    # 16 accelerators for 2 jobs.
    assert fair == pytest.approx([8 / 1.7, 8 / 1.7])
    assert seconds_left(table, fair) == pytest.approx([4000 / (8 / 1.7), 1000 / (8 / 1.7)])


def test_a_job_that_was_never_measured_counts_as_the_shortest():
    table = table_of(job("new", speeds=(), profiled=0), job("old"))
    left = seconds_left(table, fair_goodput(table, table.may))
    assert left[0] == 0
    assert weights(table, left, Urgency(p=1.0, even=0.0)) == pytest.approx([2.0, 1.0])


def test_weights_are_powers_of_the_rank_and_the_first_of_equals_has_the_higher_one():
    table = table_of(job("long", total=1e6), job("a"), job("b"), job("short", total=1100.0))
    left = seconds_left(table, fair_goodput(table, table.may))
    assert weights(table, left, Urgency(p=1.0, even=0.0)) == pytest.approx([0.5, 1.5, 1.0, 2.0])
    assert weights(table, left, Urgency(p=0.0)) == pytest.approx([1, 1, 1, 1])


def test_a_few_jobs_are_weighted_more_evenly_than_many():
    def ratio(num_jobs):
        table = table_of(*(job(f"j{i}", total=2000.0 + i) for i in range(num_jobs)))
        found = weights(table, seconds_left(table, np.ones(num_jobs)), Urgency(p=1.0, even=2.0))
        return found.max() / found.min()

    assert ratio(2) == pytest.approx(4 / 3)
    assert ratio(16) == pytest.approx(18 / 3)


def test_a_job_beyond_its_declared_end_is_taken_to_need_a_part_of_what_it_has_done():
    table = table_of(job("late", done=1000.0, total=900.0))
    assert seconds_left(table, np.ones(1)) == pytest.approx([200.0])


def test_an_unknown_end_has_an_urgency_of_its_own():
    table = table_of(job("a", total=None, done=10.0), job("b", total=None, done=1000.0))
    left = seconds_left(table, fair_goodput(table, table.may))
    assert weights(table, left, Urgency(p_unknown=0.0)) == pytest.approx([1, 1])


def test_a_change_costs_what_the_job_has_measured():
    runs = job("runs", allocation=on(gpu_0=2), rescale_seconds=30.0)
    table = table_of(runs, replace(runs, rescale_seconds=3.0), job("waits"))
    found = restart_factor(table, np.array([1e6, 60.0, 1e6]), horizon=300.0)
    two, four = column(table, 2), column(table, 4)
    assert found[:, two] == pytest.approx([1, 1, 1])
    assert found[:, four] == pytest.approx([0.9, 0.95, 1])


def test_a_job_that_has_to_move_pays_nothing_for_it():
    runs = job("runs", allocation=on(gpu_0=2), rescale_seconds=30.0)
    table = table_of(runs, forced={"runs"})
    assert (restart_factor(table, np.array([100.0]), 300.0) == 1).all()


def test_a_value_is_weight_times_log_of_speedup_and_restart():
    runs = job("runs", allocation=on(gpu_0=2), rescale_seconds=30.0, total=1e6, max_replicas=8)
    table = table_of(runs)
    found = goodput_values(table, table.may, Urgency(p=1.0, even=0.0, horizon=300.0))[0]
    speedup = (4 / 1.3) / (16 / 2.5)
    assert found[column(table, 4)] == pytest.approx(2 * math.log(speedup * 0.9))
    assert found[column(table, 2)] == pytest.approx(2 * math.log((2 / 1.1) / (16 / 2.5)))
    assert found[0] == pytest.approx(2 * math.log(NOTHING))
    assert found[column(table, 16)] == -np.inf


def test_rows_are_kept_while_hints_and_menu_stay():
    rows = Rows(most=1)
    first = table_of(job("a"), job("b", loss=0.2), rows=rows)
    again = table_of(job("a"), job("b", loss=0.2), rows=rows)
    assert np.array_equal(first.goodput, again.goodput)
    changed = table_of(job("a", loss=0.5), job("b", loss=0.2), rows=rows)
    assert not np.array_equal(first.goodput[0], changed.goodput[0])
    assert np.array_equal(first.goodput[1], changed.goodput[1])
    other_menu = table_of(job("a"), nodes=hosts(2), rows=rows)
    assert other_menu.goodput.shape[1] < first.goodput.shape[1]


def test_goodput_is_interpolated_between_sizes_and_stays_beyond_them():
    table = table_of(job("a"), nodes=hosts(8))
    measured = Speeds(kind="gpu", sizes=(2, 4, 8, 16), goodput=(2.0, 3.0, 0.0, 6.0))
    row = goodput_row((measured,), table.columns, {})
    at = {int(size): value for size, value in zip(table.columns.sizes, row, strict=True)}
    assert at[1] == 1.0
    assert at[2] == 2.0
    assert at[8] == 0.0
    assert at[12] == pytest.approx(5.0)
    assert at[32] == 6.0


def test_the_ratio_of_two_kinds_is_the_median_of_what_jobs_measured():
    jobs = [
        job(f"j{i}", speeds=(speeds("t4"), speeds("a100", factor)))
        for i, factor in enumerate([2.0, 3.0, 10.0])
    ]
    assert measured_ratios(jobs) == pytest.approx({("t4", "a100"): 3.0, ("a100", "t4"): 1 / 3})


def test_a_job_may_have_its_smallest_size_whatever_was_measured():
    table = table_of(job("a", min_replicas=8, profiled=0, speeds=()), job("b", profiled=1))
    largest = largest_sizes(table, growth=4, first=2)
    assert largest == pytest.approx([8, 4])
    assert table.columns.sizes[allowed(table, largest)[1]].tolist() == [0, 1, 2, 4]


def test_a_size_off_the_menu_is_offered_to_the_job_that_needs_it_alone():
    table = table_of(job("six", min_replicas=6, max_replicas=6), job("any"))
    assert table.columns.sizes[table.may[0]].tolist() == [0, 6]
    assert 6 not in table.columns.sizes[table.may[1]]
