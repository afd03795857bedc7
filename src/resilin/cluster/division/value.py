"""The value of each size to each job, as numbers that can be explained one by one.

`value = weight * log(speedup * restart)`: speedup is over the job's goodput at a fair share of the
cluster; the weight is larger for jobs with little left; restart is the part of the coming time that
a change of size leaves for work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resilin.cluster.division.table import Bools, Floats, Table
from resilin.cluster.job import JobStatus
from resilin.core import _validate

NOTHING = 1e-3
"""Speedup that stands for waiting: low enough that every job gets its minimum before another one
gets more than a fair share."""
OVERRUN = 0.2
"""Part of the work done that a job beyond its declared end is taken to need still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """Settings of the value."""

    p: float = 1.5
    """Urgency of short jobs: weight = (rank + even) ** p, where the job with least left has the
    highest rank; 0 counts all jobs the same."""
    even: float = 2.0
    """Ranks below the lowest: a few jobs share more evenly than many, so that the last of them ends
    sooner."""
    p_unknown: float = 0.4
    """The same for jobs whose end is not known: what they have done says less."""
    horizon: float = 300.0
    """Seconds over which a change of size has to pay for itself, or the job's end if sooner."""

    def __post_init__(self) -> None:
        _validate.real("p", self.p, at_least=0)
        _validate.real("p_unknown", self.p_unknown, at_least=0)
        _validate.real("even", self.even, at_least=0)
        _validate.real("horizon", self.horizon, above=0)


def fair_goodput(table: Table, may: Bools) -> Floats:
    """Goodput of each job at a fair share of the cluster, on the best kind for it."""
    columns = table.columns
    fair = max(1.0, float(table.capacity.sum()) / max(1, len(table.jobs)))
    at_most = columns.offered & (columns.sizes <= fair) & (columns.kind >= 0)
    found = np.zeros(len(table.jobs))
    for kind in range(len(columns.kinds)):
        its = np.flatnonzero(at_most & (columns.kind == kind))
        if len(its):
            possible = may[:, columns.kind == kind].any(axis=1)
            found = np.maximum(found, np.where(possible, table.goodput[:, its[-1]], 0.0))
    # A job that cannot run at a fair share is measured at its smallest size.
    positive = may & (table.goodput > 0)
    rows = np.arange(len(table.jobs))
    smallest = table.goodput[rows, positive.argmax(axis=1)]
    found = np.where(found > 0, found, smallest)
    return np.where(found > 0, found, 1.0)


def seconds_left(table: Table, fair: Floats) -> Floats:
    """Seconds that each job still needs at a fair share.

    A job whose end is unknown is taken to need as much again as it has done, a job beyond its
    declared end a part of what it has done, and a job that has never been measured nothing.
    """
    work = np.array([_work_left(job) for job in table.jobs], dtype=np.float64)
    measured = np.array([bool(job.speeds) for job in table.jobs], dtype=np.bool_)
    left: Floats = np.where(measured, work / fair, 0.0)
    return left


def _work_left(job: JobStatus) -> float:
    if job.total is None:
        return job.done
    return job.total - job.done if job.done < job.total else OVERRUN * job.done


def weights(table: Table, left: Floats, urgency: Urgency) -> Floats:
    """Weight of each job: a power of its rank by seconds left, about 1 on average."""
    num_jobs = len(left)
    # Jobs with as much left are in the order of rows: the first one has the higher rank.
    order = np.argsort(-left[::-1], kind="stable")
    rank = np.empty(num_jobs)
    rank[num_jobs - 1 - order] = np.arange(1, num_jobs + 1)
    known = np.array([job.total is not None for job in table.jobs], dtype=np.bool_)
    power = np.where(known, urgency.p, urgency.p_unknown)
    found: Floats = (1 + power) * ((rank + urgency.even) / (num_jobs + urgency.even)) ** power
    return found


def restart_factor(table: Table, left: Floats, horizon: float) -> Floats:
    """Part of the coming time that each column leaves each job for work.

    1 for staying, for a job that waits, and for one that has to change whatever is decided.
    """
    cost = np.array([job.rescale_seconds for job in table.jobs], dtype=np.float64)
    ahead = np.maximum(np.minimum(horizon, left), 1e-9)
    factor = np.clip(1 - cost / ahead, NOTHING, 1.0)
    free = (table.current == 0) | table.forced
    found = np.repeat(np.where(free, 1.0, factor)[:, None], len(table.columns.sizes), axis=1)
    found[np.arange(len(left)), table.current] = 1.0
    return found


def goodput_values(table: Table, may: Bools, urgency: Urgency) -> Floats:
    """Value of each column to each job; -inf where it may not be chosen."""
    fair = fair_goodput(table, may)
    left = seconds_left(table, fair)
    speedup = table.goodput / fair[:, None] * restart_factor(table, left, urgency.horizon)
    weight = weights(table, left, urgency)
    found = weight[:, None] * np.log(np.maximum(speedup, NOTHING))
    return np.where(may, found, -np.inf)
