"""`Sia`: the utility of Sia (SOSP 2023), with the restart cost that each job has measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.division.divide import Growth, divide
from resilin.cluster.division.table import Bools, Floats, Rows, Table
from resilin.cluster.division.value import NOTHING, fair_goodput, restart_factor, seconds_left
from resilin.cluster.policies.pollux import solve

POWER = -0.5
"""Exponent of the speedup in Sia's utility."""


class Sia:
    """Minimises the sum of `(speedup * restart) ** -0.5` over all jobs.

    Sia's own solver and restart model were not rebuilt: the solver is exact on small clusters, and
    the restart factor is the one of `value`.
    """

    name = "sia"

    def __init__(
        self,
        *,
        horizon: float = 300.0,
        growth: float = 2.0,
        first: int = 1,
        constraints: Constraints | None = None,
    ) -> None:
        """Create the policy.

        Args:
            horizon: Seconds over which a change has to pay for itself.
            growth: Most that a job grows beyond the largest size at which it has run.
            first: Size at which a job starts that has never run.
            constraints: Settings of the operator; None for the defaults.
        """
        self._horizon = horizon
        self._growth = Growth(factor=growth, first=first)
        self._constraints = constraints or Constraints()
        self._rows = Rows()

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what; it keeps no memory."""
        return divide(
            status,
            objective=self._values,
            growth=self._growth,
            constraints=self._constraints,
            solver=solve,
            rows=self._rows,
        )

    def _values(self, table: Table, may: Bools, now: float) -> Floats:
        fair = fair_goodput(table, may)
        left = seconds_left(table, fair)
        speedup = table.goodput / fair[:, None] * restart_factor(table, left, self._horizon)
        return np.where(may, -(np.maximum(speedup, NOTHING) ** POWER), -np.inf)
