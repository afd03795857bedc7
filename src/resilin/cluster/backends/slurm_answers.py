"""Values from what the commands of Slurm print.

Their JSON needs a plugin that many sites do not have, and changes with each version. Two plain
texts are read: the fields of `squeue --Format`, and the pairs `Key=value` of `scontrol
--oneliner`. They were tried with Slurm 22.05.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from resilin.cluster.backends.base import PartState, PartStatus

FIELDS = (
    "JobID",
    "Name",
    "State",
    "NodeList",
    "ReqNodes",
    "exit_code",
    "StartTime",
    "TimeLimit",
    "Comment",
)
"""Fields of `squeue`; the comment is the last, as it alone may have a separator in it."""
FORMAT = ",".join(f"{field}:|" for field in FIELDS) + ",Reason:|"
"""Value of `squeue --Format`."""
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
"""States of a job without a process; while its node boots, it has a node."""
OVER = {
    *("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED"),
}
"""States of a job that has ended; in all others it has a node and, maybe, a process."""
GONE = {
    *("DOWN", "ERROR", "FAIL", "FUTURE", "INVAL", "INVALID_REG", "NOT_RESPONDING", "NO_RESPOND"),
    *("POWERING_DOWN", "POWER_DOWN", "REBOOT_ISSUED", "UNKNOWN"),
}
"""States of a node that takes no jobs."""
LEAVING = {"DRAIN", "DRAINED", "DRAINING", "FAILING", "MAINT", "MAINTENANCE", "REBOOT_REQUESTED"}
"""States of a node that takes no new jobs, and lets those that it has continue."""
ASKED = "asked"
"""Last word of the comment of a job that was asked to leave."""
LEFT = (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
"""Exit codes of a part that was asked to leave."""
_PAIR = re.compile(r"(?:^|\s)([A-Za-z]\w*)=(\S*)")
_GPU = re.compile(r"\bgpu(?::(?:\(null\)|([^:,()]+)))?:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of Slurm that runs a part."""

    number: int
    """Its id in Slurm."""
    name: str
    """Its name."""
    state: str
    """Its state, in Slurm's words."""
    node: str | None
    """The node it has, or else the one it asked for."""
    status: int
    """Its end, as `wait` reports it."""
    started: float | None
    """When it started, in seconds."""
    limit: int | None
    """Its time limit in minutes; None if it has none."""
    accelerators: int
    """Accelerators it has, which our comment says."""
    asked: bool
    """Whether it was asked to leave, which our comment says."""
    reason: str
    """Reason why it waits or has ended, in Slurm's words."""

    @property
    def phase(self) -> PartState:
        """Phase of the life of the part."""
        if self.state in WAITING:
            return PartState.PENDING
        return PartState.ENDED if self.state in OVER else PartState.RUNNING

    @property
    def code(self) -> int | None:
        """Exit code of the part; None if it has not ended, or not on its own account.

        A part that Slurm displaces, or whose time limit is near, is asked to leave by a signal, and
        its code is that of the signal: it has not failed. A job that was cancelled before it ran
        has no exit code, although Slurm says 0.
        """
        if self.state == "COMPLETED":
            return 0
        if self.state not in ("FAILED", "OUT_OF_MEMORY"):
            return None
        number = self.status & 0x7F
        code = 128 + number if number else self.status >> 8 & 0xFF
        return None if code in LEFT else code or None

    def part(self, name: str) -> PartStatus:
        """The part of this name, as this job runs it."""
        said = self.state
        if self.reason not in ("", "None", "(null)"):
            said = f"{said}: {self.reason}"
        code = self.code if self.phase is PartState.ENDED else None
        return PartStatus(name=name, state=self.phase, node=self.node, code=code, reason=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node of Slurm."""

    name: str
    """Its name."""
    states: frozenset[str]
    """Its state, and the flags that it has."""
    partitions: frozenset[str]
    """Partitions it belongs to."""
    gpus: int
    """GPUs it has of the kind of which it has most."""
    kind: str
    """That kind; empty if Slurm does not know it."""
    gpus_used: int
    """Of these, those that jobs have."""
    cpus: int
    """CPUs that jobs can have."""
    cpus_used: int
    """CPUs that jobs have."""
    threads: int
    """CPUs of one core: jobs have whole cores."""
    memory: int
    """Memory that jobs can have, in megabytes."""
    memory_used: int
    """Memory that jobs have."""
    since: float | None
    """Since when it has been in this state for a reason that somebody gave, in seconds."""

    @property
    def up(self) -> bool:
        """Whether its jobs run."""
        return not self.states & GONE

    @property
    def leaving(self) -> bool:
        """Whether it takes no new jobs."""
        return bool(self.states & LEAVING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A time for which nodes are kept for somebody."""

    name: str
    """Its name."""
    start: float
    """When it begins, in seconds."""
    end: float
    """When it ends."""
    nodes: str
    """Its nodes, as Slurm writes lists of them."""


def jobs(text: str) -> Iterator[Job]:
    """The jobs that `squeue --Format` with our `FORMAT` has printed.

    Raises:
        ValueError: A line is not of that form.
    """
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split("|", len(FIELDS) - 1)]
        if len(cells) != len(FIELDS) or not cells[0].isdigit():
            raise ValueError(f"squeue printed {line!r}, and not a job in the format {FORMAT}")
        number, name, state, node, wanted, status, started, limit, rest = cells
        comment, _, reason = rest.removesuffix("|").rpartition("|")
        count = re.search(r"accelerators=(\d+)", comment)
        yield Job(
            number=int(number),
            name=name,
            state=state,
            node=node or wanted or None,
            status=_status(status),
            started=seconds(started),
            limit=_minutes(limit),
            accelerators=int(count[1]) if count else 0,
            asked=comment.endswith(ASKED),
            reason=reason,
        )


