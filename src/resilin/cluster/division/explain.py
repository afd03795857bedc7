"""Reasons: two numbers and a comparison for each job, in one sentence that is true."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from resilin.cluster.decision import Reason
from resilin.cluster.division.share import Shares
from resilin.cluster.division.table import Bools, Floats, Ints, Table
from resilin.cluster.job import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A decision, and what it was made of."""

    table: Table
    """Jobs and columns."""
    values: Floats
    """Value of each column to each job."""
    largest: Floats
    """Largest size that each job may have now."""
    shares: Shares
    """The choice, and the prices."""
    keeps: Bools
    """Whether a job kept what it had, whatever its value."""
    given: Ints
    """Size of each job after it was placed."""


def nothing_there(jobs: Iterable[JobStatus]) -> dict[str, Reason]:
    """Reason of each job where no node can be used."""
    text = "waits: no node has accelerators that it could use"
    nothing = Reason(size=0, next_size=None, value=0.0, price=0.0, text=text)
    return {job.spec.id: nothing for job in jobs}


def reasons(made: Explained) -> dict[str, Reason]:
    """Reason of each job, by its id."""
    table, columns = made.table, made.table.columns
    rows = np.arange(len(table.jobs))
    placed = columns.sizes[made.shares.choice] == made.given
    choice = made.shares.choice.copy()
    for other in np.flatnonzero(~placed):
        # It was placed at a smaller size of the same kind, or not at all.
        same = (columns.kind == columns.kind[choice[other]]) & (columns.sizes == made.given[other])
        choice[other] = np.flatnonzero(same)[0] if made.given[other] else 0
    own_kind = columns.kind[choice][:, None]
    larger = columns.sizes > made.given[:, None]
    larger &= np.isfinite(made.values) & ((columns.kind == own_kind) | (own_kind < 0))
    with np.errstate(invalid="ignore"):
        gain = made.values - made.values[rows, choice][:, None]
    extra = np.maximum(columns.sizes - made.given[:, None], 1)
    each = np.where(larger, gain / extra, -np.inf)
    best = each.argmax(axis=1)
    value = each[rows, best]
    met = np.where(np.isfinite(value), best, choice)
    kind = columns.kind[met]
    cheapest = made.shares.prices.min(axis=1, initial=np.inf)
    price = np.where(kind >= 0, made.shares.prices[rows, kind], cheapest)
    found = {}
    for row, job in enumerate(table.jobs):
        can = bool(np.isfinite(value[row]))
        next_size = int(columns.sizes[best[row]]) if can else None
        numbers = float(value[row]) if can else 0.0, float(price[row])
        text = _because(made, row, bool(placed[row]), next_size, *numbers)
        size = int(made.given[row])
        found[job.spec.id] = Reason(
            size=size,
            next_size=next_size,
            value=numbers[0],
            price=numbers[1],
            text=f"{f'has {size}' if size else 'waits'}: {text}",
        )
    return found


def _because(
    made: Explained, row: int, placed: bool, next_size: int | None, value: float, price: float
) -> str:
    table, job, size = made.table, made.table.jobs[row], int(made.given[row])
    spec = job.spec
    if made.keeps[row]:
        if not spec.preemptible:
            return "it may not be preempted"
        return "it changed a short time ago, or other changes of this round are worth more"
    if not placed:
        wished = int(table.columns.sizes[made.shares.choice[row]])
        return f"{wished} accelerators are free, but not on the hosts that it would need"
    if next_size is None:
        return _limit(made, row, size)
    more = next_size - size
    others = "others of its tenant" if made.shares.limited[row] else "others"
    numbers = (
        f"{more} more accelerators would be worth {value:.2g} each to it, "
        f"and {price:.2g} each to {others}"
    )
    if value <= 0:
        return "more accelerators would not make it faster, with the cost of a change counted"
    if value <= price:
        return numbers
    return f"{numbers}, but fewer than {more} are left over for it"


def _limit(made: Explained, row: int, size: int) -> str:
    table, job = made.table, made.table.jobs[row]
    spec = job.spec
    wider = table.may[row] & (table.columns.sizes > max(size, made.largest[row]))
    if job.stale and wider.any():
        return "its last hints are too old to let it grow"
    if wider.any():
        if not job.speeds:
            return f"it has not been measured yet, so it starts with {int(made.largest[row])}"
        return f"it has run on {job.profiled} at most, so it may have {int(made.largest[row])} now"
    if not size:
        return f"no node can hold its smallest size, {spec.min_replicas}"
    if size >= spec.max_replicas:
        return f"that is its largest size, {spec.max_replicas}"
    return "no larger size is offered to it"
