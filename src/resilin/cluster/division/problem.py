"""The problem that a solver gets, and steps that make a choice fit and waste nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from resilin.cluster.division.table import Floats, Ints

CORE_JOBS = 32
"""Jobs that are decided again exactly after the price is found."""
CORE_SIZE = 4096
"""Most accelerators that these share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Values of jobs x columns, and what limits the choice."""

    values: Floats
    """Value of each column to each job; -inf where it may not be chosen."""
    sizes: Ints
    """Size of each column, ascending."""
    kind: Ints
    """Index of the kind of each column; -1 for a column of size 0."""
    capacity: Ints
    """Accelerators of each kind."""
    group: Ints
    """Group of each job that shares a limit; -1 for none."""
    limits: Ints
    """Most accelerators of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice, and the prices that explain it."""

    choice: Ints
    """Column of each job."""
    prices: Floats
    """Price of an accelerator of each kind."""
    surcharge: Floats
    """Least price for jobs of each group, where its limit binds; else 0."""

    def value(self, values: Floats) -> float:
        """Sum of the values that were chosen."""
        return float(values[np.arange(len(self.choice)), self.choice].sum())


def fitting(problem: Problem) -> Problem:
    """The problem without columns that no capacity and no limit can hold."""
    most = np.where(problem.kind >= 0, problem.capacity[problem.kind], 0)
    too_large = np.broadcast_to(problem.sizes > most, problem.values.shape)
    if len(problem.limits):
        limit = np.where(problem.group >= 0, problem.limits[problem.group], np.iinfo(np.int64).max)
        too_large = too_large | (problem.sizes > limit[:, None])
    return replace(problem, values=np.where(too_large, -np.inf, problem.values))


def of_rows(problem: Problem, rows: Ints) -> Problem:
    """The problem of some of the jobs."""
    return replace(problem, values=problem.values[rows], group=problem.group[rows])


def used(work: Problem, choice: Ints) -> Ints:
    """Accelerators of each kind that a choice takes."""
    sizes, kind = work.sizes[choice], work.kind[choice]
    counted = np.bincount(kind[kind >= 0], weights=sizes[kind >= 0], minlength=len(work.capacity))
    return counted.astype(np.int64)


def group_used(work: Problem, choice: Ints) -> Ints:
    """Accelerators that each group takes."""
    inside = work.group >= 0
    counted = np.bincount(
        work.group[inside], weights=work.sizes[choice[inside]], minlength=len(work.limits)
    )
    return counted.astype(np.int64)


def program(values: Floats, sizes: Ints, capacity: int) -> Ints | None:
    """The best choice within a capacity, by a dynamic program; None if nothing fits."""
    best = np.zeros(capacity + 1)
    chosen = np.zeros((len(values), capacity + 1), dtype=np.int64)
    for row, its in enumerate(values):
        tried = np.full((len(sizes), capacity + 1), -np.inf)
        for column in np.flatnonzero(np.isfinite(its)):
            size = int(sizes[column])
            if size <= capacity:
                tried[column, size:] = best[: capacity + 1 - size] + its[column]
        chosen[row] = tried.argmax(axis=0)
        best = tried.max(axis=0)
    if not np.isfinite(best[capacity]):
        return None
    choice = np.zeros(len(values), dtype=np.int64)
    left = capacity
    for row in range(len(values) - 1, -1, -1):
        choice[row] = chosen[row, left]
        left -= int(sizes[choice[row]])
    return choice


def repair(work: Problem, choice: Ints) -> Ints:
    """Take back what exceeds a capacity or a limit, where it costs least for each accelerator."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    while True:
        over_kind = used(work, choice) > work.capacity
        over_group = group_used(work, choice) > work.limits
        if not over_kind.any() and not over_group.any():
            return choice
        kind = work.kind[choice]
        hit = (kind >= 0) & over_kind[kind]
        if len(work.limits):
            hit |= (work.group >= 0) & over_group[work.group]
        freed = work.sizes[choice][:, None] - work.sizes
        same = (work.kind == kind[:, None]) | (work.kind < 0)
        loss = work.values[rows, choice][:, None] - work.values
        with np.errstate(invalid="ignore"):
            each = np.where(hit[:, None] & (freed > 0) & same, loss / np.maximum(freed, 1), np.inf)
        row, column = np.unravel_index(int(np.argmin(each)), each.shape)
        assert np.isfinite(each[row, column]), "the smallest sizes fit, as was checked"
        choice[row] = column


