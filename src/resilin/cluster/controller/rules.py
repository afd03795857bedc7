"""Limits of the controller, and the acts that it carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resilin.cluster.controller.changes import apply, own, release
from resilin.cluster.controller.records import Record
from resilin.cluster.controller.state import State
from resilin.cluster.decision import Quota
from resilin.core import _validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits, in seconds, except for numbers of failures."""

    interval: float = 60.0
    """Longest time between two decisions; events cause more."""
    grace: float = 60.0
    """Time that a part has to save and leave."""
    lead: float = 90.0
    """Time before a node leaves at which its parts are moved."""
    pending: float = 900.0
    """Time after which a part that gets no machine is withdrawn."""
    absent: float = 30.0
    """Time after which a part that is not listed counts as ended, and a node as lost: longer than
    the answers of the backend are ever late."""
    finishing: float = 3600.0
    """Time that the other parts have to end after the first one finished: they may still save or
    evaluate."""
    failures: int = 5
    """Number of failures without progress after which a job has failed."""
    backoff: float = 5.0
    """Time until a job is started again after its first failure; each further one doubles it."""
    backoff_limit: float = 300.0
    """Longest such time."""
    stale: float = 300.0
    """Age of hints from which on a job does not grow."""
    logs: str = ""
    """Directory for the output of parts; empty drops it."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas by tenant."""

    def __post_init__(self) -> None:
        for name in ("interval", "grace", "lead", "pending", "absent", "finishing", "backoff"):
            _validate.real(name, getattr(self, name), at_least=0)
        _validate.whole("failures", self.failures, at_least=1)

    def log(self, part: str) -> str:
        """File for the output of a part; empty drops it."""
        return f"{self.logs}/{part}.log" if self.logs else ""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a part that was announced."""

    name: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask a part to leave."""

    name: str
    """Its name."""
    grace: float
    """Seconds that it has; 0 ends it now."""


Act = Start | Stop
"""Something to be done by a backend. It may be repeated."""


class Draft:
    """Records that are about to be written, and the state after them.

    Args:
        state: The state before.
        now: The time of the records.
    """

    def __init__(self, state: State, now: float) -> None:
        self.state = own(state)
        """The state after all records; it is changed by the next one."""
        self.now = now
        """The time of the records."""
        self.records: list[Record] = []
        """The records, in order."""
        self.troubles: list[str] = []
        """Sentences for the operator."""

    def result(self) -> State:
        """The state after all records, for others."""
        return release(self.state)

    def add(self, record: Record) -> None:
        """Add a record."""
        self.records.append(record)
        self.state = apply(self.state, record)
