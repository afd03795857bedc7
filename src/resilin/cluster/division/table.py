"""All jobs and all sizes as arrays: the goodput of each job at each size, and which it may have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from resilin.cluster.job import JobStatus, Speeds
from resilin.cluster.menu import Menu

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Choices of a job: nothing, or a size on one kind. The first column is nothing."""

    kinds: tuple[str, ...]
    """Kinds of accelerators, by name."""
    sizes: Ints
    """Size of each column, ascending; 0 in the first."""
    kind: Ints
    """Index of the kind of each column; -1 in the first."""
    offered: Bools
    """Whether a column is in the menu; others are for jobs that need just this size."""

    def index(self) -> dict[tuple[str, int], int]:
        """Column of each kind and size."""
        return {self.place(column): column for column in range(1, len(self.sizes))}

    def place(self, column: int) -> tuple[str, int]:
        """Kind and size of a column that is not the first."""
        return self.kinds[self.kind[column]], int(self.sizes[column])


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Jobs x columns."""

    jobs: tuple[JobStatus, ...]
    """The jobs, in the order of rows."""
    columns: Columns
    """The columns."""
    capacity: Ints
    """Accelerators of each kind."""
    host: Ints
    """Accelerators of the usual host of each kind."""
    goodput: Floats
    """Goodput of each job in each column; 0 in the first."""
    may: Bools
    """Whether the job's user and its table allow the column."""
    current: Ints
    """Column that each job has now; 0 if it waits, or has to leave what it has."""
    forced: Bools
    """Whether the job has to leave a node, so that it changes whatever is decided."""


class Rows:
    """Goodput over the columns, kept as long as the hints of a job and the menu stay the same."""

    def __init__(self, most: int = 20_000) -> None:
        """Create the store.

        Args:
            most: Rows that are kept; the ones that were not used for longest are dropped.
        """
        self._most = most
        self._rows: OrderedDict[tuple[object, ...], Floats] = OrderedDict()
        self._menu: tuple[object, ...] = ()

    def all_of(
        self, jobs: Sequence[JobStatus], columns: Columns, ratios: Mapping[tuple[str, str], float]
    ) -> Floats:
        """Goodput of each job in each column."""
        menu = (columns.kinds, columns.sizes.tobytes(), columns.kind.tobytes())
        if menu != self._menu:
            self._rows.clear()
            self._menu = menu
        scales = tuple(sorted(ratios.items()))
        found = []
        for job in jobs:
            key = (job.speeds, scales)
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = goodput_row(job.speeds, columns, ratios)
            else:
                self._rows.move_to_end(key)
            found.append(row)
        while len(self._rows) > max(self._most, 2 * len(jobs)):
            self._rows.popitem(last=False)
        return np.stack(found) if found else np.zeros((0, len(columns.sizes)))


def goodput_row(
    speeds: Sequence[Speeds], columns: Columns, ratios: Mapping[tuple[str, str], float]
) -> Floats:
    """Goodput of one job in each column; 0 where it has no plan.

    Between measured sizes it is interpolated, beyond the largest it stays. A kind without a table
    takes the table of another one, times the ratio that other jobs have measured, or 1. A job
    without any table is taken to scale perfectly.

    Args:
        speeds: Tables of the job.
        columns: The columns.
        ratios: Goodput of the second kind over that of the first.
    """
    row = np.zeros(len(columns.sizes))
    if not speeds:
        row[:] = columns.sizes
        return row
    tables = {each.kind: each for each in speeds}
    for index, kind in enumerate(columns.kinds):
        table, ratio = tables.get(kind), 1.0
        if table is None:
            # The first kind by name whose ratio is measured, else the first by name.
            known = sorted(tables, key=lambda other: ((other, kind) not in ratios, other))
            table, ratio = tables[known[0]], ratios.get((known[0], kind), 1.0)
        where = columns.kind == index
        row[where] = ratio * _at(table, columns.sizes[where])
    return row


def _at(table: Speeds, wanted: Ints) -> Floats:
    sizes, goodput = np.array(table.sizes), np.array(table.goodput)
    if np.array_equal(sizes, wanted):
        return goodput
    planned = goodput > 0
    if not planned.any():
        return np.zeros(len(wanted))
    known, values = sizes[planned], goodput[planned]
    found: Floats = np.interp(wanted, known, values)
    # Below the smallest size that was tried, in proportion.
    found = np.where(wanted < known[0], values[0] * wanted / known[0], found)
    return np.where(np.isin(wanted, sizes[~planned]), 0.0, found)


