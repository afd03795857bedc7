"""`Pollux`: the objective of Pollux (OSDI 2021), solved exactly; no genetic algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.division.divide import Growth, divide
from resilin.cluster.division.problem import Problem, Solution
from resilin.cluster.division.solve import exact, price
from resilin.cluster.division.table import Bools, Floats, Ints, Rows, Table

EXACT = 4_000_000
"""Most jobs x columns x accelerators for which the dynamic program is fast enough."""
DELAY = 30.0
"""Seconds that Pollux takes a restart to cost, whatever the job has measured."""


class Pollux:
    """Maximises the harmonic mean of speedups over a fair share.

    A changed job counts with `(age - 30 * restarts) / (age + 30)` of its speedup, and a job grows
    to at most twice the largest size at which it has run.
    """

    name = "pollux"

    def __init__(self, *, constraints: Constraints | None = None) -> None:
        """Create the policy.

        Args:
            constraints: Settings of the operator; None for the defaults.
        """
        self._constraints = constraints or Constraints()
        self._rows = Rows()

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what; it keeps no memory."""
        return divide(
            status,
            objective=_values,
            growth=Growth(factor=2.0, first=1),
            constraints=self._constraints,
            solver=solve,
            rows=self._rows,
        )


def solve(problem: Problem) -> Solution:
    """Solve exactly where that is fast and possible, else by prices."""
    steps = problem.values.size * int(problem.capacity.sum())
    if len(problem.capacity) == 1 and not len(problem.limits) and steps <= EXACT:
        return exact(problem)
    return price(problem)


def restart_share(table: Table, now: float) -> Floats:
    """Part of its speedup that a job keeps if it changes, by its age and its restarts."""
    age = np.array([now - job.spec.submitted for job in table.jobs], dtype=np.float64)
    restarts = np.array([job.restarts for job in table.jobs], dtype=np.float64)
    found: Floats = np.maximum(age - DELAY * restarts, 0.0) / (age + DELAY)
    return found


def speedups(table: Table, now: float) -> Floats:
    """Speedup of each column over a fair share, with the restart counted."""
    columns = table.columns
    total = int(table.capacity.sum())
    fair_size = -(-total // max(1, len(table.jobs)))
    fair = np.zeros(len(table.jobs))
    for kind in range(len(columns.kinds)):
        its: Ints = np.flatnonzero((columns.kind == kind) & columns.offered)
        sizes = columns.sizes[its]
        # Linear between the sizes of the menu.
        after = min(int(np.searchsorted(sizes, fair_size)), len(its) - 1)
        before = max(0, after - 1) if sizes[after] > fair_size else after
        span = max(1, int(sizes[after] - sizes[before]))
        share = (min(fair_size, int(sizes[after])) - int(sizes[before])) / span
        here = (1 - share) * table.goodput[:, its[before]] + share * table.goodput[:, its[after]]
        fair = np.maximum(fair, here)
    fair = np.where(fair > 0, fair, 1.0)
    factor = np.repeat(restart_share(table, now)[:, None], len(columns.sizes), axis=1)
    factor[np.arange(len(table.jobs)), table.current] = 1.0
    factor[table.forced] = 1.0
    found: Floats = table.goodput / fair[:, None] * factor
    return found


def _values(table: Table, may: Bools, now: float) -> Floats:
    # The speedup of one host counts as 1; the small number is Pollux's own.
    hosts = float((table.capacity / table.host).sum())
    scaled = speedups(table, now) * hosts / max(1, int(table.capacity.sum()))
    return np.where(may, -1.0 / (scaled + 1e-3), -np.inf)
