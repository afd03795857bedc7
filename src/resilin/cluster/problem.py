"""The problem that a solver gets: values of jobs x columns, and what limits the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from resilin.cluster.table import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Values of jobs x columns, and what limits the choice."""

    values: Floats
    """Value of each column to each job; -inf where it may not be chosen."""
    sizes: Ints
    """Size of each column, ascending."""
    kind: Ints
    """Index of the kind of each column; -1 for a column of size 0."""
    capacity: Ints
    """Accelerators of each kind."""
    group: Ints
    """Group of each job that shares a limit; -1 for none."""
    limits: Ints
    """Most accelerators of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice, and the prices that explain it."""

    choice: Ints
    """Column of each job."""
    prices: Floats
    """Price of an accelerator of each kind."""
    surcharge: Floats
    """Least price for jobs of each group, where its limit binds; else 0."""

    def value(self, values: Floats) -> float:
        """Sum of the values that were chosen."""
        return float(values[np.arange(len(self.choice)), self.choice].sum())


def fitting(problem: Problem) -> Problem:
    """The problem without columns that no capacity and no limit can hold."""
    most = np.where(problem.kind >= 0, problem.capacity[problem.kind], 0)
    too_large = np.broadcast_to(problem.sizes > most, problem.values.shape)
    if len(problem.limits):
        limit = np.where(problem.group >= 0, problem.limits[problem.group], np.iinfo(np.int64).max)
        too_large = too_large | (problem.sizes > limit[:, None])
    return replace(problem, values=np.where(too_large, -np.inf, problem.values))


def of_rows(problem: Problem, rows: Ints) -> Problem:
    """The problem of some of the jobs."""
    return replace(problem, values=problem.values[rows], group=problem.group[rows])


def used(work: Problem, choice: Ints) -> Ints:
    """Accelerators of each kind that a choice takes."""
    sizes, kind = work.sizes[choice], work.kind[choice]
    counted = np.bincount(kind[kind >= 0], weights=sizes[kind >= 0], minlength=len(work.capacity))
    return counted.astype(np.int64)


def group_used(work: Problem, choice: Ints) -> Ints:
    """Accelerators that each group takes."""
    inside = work.group >= 0
    counted = np.bincount(
        work.group[inside], weights=work.sizes[choice[inside]], minlength=len(work.limits)
    )
    return counted.astype(np.int64)