def fill(work: Problem, choice: Ints) -> Ints:
    """Give what is left over to the jobs that gain most from each accelerator."""
    choice = choice.copy()
    free = work.capacity - used(work, choice)
    left = work.limits - group_used(work, choice)
    # The last entry is read by the column and the jobs without a kind and a group.
    free, left = np.append(free, 0), np.append(left, np.iinfo(np.int64).max)

    def gains(rows: Ints) -> tuple[Floats, Ints]:
        """The best upgrade of each row that fits now: gain for each accelerator, and column."""
        now = choice[rows]
        own = np.where(work.kind == work.kind[now][:, None], work.sizes[now][:, None], 0)
        extra = work.sizes - work.sizes[now][:, None]
        fits = (work.sizes - own <= free[work.kind]) & (extra <= left[work.group[rows]][:, None])
        with np.errstate(invalid="ignore"):
            gain = work.values[rows] - work.values[rows, now][:, None]
            each = np.where(fits & (gain > 0), gain / np.maximum(extra, 0.5), -np.inf)
        column = np.argmax(each, axis=1)
        return each[np.arange(len(rows)), column], column

    found, columns = gains(np.arange(len(choice)))
    heap = [
        (-found[row], int(row), int(columns[row])) for row in np.flatnonzero(np.isfinite(found))
    ]
    heapq.heapify(heap)
    while heap:
        _, row, column = heapq.heappop(heap)
        one = np.array([row])
        gain, now = gains(one)
        if not np.isfinite(gain[0]):
            continue
        if int(now[0]) != column:
            # Less is left than when it was pushed, or it has been upgraded since.
            heapq.heappush(heap, (-gain[0], row, int(now[0])))
            continue
        old = choice[row]
        free[work.kind[old]] += work.sizes[old]
        free[work.kind[column]] -= work.sizes[column]
        free[-1] = 0
        if work.group[row] >= 0:
            left[work.group[row]] -= work.sizes[column] - work.sizes[old]
        choice[row] = column
        gain, now = gains(one)
        if np.isfinite(gain[0]):
            heapq.heappush(heap, (-gain[0], row, int(now[0])))
    return choice


def polish(work: Problem, choice: Ints, prices: Floats, kind: int) -> Ints:
    """Decide again, exactly, for the jobs that are nearest to another choice at the price.

    They share what they have and what is free of one kind. Jobs of groups with limits stay.
    """
    columns = np.flatnonzero((work.kind == kind) | (work.kind < 0))
    rows = np.flatnonzero(np.isin(work.kind[choice], (kind, -1)) & (work.group < 0))
    free = int(work.capacity[kind] - used(work, choice)[kind])
    if not len(rows):
        return choice
    reduced = work.values[np.ix_(rows, columns)] - prices[kind] * work.sizes[columns]
    top = -np.partition(-reduced, 1, axis=1)[:, :2] if len(columns) > 1 else reduced[:, [0, 0]]
    own = reduced[np.arange(len(rows)), np.searchsorted(columns, choice[rows])]
    # Small where another column is nearly as good, or better than what filling has left.
    distance = np.where(own < top[:, 0], 0.0, top[:, 0] - top[:, 1])
    order = rows[np.argsort(distance, kind="stable")]
    budget = free + np.cumsum(work.sizes[choice[order]])
    core = order[: max(1, min(CORE_JOBS, int(np.searchsorted(budget, CORE_SIZE))))]
    room = free + int(work.sizes[choice[core]].sum())
    if room > CORE_SIZE:
        return choice
    found = program(work.values[np.ix_(core, columns)], work.sizes[columns], room)
    assert found is not None, "the present choice fits"
    choice = choice.copy()
    choice[core] = columns[found]
    return choice