def measured_ratios(jobs: Sequence[JobStatus]) -> dict[tuple[str, str], float]:
    """Goodput of one kind over another: the median over jobs that have measured both."""
    found: dict[tuple[str, str], list[float]] = {}
    for job in jobs:
        if len(job.speeds) < 2:
            continue
        for one in job.speeds:
            for other in job.speeds:
                common = [s for s in one.sizes if s in other.sizes] if one is not other else []
                for size in common:
                    base = one.goodput[one.sizes.index(size)]
                    value = other.goodput[other.sizes.index(size)]
                    if base > 0 and value > 0:
                        found.setdefault((one.kind, other.kind), []).append(value / base)
                        break
    return {pair: float(np.median(values)) for pair, values in found.items()}


def columns_of(menus: Mapping[str, Menu], extra: set[tuple[str, int]]) -> Columns:
    """Columns of the menus, and of sizes that single jobs need."""
    kinds = tuple(menus)
    offered = {(size, kind) for kind, menu in menus.items() for size in menu.sizes}
    every = sorted(offered | {(size, kind) for kind, size in extra})
    return Columns(
        kinds=kinds,
        sizes=np.array([0, *(size for size, _ in every)], dtype=np.int64),
        kind=np.array([-1, *(kinds.index(kind) for _, kind in every)], dtype=np.int64),
        offered=np.array([True, *((size, kind) in offered for size, kind in every)]),
    )


def build(
    jobs: Sequence[JobStatus], menus: Mapping[str, Menu], forced: set[str], rows: Rows
) -> Table:
    """Put jobs and sizes together.

    Args:
        jobs: The jobs, in the order of rows.
        menus: Menu of each kind that can be used now.
        forced: Ids of jobs that have to leave a node.
        rows: Rows of earlier tables.
    """
    wishes: list[set[tuple[str, int]]] = []
    for job in jobs:
        wishes.append(set())
        allocation = job.allocation
        if (
            allocation
            and allocation.kind in menus
            and job.spec.id not in forced
            and allocation.size not in menus[allocation.kind].sizes
        ):
            wishes[-1].add((allocation.kind, allocation.size))
    least = np.array([job.spec.min_replicas for job in jobs], dtype=np.int64)
    most = np.array([job.spec.max_replicas for job in jobs], dtype=np.int64)
    for kind, menu in menus.items():
        offered = np.array([*menu.sizes, np.iinfo(np.int64).max])
        next_one = offered[np.searchsorted(offered, least)]
        # No size of the menu lies within its bounds: it gets its smallest one.
        for row in np.flatnonzero((next_one > most) & (least <= menu.capacity)):
            wishes[row].add((kind, int(least[row])))
    columns = columns_of(menus, set().union(*wishes))
    index = columns.index()
    goodput = rows.all_of(jobs, columns, measured_ratios(jobs))
    sizes = columns.sizes
    within = (sizes >= least[:, None]) & (sizes <= most[:, None]) & columns.offered
    current = np.zeros(len(jobs), dtype=np.int64)
    for at, job in enumerate(jobs):
        for kind, size in wishes[at]:
            within[at, index[kind, size]] = True
        if job.spec.kinds:
            known = [columns.kinds.index(kind) for kind in job.spec.kinds if kind in columns.kinds]
            within[at] &= np.isin(columns.kind, known)
        if job.allocation and job.allocation.kind in menus and job.spec.id not in forced:
            current[at] = index[job.allocation.kind, job.allocation.size]
    may = within & (goodput > 0)
    may[:, 0] = True
    # What runs may stay, whatever its table says.
    may[np.arange(len(jobs)), current] = True
    return Table(
        jobs=tuple(jobs),
        columns=columns,
        capacity=np.array([menu.capacity for menu in menus.values()], dtype=np.int64),
        host=np.array([menu.host for menu in menus.values()], dtype=np.int64),
        goodput=goodput,
        may=may,
        current=current,
        forced=np.array([job.spec.id in forced for job in jobs], dtype=np.bool_),
    )
