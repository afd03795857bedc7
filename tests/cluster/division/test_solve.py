"""The solver against exact ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from resilin.cluster.division.problem import Problem, group_used, used
from resilin.cluster.division.solve import exact, price
from resilin.cluster.menu import sizes

NO_LIMITS = np.zeros(0, dtype=np.int64)


def instance(seed: int, *, most_hosts: int = 32, most_jobs: int = 80) -> Problem:
    """Concave and less than concave values, restart kinks, caps, and jobs of a fixed size."""
    rng = np.random.default_rng(seed)
    host = int(rng.choice([4, 8]))
    capacity = host * int(rng.integers(2, most_hosts + 1))
    num_jobs = int(rng.integers(2, most_jobs + 1))
    columns = np.array([0, *sizes(host, capacity)])
    loss = rng.uniform(0, 0.3, (num_jobs, 1)) * np.maximum(columns - 1, 0) ** rng.uniform(
        0.5, 1.1, (num_jobs, 1)
    )
    restart = np.repeat(rng.uniform(0.3, 1, (num_jobs, 1)), len(columns), axis=1)
    current = rng.integers(0, len(columns), num_jobs)
    restart[current == 0] = 1
    restart[np.arange(num_jobs), current] = 1
    weight = (rng.permutation(num_jobs) + 1.0)[:, None] / num_jobs
    values = weight * np.log(np.maximum(columns / (1 + loss) * restart, 1e-3))
    cap = rng.choice([1, 2, 4, 8, 16, 64, 10**6], num_jobs)
    values[(columns > cap[:, None]) & (columns > 0)] = -np.inf
    for row in np.flatnonzero(rng.random(num_jobs) < 0.15):
        can = np.flatnonzero(np.isfinite(values[row]))[1:]
        only = rng.choice(can)
        values[row, [each for each in can if each != only]] = -np.inf
    return Problem(
        values=values,
        sizes=columns,
        kind=np.where(columns > 0, 0, -1),
        capacity=np.array([capacity]),
        group=np.full(num_jobs, -1),
        limits=NO_LIMITS,
    )


def two_kinds(seed: int, num_jobs: int, *, limits: bool) -> Problem:
    """Two kinds of hosts, and with `limits` a limit for every third job together."""
    rng = np.random.default_rng(seed)
    capacity = np.array([int(rng.integers(1, 5)) * 4, int(rng.integers(1, 4)) * 4])
    every = sorted((size, kind) for kind in (0, 1) for size in sizes(4, int(capacity[kind])))
    columns = np.array([0, *(size for size, _ in every)])
    kind = np.array([-1, *(kind for _, kind in every)])
    speed = np.where(kind == 1, rng.uniform(0.4, 3, (num_jobs, 1)), 1.0)
    loss = rng.uniform(0, 0.4, (num_jobs, 1)) * np.maximum(columns - 1, 0) ** 0.8
    weight = rng.uniform(0.1, 1, (num_jobs, 1))
    values = weight * np.log(np.maximum(speed * columns / (1 + loss), 1e-3))
    group = np.where(np.arange(num_jobs) % 3 == 0, 0, -1) if limits else np.full(num_jobs, -1)
    return Problem(
        values=values,
        sizes=columns,
        kind=kind,
        capacity=capacity,
        group=group,
        limits=np.array([5]) if limits else NO_LIMITS,
    )


def by_milp(problem: Problem) -> float:
    """The optimum as an integer program."""
    values = np.where(np.isfinite(problem.values), problem.values, -1e6)
    num_jobs, num_columns = values.shape
    once = np.kron(np.eye(num_jobs), np.ones(num_columns))
    within = [
        np.tile(np.where(problem.kind == kind, problem.sizes, 0), num_jobs)
        for kind in range(len(problem.capacity))
    ]
    within += [
        np.kron(problem.group == group, problem.sizes) for group in range(len(problem.limits))
    ]
    most = [*problem.capacity, *problem.limits]
    found = milp(
        -values.ravel(),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(np.array(within), 0, most),
        ],
        integrality=np.ones(values.size),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    return float(-found.fun)


def gap(problem: Problem, found: float, best: float) -> float:
    """What is missing, as a part of what the best choice adds to giving nobody anything."""
    return (best - found) / (best - float(problem.values[:, 0].sum()))


def check_fits(problem: Problem, choice: np.ndarray) -> None:
    assert (used(problem, choice) <= problem.capacity).all()
    assert (group_used(problem, choice) <= problem.limits).all()
    assert np.isfinite(problem.values[np.arange(len(choice)), choice]).all()


def test_the_price_is_within_half_a_percent_of_the_optimum_on_200_instances():
    gaps = []
    for seed in range(200):
        problem = instance(seed)
        found = price(problem)
        check_fits(problem, found.choice)
        best = exact(problem).value(problem.values)
        gaps.append(gap(problem, found.value(problem.values), best))
    assert max(gaps) <= 0.005
    assert min(gaps) >= -1e-9


def test_the_dynamic_program_finds_what_trying_all_finds():
    for seed in range(30):
        problem = instance(seed, most_hosts=2, most_jobs=4)
        rows = np.arange(len(problem.values))
        best = max(
            problem.values[rows, list(each)].sum()
            for each in itertools.product(range(len(problem.sizes)), repeat=len(rows))
            if problem.sizes[list(each)].sum() <= problem.capacity[0]
        )
        assert exact(problem).value(problem.values) == pytest.approx(best)


@pytest.mark.parametrize("limits", [False, True])
def test_several_kinds_and_limits_are_near_the_integer_program(limits):
    gaps = []
    for seed in range(40):
        problem = two_kinds(seed, num_jobs=3 + seed % 12, limits=limits)
        found = price(problem)
        check_fits(problem, found.choice)
        gaps.append(gap(problem, found.value(problem.values), by_milp(problem)))
    assert max(gaps) <= 0.03
    assert np.mean(gaps) <= 0.003
    assert min(gaps) >= -1e-6


def test_no_job_gains_from_more_accelerators_at_the_price():
    problem = instance(5)
    found = price(problem)
    rows = np.arange(len(found.choice))
    reduced = problem.values - found.prices[0] * problem.sizes
    short = reduced.max(axis=1) - reduced[rows, found.choice]
    # Only jobs that were filled up or decided again are off the price, and by less than one step.
    assert (short > 1e-9).mean() < 0.2


def test_a_minimum_that_does_not_fit_is_an_error_with_both_values():
    values = np.array([[-np.inf, 1.0], [-np.inf, 1.0]])
    problem = Problem(
        values=values,
        sizes=np.array([0, 3]),
        kind=np.array([-1, 0]),
        capacity=np.array([4]),
        group=np.full(2, -1),
        limits=NO_LIMITS,
    )
    with pytest.raises(ValueError, match=r"capacity \(\[4\]\) must be at least .*\(\[6\]\)"):
        price(problem)
    with pytest.raises(ValueError, match=r"capacity \(4\) must be at least"):
        exact(problem)


def test_the_exact_solver_refuses_several_kinds():
    with pytest.raises(ValueError, match="not 2 kinds and 1 limits"):
        exact(two_kinds(0, 4, limits=True))


def test_nobody_and_nothing_can_be_solved():
    none = Problem(
        values=np.zeros((0, 1)),
        sizes=np.zeros(1, dtype=np.int64),
        kind=np.array([-1]),
        capacity=np.zeros(0, dtype=np.int64),
        group=np.zeros(0, dtype=np.int64),
        limits=NO_LIMITS,
    )
    assert len(price(none).choice) == 0