def _status(text: str) -> int:
    code, _, number = text.partition(":")
    if number:  # CODE:SIGNAL, as other commands print it
        return int(code) << 8 | int(number)
    return int(code)


def _minutes(text: str) -> int | None:
    """The minutes of a time such as 2-01:30:00, 1:30:00 or 30:00."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, _ = (int(each or 0) for each in match.groups())
    return (days * 24 + hours) * 60 + minutes


def machines(text: str) -> Iterator[Machine]:
    """The nodes that `scontrol --oneliner --details show node` has printed."""
    for line in text.splitlines():
        # The reason is free text behind all that is read here; the first pair of a name counts.
        pairs = _pairs(line.partition(" Reason=")[0])
        if "NodeName" not in pairs:
            continue
        kinds: dict[str, int] = {}
        for kind, count in _GPU.findall(pairs.get("Gres", "")):
            kinds[kind] = kinds.get(kind, 0) + int(count)
        kind = max(kinds, key=lambda each: kinds[each], default="")
        used = _GPU.findall(pairs.get("GresUsed", ""))
        yield Machine(
            name=pairs["NodeName"],
            states=_states(pairs.get("State", "UNKNOWN")),
            partitions=frozenset(pairs.get("Partitions", "").split(",")),
            gpus=kinds.get(kind, 0),
            kind=kind,
            gpus_used=sum(int(count) for of, count in used if of == kind),
            cpus=int(pairs.get("CPUEfctv") or pairs.get("CPUTot", "1")),
            cpus_used=int(pairs.get("CPUAlloc", "0")),
            threads=int(pairs.get("ThreadsPerCore", "1")),
            memory=int(pairs.get("RealMemory", "1")) - int(pairs.get("MemSpecLimit", "0")),
            memory_used=int(pairs.get("AllocMem", "0")),
            since=_since(line),
        )


def _states(text: str) -> frozenset[str]:
    """The words of a state such as IDLE+DRAIN, or DOWN* for a node that does not answer."""
    found = {word.rstrip("*~#!%$@^-") for word in text.split("+")}
    return frozenset(found | ({"NOT_RESPONDING"} if "*" in text else set()))


def _since(line: str) -> float | None:
    told = re.search(r" Reason=.*\[\S+@(\S+?)\]", line)
    return seconds(told[1]) if told else None


def reservations(text: str) -> Iterator[Reservation]:
    """The reservations that `scontrol --oneliner show reservation` has printed."""
    for line in text.splitlines():
        pairs = _pairs(line)
        start, end = seconds(pairs.get("StartTime", "")), seconds(pairs.get("EndTime", ""))
        if "ReservationName" in pairs and start is not None and end is not None:
            yield Reservation(
                name=pairs["ReservationName"], start=start, end=end, nodes=pairs.get("Nodes", "")
            )


def default_partition(text: str) -> str | None:
    """The default among the partitions that `scontrol --oneliner show partition` has printed."""
    for line in text.splitlines():
        pairs = _pairs(line)
        if pairs.get("Default") == "YES":
            return pairs["PartitionName"]
    return None


def seconds(text: str) -> float | None:
    """A time of Slurm in seconds; None for `Unknown` and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _pairs(line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in _PAIR.findall(line):
        found.setdefault(name, value)
    return found
