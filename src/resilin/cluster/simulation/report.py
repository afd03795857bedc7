"""`Figures`: what a simulation comes to, in the numbers by which policies are compared.

Over several workloads, each figure is the mean of the figures of the workloads, as published
comparisons do; ratios of jobs are pooled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resilin.cluster.simulation.run import Result

Times = Mapping[str, float]
"""Seconds from submission to end, by the name of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one workload, or their means over several."""

    mean: float
    """Mean seconds from submission to end of a job."""
    median: float
    """Median of them."""
    p99: float
    """Seconds within which 99% of the jobs end."""
    makespan: float
    """Seconds from the first submission to the last end."""
    restarts: float
    """Changes of the allocation of a job after its first start, on average."""
    use: float
    """Share of the accelerator-seconds that jobs had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Times of jobs against those of the same jobs under something else."""

    no_slower: float
    """Share of the jobs that took no longer."""
    worst: float
    """Largest ratio of a job's time to its other time."""
    typical: float
    """Geometric mean of the ratios."""


def times(result: Result) -> dict[str, float]:
    """Seconds from submission to end of each job."""
    return {job.id: job.seconds for job in result.jobs}


def figures(result: Result) -> Figures:
    """Figures of one simulation."""
    seconds = np.array([job.seconds for job in result.jobs])
    first = min(job.submitted for job in result.jobs)
    return Figures(
        mean=float(seconds.mean()),
        median=float(np.median(seconds)),
        p99=float(np.quantile(seconds, 0.99)),
        makespan=max(job.finished for job in result.jobs) - first,
        restarts=float(np.mean([job.restarts for job in result.jobs])),
        use=sum(job.served for job in result.jobs) / result.capacity,
    )


def mean(parts: Sequence[Figures]) -> Figures:
    """Mean of the figures of several workloads."""
    names = Figures.__dataclass_fields__
    return Figures(
        **{name: float(np.mean([getattr(each, name) for each in parts])) for name in names}
    )


def fairness(pairs: Sequence[tuple[Times, Times]]) -> Fairness:
    """Compare jobs one by one.

    Args:
        pairs: Times of the jobs of a workload, and the other times of the same jobs.

    Raises:
        ValueError: The jobs of a pair are not the same.
    """
    ratios: list[float] = []
    for ours, other in pairs:
        if ours.keys() != other.keys():
            odd = sorted(ours.keys() ^ other.keys())
            raise ValueError(f"both must be times of the same jobs; {odd[0]} is in one of them")
        ratios += [ours[name] / other[name] for name in ours]
    array = np.array(ratios)
    return Fairness(
        no_slower=float((array <= 1).mean()),
        worst=float(array.max()),
        typical=float(np.exp(np.log(array).mean())),
    )


def published(path: Path) -> dict[str, dict[str, float]]:
    """Times of jobs by workload, from the `summary.json` of a published simulation.

    Raises:
        ValueError: The file is no such summary.
    """
    told = json.loads(path.read_text())
    try:
        return {
            workload: {job: float(seconds) for job, seconds in jobs.items()}
            for workload, jobs in told["jcts"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must have jcts by workload and job ({error!r})") from None
