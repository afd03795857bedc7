"""All that the controller knows, as frozen values.

The state is the fold of `changes.apply` over the journal, so replaying it after a crash gives the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.decision import Reason
from resilin.cluster.job import JobSpec
from resilin.cluster.node import Allocation, Node


class Phase(Enum):
    """The phases of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = r.FINISHED
    FAILED = r.FAILED
    CANCELLED = r.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, as the controller knows it."""

    spec: JobSpec
    """The wishes of its user."""
    launch: r.Launch
    """Its command."""
    life: int = 0
    """Number of its rendezvous; 0 before the first."""
    parts: int = 0
    """Number of parts that were announced in this life."""
    lived: float = 0.0
    """When this life began."""
    hosts: int = 0
    """Number of parts with which this life was to begin."""
    cancelled: bool = False
    """Whether its user asked to end it."""
    outcome: str | None = None
    """Its end; None while it has not ended."""
    ended: float | None = None
    """When it ended."""
    why: str = ""
    """The reason of its end, or of its last new start."""
    failures: int = 0
    """Failures since it last made progress."""
    mark: float = -1.0
    """Progress at its last failure; -1 before."""
    retry: float = 0.0
    """When it may be started again after a failure."""
    hints: Mapping[str, Any] | None = None
    """The JSON form of its last hints; None before the first."""
    hinted: float | None = None
    """When they came."""
    running: int = 0
    """Accelerators of its parts that run."""
    restarts: int = 0
    """Changes of its allocation since its first start."""
    profiled: int = 0
    """Largest size it has run at."""
    served: float = 0.0
    """Accelerator-seconds of its parts that have ended."""
    waiting_since: float | None = None
    """Since when it has had nothing; None while it is to run."""
    changed: float | None = None
    """When its allocation changed last; None before its first start."""

    @property
    def active(self) -> bool:
        """Whether it is to run, now or later."""
        return self.outcome is None and not self.cancelled

    @property
    def progress(self) -> float:
        """Progress that its hints report; 0 without."""
        told = (self.hints or {}).get("progress")
        value = told.get("progress") if isinstance(told, Mapping) else None
        return float(value) if isinstance(value, int | float) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A part that was announced and has not ended."""

    name: str
    """Its name, `JOB-gN-K`."""
    job: str
    """Its job."""
    life: int
    """Life of the job that it belongs to."""
    node: str
    """Its node."""
    accelerators: int
    """Accelerators it uses."""
    announced: float
    """When it was announced."""
    seen: bool = False
    """Whether the backend has listed it."""
    began: float | None = None
    """When it was first seen running."""
    missed: float | None = None
    """Since when the backend does not list it any more."""
    asked: float | None = None
    """When it was asked to leave."""
    why: str = ""
    """The reason for that."""
    now: bool = False
    """Whether it was asked to end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past(PartRecord):
    """A part that has ended."""

    ended: float
    """When."""
    code: int | None
    """Its exit code; None if nobody knows."""
    sure: bool = True
    """Whether the backend said that it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node that the backend has reported."""

    node: Node
    """As it was reported last."""
    missed: float | None = None
    """Since when it is not reported any more; None while it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous store of the cluster."""

    endpoint: str
    """`HOST:PORT`."""
    number: int
    """Its number."""
    since: float
    """When it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything."""

    cluster: str = ""
    """Id of the cluster; empty before the first record."""
    meeting: Meeting | None = None
    """Its rendezvous store."""
    jobs: Mapping[str, Job] = field(default_factory=dict)
    """Jobs in the order of their submission, with those that ended lately."""
    parts: Mapping[str, PartRecord] = field(default_factory=dict)
    """Parts that have not ended."""
    history: tuple[Past, ...] = ()
    """Parts that have ended lately."""
    nodes: Mapping[str, KnownNode] = field(default_factory=dict)
    """Nodes that are up, or were a moment ago, by name."""
    drains: Mapping[str, float] = field(default_factory=dict)
    """When each drained node has to be empty."""
    decision: r.Decided | None = None
    """The last decision of the policy."""
    lives: int = 0
    """Number of lives of all jobs so far."""

    @property
    def wanted(self) -> Mapping[str, Allocation]:
        """The wanted allocation of each job that is to run."""
        return {} if self.decision is None else self.decision.wanted

    def by_job(self) -> dict[str, list[PartRecord]]:
        """Parts that have not ended, by job; a job without parts is not in it."""
        found: dict[str, list[PartRecord]] = {}
        for part in self.parts.values():
            found.setdefault(part.job, []).append(part)
        return found

    def phase(self, job: Job, parts: Sequence[PartRecord]) -> Phase:
        """The phase of a job with these parts."""
        if job.outcome is not None:
            return Phase(job.outcome)
        if job.cancelled or (parts and all(part.asked is not None for part in parts)):
            return Phase.STOPPING
        return Phase.RUNNING if parts else Phase.WAITING

    def reason(self, job: str) -> Reason | None:
        """The reason that the policy gives for the size of a job; None if it gives none."""
        return None if self.decision is None else self.decision.reasons.get(job)
