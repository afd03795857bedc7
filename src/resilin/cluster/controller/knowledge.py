"""A job as policies see it: the wishes of its user, what it had so far, and its last hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.state import Job, PartRecord
from resilin.cluster.job import RESCALE_SECONDS, JobStatus, Speeds
from resilin.cluster.node import Allocation
from resilin.core.hints import HintsError, JobHints


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
