"""`Goodput`: the policy of this package. Log speedups, weighted by how little a job has left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.division.divide import Growth, divide
from resilin.cluster.division.solve import price
from resilin.cluster.division.table import Bools, Floats, Rows, Table
from resilin.cluster.division.value import Urgency, goodput_values
from resilin.core import _validate


class Goodput:
    """Divides a cluster so that jobs end early on average, and every job gets on.

    It maximises the sum of `weight * log(speedup * restart)` over all jobs; see `value`.
    """

    name = "ours"

    def __init__(
        self,
        *,
        urgency: Urgency | None = None,
        growth: float = 8.0,
        first: int = 4,
        constraints: Constraints | None = None,
    ) -> None:
        """Create the policy.

        Args:
            urgency: Settings of the value; None for the defaults.
            growth: Most that a job grows beyond the largest size at which it has run.
            first: Size at which a job starts that has never run.
            constraints: Settings of the operator; None for the defaults.
        """
        _validate.real("growth", growth, at_least=1)
        _validate.whole("first", first, at_least=1)
        self._urgency = urgency or Urgency()
        self._growth = Growth(factor=growth, first=first)
        self._constraints = constraints or Constraints()
        self._rows = Rows()

    def decide(self, status: ClusterStatus, memory: Mapping[str, Any]) -> Decision:
        """Decide who has what, with a reason for each job; it keeps no memory."""
        return divide(
            status,
            objective=self._values,
            growth=self._growth,
            constraints=self._constraints,
            solver=price,
            rows=self._rows,
            explain=True,
        )

    def _values(self, table: Table, may: Bools, now: float) -> Floats:
        return goodput_values(table, may, self._urgency)
