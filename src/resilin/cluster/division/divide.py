"""One decision of a policy that gives each job x size a value: everything but the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from resilin.cluster.decision import ClusterStatus, Decision
from resilin.cluster.division import constraints as rules
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.division.explain import Explained, nothing_there, reasons
from resilin.cluster.division.place import Want, place
from resilin.cluster.division.share import Shares, Solver, share
from resilin.cluster.division.table import Bools, Floats, Ints, Rows, Table, build
from resilin.cluster.menu import menus
from resilin.cluster.node import Node

Objective = Callable[[Table, Bools, float], Floats]
"""Values of jobs x columns, from the table, the columns that may be chosen, and the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Largest size that a job may have, by what was measured."""

    factor: float
    """Times the largest size at which it has run."""
    first: int
    """Size of a job that has never run, where its user allows it."""


def divide(
    status: ClusterStatus,
    *,
    objective: Objective,
    growth: Growth,
    constraints: Constraints,
    solver: Solver,
    rows: Rows,
    explain: bool = False,
) -> Decision:
    """Decide who has what.

    Args:
        status: The cluster now.
        objective: Values of all choices.
        growth: Limits of growth.
        constraints: Settings of the operator.
        solver: Chooses one size for each job.
        rows: Rows of earlier tables.
        explain: Whether to give a reason for each job.
    """
    nodes = rules.usable(status.nodes, status.now, constraints.lead)
    jobs = rules.in_order(status.jobs)
    if not nodes or not jobs:
        return Decision(allocations={}, reasons=nothing_there(jobs) if explain else {})
    forced = rules.must_leave(jobs, nodes)
    table = build(jobs, menus(nodes), forced, rows)
    largest = rules.largest_sizes(table, growth.factor, growth.first)
    may = rules.allowed(table, largest)
    values = objective(table, may, status.now)
    keeps = rules.pinned(table, status, constraints)
    waited = rules.impatient(table, status.now, constraints.patience)

    def solve(keeps: Bools) -> Shares:
        return share(table, values, keeps=keeps, waited=waited, quotas=status.quotas, solver=solver)

    shares = solve(keeps)
    if constraints.changes is not None:
        # Those that did not want to change do not move for others either.
        keeps = keeps | _spared(table, values, shares, constraints.changes)
        shares = solve(keeps)
    decision = _placed(table, may, nodes, shares, keeps)
    if not explain:
        return decision
    given = {job: allocation.size for job, allocation in decision.allocations.items()}
    explained = Explained(
        table=table,
        values=values,
        largest=largest,
        shares=shares,
        keeps=keeps,
        given=np.array([given.get(job.spec.id, 0) for job in jobs], dtype=np.int64),
    )
    return replace(decision, reasons=reasons(explained))


def _spared(table: Table, values: Floats, shares: Shares, most: int) -> Bools:
    """Jobs that run and are not among those whose change is worth most."""
    everyone = np.arange(len(table.jobs))
    spared = table.current > 0
    changed = np.flatnonzero((shares.choice != table.current) & spared)

    def net(choice: Ints) -> Floats:
        kind = table.columns.kind[choice]
        paid = np.where(kind >= 0, shares.prices[everyone, kind], 0.0) * table.columns.sizes[choice]
        found: Floats = values[everyone, choice] - paid
        return found

    gain = net(shares.choice) - net(table.current)
    order = changed[np.argsort(-gain[changed], kind="stable")]
    spared[order[:most]] = False
    return spared


def _placed(
    table: Table, may: Bools, nodes: tuple[Node, ...], shares: Shares, keeps: Bools
) -> Decision:
    columns = table.columns
    kept, wants = {}, []
    rows: dict[str, int] = {}
    for row, job in enumerate(table.jobs):
        if not shares.choice[row]:
            continue
        stays = job.allocation if not table.forced[row] else None
        if keeps[row]:
            assert stays is not None, "only a job that runs keeps what it has"
            kept[job.spec.id] = stays
            continue
        kind, size = columns.place(int(shares.choice[row]))
        rows[job.spec.id] = row
        wants.append(Want(job=job.spec.id, kind=kind, size=size, now=stays))

    def smaller(want: Want) -> list[int]:
        row = rows[want.job]
        same = may[row] & (columns.kind == columns.kind[shares.choice[row]])
        return [int(size) for size in columns.sizes[same][::-1] if size < want.size]

    return Decision(
        allocations=place(nodes, kept, wants, smaller),
        prices={kind: float(shares.market[at]) for at, kind in enumerate(columns.kinds)},
    )
