"""One size for each job, so that the sum of their values is largest within the capacity.

`price` finds a price of an accelerator at which the jobs ask for what there is: each job takes the
size with the largest value minus price times size. `exact` is a dynamic program: the oracle of the
tests, and fast enough for small clusters.
"""

from __future__ import annotations

import numpy as np

from resilin.cluster.division.problem import (
    Problem,
    Solution,
    fill,
    fitting,
    of_rows,
    polish,
    program,
    repair,
    used,
)
from resilin.cluster.division.table import Floats, Ints

SWEEPS = 12
"""Rounds over the kinds; prices have settled long before."""
HALVINGS = 60
"""Most steps of a bisection; it ends earlier once no job is between two sizes."""
PRECISION = 1e-6
"""Relative precision of a price: jobs within it are decided by filling and exactly."""


def price(problem: Problem) -> Solution:
    """Solve by prices, then fill what is left over by the best upgrades.

    Prices start where every job takes its least and only fall: a lower price of one kind draws jobs
    from the others, so that none of them exceeds its capacity. For one kind this is the
    optimum of the linear relaxation; the rest is smaller than one step of a job.

    Raises:
        ValueError: The smallest columns that may be chosen exceed the capacity.
    """
    num_kinds = len(problem.capacity)
    if not num_kinds or not len(problem.values):
        nothing = np.zeros(len(problem.values), dtype=np.int64)
        surcharge = np.zeros(len(problem.limits))
        return Solution(choice=nothing, prices=np.zeros(num_kinds), surcharge=surcharge)
    work = fitting(problem)
    surcharge = _surcharges(work)
    floor = _row_floor(work, surcharge)
    high = _highest(work.values, work.sizes)
    prices = np.full(num_kinds, high)
    choice = _best(work, prices, floor)
    if (used(work, choice) > work.capacity).any():
        raise ValueError(
            f"capacity ({work.capacity.tolist()}) must be at least the smallest sizes that may be "
            f"chosen ({used(work, choice).tolist()})"
        )
    for _ in range(SWEEPS if num_kinds > 1 else 1):
        before = prices.copy()
        for kind in range(num_kinds):
            choice, prices[kind] = _lower(work, prices, floor, kind)
        if np.allclose(before, prices, rtol=1e-6, atol=1e-12):
            break
    choice = fill(work, repair(work, choice))
    for kind in range(num_kinds):
        choice = fill(work, polish(work, choice, prices, kind))
    return Solution(choice=choice, prices=prices, surcharge=surcharge)


def exact(problem: Problem) -> Solution:
    """Solve by a dynamic program over the accelerators; for one kind without limits of groups.

    It takes jobs x columns x capacity steps, and tells no prices.

    Raises:
        ValueError: There are several kinds, or groups with limits.
    """
    if len(problem.capacity) != 1 or len(problem.limits):
        raise ValueError(
            f"exact takes one kind and no limits, not {len(problem.capacity)} kinds and "
            f"{len(problem.limits)} limits"
        )
    work = fitting(problem)
    capacity = int(work.capacity[0])
    choice = program(work.values, work.sizes, capacity)
    if choice is None:
        raise ValueError(f"capacity ({capacity}) must be at least the smallest sizes together")
    return Solution(choice=choice, prices=np.zeros(1), surcharge=np.zeros(0))


def _highest(values: Floats, sizes: Ints) -> float:
    """A price at which every job takes its least."""
    if not len(values):
        return 0.0
    can = np.isfinite(values)
    least = can.argmax(axis=1)
    rows = np.arange(len(values))
    extra = sizes - sizes[least][:, None]
    with np.errstate(invalid="ignore"):
        gain = np.where(can & (extra > 0), values - values[rows, least][:, None], 0.0)
    return float(np.max(gain / np.maximum(extra, 1), initial=0.0)) * (1 + 1e-9) + 1e-12


def _best(work: Problem, prices: Floats, floor: Floats | None) -> Ints:
    """The column of each job with the largest value minus its cost; the smallest of several."""
    per_column = np.where(work.kind >= 0, prices[work.kind], 0.0)
    if floor is None:
        cost = per_column * work.sizes
    else:
        cost = np.maximum(per_column, floor[:, None]) * work.sizes
    found: Ints = np.argmax(work.values - cost, axis=1)
    return found


def _lower(work: Problem, prices: Floats, floor: Floats | None, kind: int) -> tuple[Ints, float]:
    """The lowest price of a kind within its capacity, and the choice of all jobs at it."""
    trial = prices.copy()

    def choose(at: float, part: Problem, its_floor: Floats | None) -> Ints:
        trial[kind] = at
        return _best(part, trial, its_floor)

    low, high = 0.0, float(prices[kind])
    at_high, at_low = choose(high, work, floor), choose(low, work, floor)
    if used(work, at_low)[kind] <= work.capacity[kind]:
        return at_low, low
    # A job that takes the same at both ends takes it in between.
    open_rows = np.flatnonzero(at_high != at_low)
    part, part_floor = of_rows(work, open_rows), None if floor is None else floor[open_rows]
    rest = int(work.capacity[kind] - used(work, at_high)[kind]) + int(
        used(part, at_high[open_rows])[kind]
    )
    high_part, low_part = at_high[open_rows], at_low[open_rows]
    choice = at_high.copy()
    for _ in range(HALVINGS):
        if high - low <= PRECISION * high or not len(open_rows):
            break
        middle = (low + high) / 2
        now = choose(middle, part, part_floor)
        if used(part, now)[kind] <= rest:
            high, high_part = middle, now
            choice[open_rows] = now
        else:
            low, low_part = middle, now
        still = np.flatnonzero(high_part != low_part)
        if len(still) < len(open_rows):
            rest -= int(used(part, high_part)[kind]) - int(
                used(of_rows(part, still), high_part[still])[kind]
            )
            open_rows = open_rows[still]
            part = of_rows(part, still)
            part_floor = None if part_floor is None else part_floor[still]
            high_part, low_part = high_part[still], low_part[still]
    return choice, high


def _surcharges(work: Problem) -> Floats:
    """Price at which each group takes no more than its limit, if all kinds cost the same."""
    found = np.zeros(len(work.limits))
    for group, limit in enumerate(work.limits):
        rows = np.flatnonzero(work.group == group)
        one = Problem(
            values=work.values[rows],
            sizes=work.sizes,
            kind=np.where(work.kind >= 0, 0, -1),
            capacity=np.array([limit]),
            group=np.full(len(rows), -1),
            limits=np.zeros(0, dtype=np.int64),
        )
        high = np.array([_highest(one.values, one.sizes)])
        found[group] = _lower(one, high, None, 0)[1]
    return found


def _row_floor(work: Problem, surcharge: Floats) -> Floats | None:
    """Least price for each job; None if no limit binds."""
    if not surcharge.any():
        return None
    return np.where(work.group >= 0, surcharge[work.group], 0.0)
