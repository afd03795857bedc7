"""Records of the journal: each is one thing that happened, or that is about to be done.

`to_json` and `from_json` give them a name and back; `changes.apply` says what each of them changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilin.cluster.controller import codec
from resilin.cluster.decision import Reason
from resilin.cluster.job import JobSpec
from resilin.cluster.node import Allocation, Node

FINISHED, FAILED, CANCELLED = "finished", "failed", "cancelled"
"""Outcomes of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command of a job."""

    script: tuple[str, ...]
    """Script and its arguments, as after the options of `resilin run`."""
    directory: str
    """Working directory, the same on all nodes."""
    python: str = "python"
    """Interpreter of the nodes."""
    options: tuple[str, ...] = ()
    """Further options of `resilin run`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment."""
    checkpoint_dir: str | None = None
    """Directory for checkpoints; None means one in the working directory, for this submission
    alone. A script that sets its own uses that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Something that happened at a time."""

    time: float
    """When, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Record):
    """A cluster began: the first record of a journal."""

    cluster: str
    """Its id, which backends mark its parts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met(Record):
    """The rendezvous store of the cluster was started, at this address from now on."""

    endpoint: str
    """`HOST:PORT`."""
    number: int
    """Its number, which names its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Record):
    """A user submitted a job."""

    spec: JobSpec
    """The wishes of the user."""
    launch: Launch
    """Its command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked(Record):
    """A user asked to cancel a job."""

    job: str
    """Its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinted(Record):
    """A job reported its hints."""

    job: str
    """Its id."""
    hints: Mapping[str, Any]
    """The JSON form of its `JobHints`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Record):
    """An operator asked to leave a node, or took that back."""

    node: str
    """Its name."""
    at: float | None
    """When it has to be empty; None takes the request back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen(Record):
    """The backend reported a node that is new, back, or changed."""

    node: Node
    """The node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMissed(Record):
    """The backend did not report a node."""

    node: str
    """Its name."""
    lost: bool
    """Whether it is given up; else it may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Record):
    """The policy decided: this is wanted from now on."""

    generation: int
    """Number of the decision."""
    because: str
    """Digest of jobs and nodes: a change of it calls for the next decision."""
    wanted: Mapping[str, Allocation]
    """Allocation of each job that is to run."""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """Reasons, by job."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of an accelerator of each kind."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Memory of the policy."""
    policy: str = ""
    """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced(Record):
    """A part is about to be started; or one that runs was found, and belongs to this job."""

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
    hosts: int = 0
    """Parts that the job is to have, if this one begins a life."""
    adopted: bool = False
    """Whether it was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Record):
    """The backend listed a part that it had not listed before, or not as running."""

    name: str
    """Its name."""
    running: bool
    """Whether it runs, or waits for its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(Record):
    """The backend no longer lists a part."""

    name: str
    """Its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Record):
    """A part is about to be asked to leave."""

    name: str
    """Its name."""
    why: str
    """The reason, in a few words."""
    now: bool = False
    """Whether it is ended without a chance to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Record):
    """A part has ended."""

    name: str
    """Its name."""
    code: int | None
    """Its exit code; None if nobody knows."""
    why: str
    """The end, in a few words."""
    sure: bool = True
    """Whether the backend said so; else it has not listed the part for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stumbled(Record):
    """Parts of a job ended on their own: it is started again later."""

    job: str
    """Its id."""
    failures: int
    """Failures since it last made progress, this one included."""
    retry: float
    """When it may be started again."""
    why: str
    """The end of its part, and the file with its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Record):
    """A job has ended for good."""

    job: str
    """Its id."""
    outcome: str
    """`finished`, `failed` or `cancelled`."""
    why: str
    """One sentence."""


KINDS: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in (
        Opened,
        Met,
        Submitted,
        CancelAsked,
        Hinted,
        Drained,
        NodeSeen,
        NodeMissed,
        Decided,
        Announced,
        Seen,
        Missed,
        Asked,
        Ended,
        Stumbled,
        Closed,
    )
}
"""Every kind of record, by its name in the journal."""


def to_json(record: Record) -> dict[str, Any]:
    """The JSON form of a record."""
    return {"record": type(record).__name__, **codec.to_json(record)}


def from_json(told: Mapping[str, Any]) -> Record:
    """The record that `to_json` was given.

    Raises:
        ValueError: It is no record that this version knows.
    """
    name = told.get("record")
    if name not in KINDS:
        raise ValueError(f"record ({name!r}) must be one of {', '.join(KINDS)}")
    return codec.from_json(KINDS[name], told)
