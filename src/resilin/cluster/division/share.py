"""Division of the cluster under quotas, priorities and patience: several solves in one order.

First each tenant gets its guaranteed share, then the priorities follow one after the other, the
highest first; within a priority, jobs that have waited too long get their smallest size before the
rest is divided by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resilin.cluster.decision import Quota
from resilin.cluster.division.problem import Problem, Solution
from resilin.cluster.division.table import Bools, Floats, Ints, Table

Solver = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The column that each job gets, and the price that it met."""

    choice: Ints
    """Column of each job."""
    floor: Ints
    """Column that each job was sure of: guaranteed, or by patience; 0 for none."""
    prices: Floats
    """Price of each kind for each job: jobs x kinds; the limit of its tenant is in it."""
    limited: Bools
    """Whether the limit of its tenant sets that price."""
    market: Floats
    """Price of each kind in the lowest priority."""


@dataclass(slots=True)
class _Room:
    """The room that is left, while shares are given."""

    table: Table
    free: Ints
    """Accelerators of each kind."""
    limits: dict[str, int]
    """Accelerators that each tenant with a limit may still have."""

    def usage(self, columns: Ints) -> Ints:
        kind = self.table.columns.kind[columns]
        sizes = self.table.columns.sizes[columns]
        inside = kind >= 0
        counted = np.bincount(kind[inside], weights=sizes[inside], minlength=len(self.free))
        return counted.astype(np.int64)

    def problem(self, values: Floats, rows: Ints, free: Ints, limits: Mapping[str, int]) -> Problem:
        tenants = [self.table.jobs[row].spec.tenant for row in rows]
        names = sorted(set(tenants) & set(limits))
        index = {name: place for place, name in enumerate(names)}
        return Problem(
            values=values[rows],
            sizes=self.table.columns.sizes,
            kind=self.table.columns.kind,
            capacity=np.maximum(free, 0),
            group=np.array([index.get(tenant, -1) for tenant in tenants], dtype=np.int64),
            limits=np.array([max(0, limits[name]) for name in names], dtype=np.int64),
        )

    def sizes_by_tenant(self, columns: Ints, rows: Iterable[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        if self.limits:
            for row in rows:
                tenant = self.table.jobs[row].spec.tenant
                size = int(self.table.columns.sizes[columns[row]])
                found[tenant] = found.get(tenant, 0) + size
        return found

    def take(self, columns: Ints, rows: Ints) -> None:
        self.free = self.free - self.usage(columns[rows])
        for tenant, size in self.sizes_by_tenant(columns, rows).items():
            if tenant in self.limits:
                self.limits[tenant] -= size


def share(
    table: Table,
    values: Floats,
    *,
    keeps: Bools,
    waited: Sequence[int],
    quotas: Mapping[str, Quota],
    solver: Solver,
) -> Shares:
    """Divide the cluster.

    Args:
        table: Jobs and columns.
        values: Value of each column to each job; -inf where it may not be chosen.
        keeps: Whether a job keeps what it has.
        waited: Rows of jobs that have waited too long, in their order.
        quotas: Quotas by tenant.
        solver: Solves one problem.
    """
    num_jobs, num_kinds = len(table.jobs), len(table.capacity)
    limits = {name: each.limit for name, each in quotas.items() if each.limit is not None}
    room = _Room(table, table.capacity.copy(), limits)
    held = np.flatnonzero(keeps)
    room.take(table.current, held)
    choice = np.where(keeps, table.current, 0)
    priority = np.array([job.spec.priority for job in table.jobs], dtype=np.int64)
    tiers = [np.flatnonzero(~keeps & (priority == each)) for each in sorted(set(priority))[::-1]]
    floor = _guaranteed(room, values, tiers, held, quotas, solver)
    reserved = room.usage(floor)
    prices = np.zeros((num_jobs, num_kinds))
    limited = np.zeros(num_jobs, dtype=np.bool_)
    market = np.zeros(num_kinds)
    for place, rows in enumerate(tiers):
        if not len(rows):
            continue
        reserved = reserved - room.usage(floor[rows])
        free = room.free - reserved
        spoken_for = room.sizes_by_tenant(
            floor, [int(row) for tier in tiers[place + 1 :] for row in tier]
        )
        limits = {name: most - spoken_for.get(name, 0) for name, most in room.limits.items()}
        _by_patience(room, values, rows, floor, free, limits, waited)
        problem = room.problem(_at_least(table, values, floor), rows, free, limits)
        found = solver(problem)
        choice[rows] = found.choice
        room.take(choice, rows)
        market = found.prices
        prices[rows] = found.prices
        if len(found.surcharge):
            inside = problem.group >= 0
            extra = np.where(inside, found.surcharge[problem.group], 0.0)
            limited[rows] = extra > found.prices.max(initial=0.0)
            prices[rows] = np.maximum(prices[rows], extra[:, None])
    return Shares(choice=choice, floor=floor, prices=prices, limited=limited, market=market)


def _guaranteed(
    room: _Room,
    values: Floats,
    tiers: Sequence[Ints],
    held: Ints,
    quotas: Mapping[str, Quota],
    solver: Solver,
) -> Ints:
    """Column that the guarantee of its tenant gives to each job."""
    table = room.table
    floor = np.zeros(len(table.jobs), dtype=np.int64)
    sure = {name: each.guaranteed for name, each in quotas.items() if each.guaranteed}
    if not sure:
        return floor
    inner = _Room(table, room.free, dict(sure))
    inner.take(table.current, held)
    inner.free = room.free
    for name, limit in room.limits.items():
        if name in inner.limits:
            inner.limits[name] = min(inner.limits[name], limit)
    for tier in tiers:
        rows = tier[[table.jobs[row].spec.tenant in sure for row in tier]] if len(tier) else tier
        if not len(rows):
            continue
        found = solver(inner.problem(values, rows, inner.free, inner.limits))
        floor[rows] = found.choice
        inner.take(floor, rows)
    return floor


def _by_patience(
    room: _Room,
    values: Floats,
    rows: Ints,
    floor: Ints,
    free: Ints,
    tenants: Mapping[str, int],
    waited: Sequence[int],
) -> None:
    """Give jobs that have waited too long their smallest size, as long as there is room."""
    columns = room.table.columns
    left = free - room.usage(floor[rows])
    given = room.sizes_by_tenant(floor, rows)
    limits = {name: most - given.get(name, 0) for name, most in tenants.items()}
    within = set(rows.tolist())
    for row in waited:
        if row not in within or floor[row]:
            continue
        tenant = room.table.jobs[row].spec.tenant
        can = np.flatnonzero(np.isfinite(values[row]) & (columns.kind >= 0))
        fits = [
            column
            for column in can
            if columns.sizes[column] <= left[columns.kind[column]]
            and columns.sizes[column] <= limits.get(tenant, columns.sizes[column])
        ]
        if not fits:
            continue
        column = min(fits, key=lambda each: (columns.sizes[each], -values[row, each], each))
        floor[row] = column
        left[columns.kind[column]] -= columns.sizes[column]
        if tenant in limits:
            limits[tenant] -= int(columns.sizes[column])


def _at_least(table: Table, values: Floats, floor: Ints) -> Floats:
    """Values without the columns that give a job less than it is sure of."""
    if not floor.any():
        return values
    columns = table.columns
    sure = floor > 0
    lower = columns.sizes < columns.sizes[floor][:, None]
    other = columns.kind != columns.kind[floor][:, None]
    return np.where(sure[:, None] & (lower | other), -np.inf, values)
