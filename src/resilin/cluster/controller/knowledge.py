"""A job as policies see it: the wishes of its user, what it had so far, and its last hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.state import Job, PartRecord
from resilin.cluster.job import RESCALE_SECONDS, JobStatus, Speeds
from resilin.cluster.node import Allocation
from resilin.core.hints import HintsError, JobHints

MOST = 1e18
"""Largest number of samples, and of samples per second."""
MOST_RESCALE = 86400.0
"""Longest time that a change of size may be said to take, in seconds."""


def job_status(
    job: Job,
    parts: Sequence[PartRecord],
    allocation: Allocation | None,
    now: float,
    rules: Rules,
) -> JobStatus:
    """The status of a job.

    Args:
        job: The job.
        parts: Its parts that have not ended.
        allocation: What it has now.
        now: The time.
        rules: Limits.
    """
    hints = read_hints(job.hints)
    facts: dict[str, Any] = {}
    if hints is not None:
        facts = {
            "speeds": speeds(hints),
            # Goodput counts reference samples, progress counts reference steps.
            "done": hints.progress * hints.reference,
            "total": None if hints.total is None else hints.total * hints.reference,
            "rescale_seconds": _or(hints.rescale_seconds, RESCALE_SECONDS),
            "stale": job.hinted is not None and now - job.hinted > rules.stale,
        }
    profiled = max(job.profiled, 0 if hints is None else hints.profiled)
    running = sum(
        part.accelerators * max(0.0, now - part.began) for part in parts if part.began is not None
    )
    return JobStatus(
        spec=job.spec,
        allocation=allocation,
        profiled=profiled,
        restarts=job.restarts,
        served=job.served + running,
        waiting_since=job.waiting_since if allocation is None else None,
        changed=job.changed,
        **facts,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_hints(hints: JobHints) -> None:
    """Raises if numbers are so large or small that sums over all jobs would suffer from them."""
    work = [("progress", hints.progress * hints.reference)]
    if hints.total is not None:
        work.append(("total", hints.total * hints.reference))
    for name, value in work:
        if not value <= MOST:
            raise HintsError(f"progress.{name} ({value:g} samples) must be at most {MOST:g}")
    for table in hints.tables:
        for value in table.goodput:
            if value and not 1 / MOST <= value <= MOST:
                raise HintsError(
                    f"goodput.{table.kind} ({value:g}) must be 0, or from {1 / MOST:g} to {MOST:g}"
                )
    if not (hints.rescale_seconds or 0.0) <= MOST_RESCALE:
        raise HintsError(
            f"job.rescale_seconds ({hints.rescale_seconds}) must be at most {MOST_RESCALE:g}"
        )


def read_hints(told: Mapping[str, Any] | None) -> JobHints | None:
    """Hints from their JSON form; None without, or if another version has written them."""
    if told is None:
        return None
    try:
        return JobHints.from_json(told)
    except HintsError:
        # They were checked when they came: an older controller has read the journal of a later one.
        return None


def speeds(hints: JobHints) -> tuple[Speeds, ...]:
    """Goodput of the job at the sizes that it was offered, for each kind it was measured on."""
    return tuple(
        Speeds(kind=table.kind, sizes=table.sizes, goodput=table.goodput)
        for table in hints.tables
        if table.sizes
    )
