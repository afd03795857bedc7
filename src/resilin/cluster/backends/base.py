"""`Backend`: five calls to the scheduler of a site.

A job runs as parts: one `resilin run` on each of its nodes, all joined to one rendezvous that is
not on any of them. A backend starts and stops parts and tells which exist. It decides nothing and
remembers nothing: `list` asks the scheduler, which is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from resilin.cluster.node import Node


class BackendError(RuntimeError):
    """The scheduler refused a call, or gave no answer; the message says what it said."""


class PartState(Enum):
    """Stage of a part."""

    PENDING = "pending"
    """The scheduler has it, and no machine yet."""
    RUNNING = "running"
    """Its process runs."""
    ENDED = "ended"
    """Its process is gone: it finished, left, failed, or its node is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a job: a command on one node."""

    name: str
    """`JOB-gN-K`: unique, so that a start that is repeated finds the first one."""
    job: str
    """Id of the job."""
    node: str
    """Node on which it runs."""
    accelerators: int
    """Accelerators of that node that it has."""
    command: Sequence[str]
    """Program and arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment."""
    directory: str = "."
    """Working directory."""
    log: str = ""
    """File for its output; empty drops it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """A part as the scheduler knows it."""

    name: str
    """`name` of the `Part`."""
    state: PartState
    """Its stage."""
    node: str | None = None
    """Its node, if the scheduler knows."""
    code: int | None = None
    """Exit code of a part that ended; None if nobody knows it, as of a lost node."""
    reason: str = ""
    """Words of the scheduler about it, such as NODE_FAIL."""


class Backend(Protocol):
    """The scheduler of a site. All calls may be repeated, and raise `BackendError`."""

    def detect(self) -> str | None:
        """The reason why this scheduler cannot be used here; None if it can."""

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with the accelerators that jobs of others do not use."""

    def start(self, part: Part) -> None:
        """Start a part. One of this name that exists, or has existed, is left alone."""

    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave, and end it after `grace` seconds; 0 ends it now.

        It returns at once. A part that has ended, or is not known, is left alone; a second call
        with a shorter grace shortens it.
        """

    def list(self) -> tuple[PartStatus, ...]:
        """All parts of this cluster that exist, and those that ended in the last hour."""
