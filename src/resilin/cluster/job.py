"""A job as a policy knows it: the wishes of its user, and what the job has measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilin.cluster.node import Allocation
from resilin.core import _validate

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of jobs and tenants: what every scheduler takes as part of a name."""
RESCALE_SECONDS = 30.0
"""Seconds that a change of size costs until the job has measured it."""


def check_name(field: str, name: object) -> str:
    """Return `name`; an error if it is not a name that all backends take."""
    text = _validate.text(field, name)
    if not NAME.fullmatch(text):
        raise ValueError(
            f"{field} ({text!r}) must be 1 to 40 lower-case letters, digits and hyphens, "
            "without a hyphen at either end"
        )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The wishes of the user who submitted a job."""

    id: str
    """Name of the job, unique in the cluster."""
    submitted: float
    """Time of its submission, in seconds."""
    tenant: str = "default"
    """The payer: quotas are per tenant."""
    priority: int = 0
    """Jobs of a higher priority are served first."""
    min_replicas: int = 1
    """Smallest size at which it runs; it waits rather than run with fewer replicas."""
    max_replicas: int = 64
    """Largest size; equal to the smallest, the job has a fixed size."""
    preemptible: bool = True
    """Whether it may lose accelerators once it runs."""
    kinds: tuple[str, ...] = ()
    """Kinds of accelerators it may run on; empty means any."""

    def __post_init__(self) -> None:
        check_name("id", self.id)
        check_name("tenant", self.tenant)
        _validate.real("submitted", self.submitted)
        _validate.whole("min_replicas", self.min_replicas, at_least=1)
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) must be at least min_replicas "
                f"({self.min_replicas})"
            )

    @property
    def elastic(self) -> bool:
        """Whether it runs at more than one size."""
        return self.min_replicas < self.max_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Goodput of a job on one kind of accelerator, at several sizes.

    Any unit will do, as long as it is the same for all kinds: policies use ratios.
    """

    kind: str
    """Kind of accelerator."""
    sizes: tuple[int, ...]
    """Numbers of replicas, ascending."""
    goodput: tuple[float, ...]
    """Goodput at each size, on as few hosts as the menu has for it; 0 where no plan is allowed."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.goodput) or not self.sizes:
            raise ValueError(
                f"sizes has {len(self.sizes)} entries and goodput has {len(self.goodput)}: they "
                "must have the same number, at least 1"
            )
        if self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes {self.sizes} must be ascending, from at least 1")
        for each in self.goodput:
            _validate.real("goodput", each, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as a policy sees it at one time."""

    spec: JobSpec
    """The wishes of its user."""
    allocation: Allocation | None = None
    """Its accelerators now; None while it waits."""
    speeds: tuple[Speeds, ...] = ()
    """Measured and predicted goodput, one entry for each kind; empty before it was measured."""
    profiled: int = 0
    """Largest size at which it has run."""
    rescale_seconds: float = RESCALE_SECONDS
    """Seconds that a change of size costs, as measured."""
    done: float = 0.0
    """Work done, in the unit of goodput times seconds."""
    total: float | None = None
    """Work of the whole job in that unit, declared by the user or estimated; None if unknown."""
    restarts: int = 0
    """Changes of its allocation since its first start."""
    served: float = 0.0
    """Accelerator-seconds it has had."""
    waiting_since: float | None = None
    """Time since which it has had nothing; None while it runs."""
    changed: float | None = None
    """Time of the last change of its allocation; None before its first start."""
    stale: bool = False
    """Whether its last hints are too old to let it grow."""
