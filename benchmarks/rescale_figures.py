"""What the diaries of `rescale_jobs.py` say about a change: how long it took, and its parts.

All parts are by the slowest process: a part ends when the last process has come that far.

- A restart (`restarted`): `launch` (to the first line of the new script: detection, rendezvous,
  process start), `import`, `group`, `build` (model and DDP), `restore`, `step`.
- A live change (`continued`), among those that stay: `noticed` (with the rest of the step that is
  lost, or of the last one before a planned change), `formed` (the members have come together),
  `healed` (all have the newest state, and the authority knows), `wrapped` (the next step begins),
  `step` (it is completed).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("launch", "import", "group", "build", "restore", "step")
LIVE_PHASES = ("noticed", "formed", "healed", "wrapped", "step")
AROUND = 3
"""Steps after a change that belong to it: the longest time between two of them is its gap."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One change of members, or a fault and its recovery."""

    seconds: float
    """From the fault, or from the request, until all replicas have completed a step."""
    phases: dict[str, float]
    """The same, in parts."""
    stall: float
    """The time between two steps in which it happened, less a usual step."""
    redone: int
    """Steps that all replicas had completed before the fault, and that were made again."""
    step_seconds: float
    """Median time between two steps before it."""

    @property
    def wrapped(self) -> float:
        """Seconds from noticed to wrapped, in a live job."""
        return sum(self.phases[phase] for phase in ("formed", "healed", "wrapped"))


def steps(lines: Sequence[Line], *, pid: int | None = None) -> list[Line]:
    return [line for line in lines if line["event"] == "step" and pid in (None, line["pid"])]


def usual(lines: Sequence[Line], before: float) -> float:
    """Median time between two steps of a process before a moment."""
    gaps = []
    for pid in {line["pid"] for line in steps(lines)}:
        times = [line["time"] for line in steps(lines, pid=pid) if line["time"] <= before]
        gaps += [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(gaps)


def _parts(when: float, marks: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    pairs = itertools.pairwise([when, *marks])
    return {name: b - a for name, (a, b) in zip(names, pairs, strict=True)}


def restarted(
    lines: Sequence[Line], when: float, known: Collection[int], before: Collection[int]
) -> Change:
    """A change after which all processes are new ones.

    Args:
        lines: The diaries.
        when: When it began.
        known: All processes until then.
        before: Those of them that trained.
    """
    # Without those of a generation that failed before its first step.
    new = {line["pid"] for line in steps(lines)} - set(known)
    marks = []
    for phase in PHASES:
        # The first line of each process: of its steps, the first one.
        first: dict[int, float] = {}
        for line in lines:
            if line["event"] == phase and line["pid"] in new:
                first.setdefault(line["pid"], line["time"])
        marks.append(max(first.values()))
    last = [steps(lines, pid=pid)[-1] for pid in before]
    resumed = min(steps(lines, pid=pid)[0]["step"] for pid in new)
    step = usual(lines, when)
    return Change(
        seconds=marks[-1] - when,
        phases=_parts(when, marks, PHASES),
        stall=marks[-1] - max(line["time"] for line in last) - step,
        redone=max(0, min(line["step"] for line in last) + 1 - resumed),
        step_seconds=step,
    )


def first_after(lines: Sequence[Line], pid: int, event: str, when: float) -> float | None:
    times = [x["time"] for x in lines if (x["pid"], x["event"]) == (pid, event)]
    return next((time for time in times if time > when), None)


def has_continued(lines: Sequence[Line], when: float, stay: Collection[int]) -> bool:
    """Whether all of these have gone through a change, and made some steps since."""
    for pid in stay:
        noticed = first_after(lines, pid, "noticed", when)
        wrapped = None if noticed is None else first_after(lines, pid, "wrapped", noticed)
        if wrapped is None:
            return False
        if sum(line["time"] > wrapped for line in steps(lines, pid=pid)) < AROUND:
            return False
    return True


def continued(
    lines: Sequence[Line], when: float, stay: Collection[int], since: float | None = None
) -> Change:
    """A change through which these processes live.

    Args:
        lines: The diaries.
        when: When it began.
        stay: The processes.
        since: When the fault before it was over, if nobody knows when this change began.
    """
    began = when if since is None else since
    marks: dict[str, list[float]] = {phase: [] for phase in LIVE_PHASES}
    gaps = []
    for pid in stay:
        noticed = first_after(lines, pid, "noticed", began)
        assert noticed is not None
        wrapped = first_after(lines, pid, "wrapped", noticed)
        assert wrapped is not None
        marks["noticed"].append(noticed)
        marks["wrapped"].append(wrapped)
        for phase in ("formed", "healed"):
            # The last time, if it was tried again.
            times = [x["time"] for x in lines if (x["pid"], x["event"]) == (pid, phase)]
            marks[phase].append(max(time for time in times if noticed < time < wrapped))
        times = [line["time"] for line in steps(lines, pid=pid)]
        marks["step"].append(next(time for time in times if time > wrapped))
        first = max(i for i, time in enumerate(times) if time < wrapped)
        gaps.append(max(b - a for a, b in itertools.pairwise(times[first : first + AROUND + 1])))
    slowest = [max(marks[phase]) for phase in LIVE_PHASES]
    step = usual(lines, began)
    begins = slowest[0] if since is not None else when
    return Change(
        seconds=slowest[-1] - begins,
        phases=_parts(begins, slowest, LIVE_PHASES),
        stall=max(gaps) - step,
        redone=0,
        step_seconds=step,
    )


def summary(changes: Sequence[Change]) -> dict[str, Any]:
    """Medians and ranges of changes of one kind."""

    def of(value: Callable[[Change], float]) -> list[float]:
        found = [value(change) for change in changes]
        return [round(x, 3) for x in (statistics.median(found), min(found), max(found))]

    seconds, stall = of(lambda change: change.seconds), of(lambda change: change.stall)
    return {
        "seconds": seconds[0],
        "seconds_range": seconds[1:],
        "stall": stall[0],
        "stall_range": stall[1:],
        "phases": {
            phase: round(statistics.median(c.phases[phase] for c in changes), 3)
            for phase in changes[0].phases
        },
        "redone_steps": max(change.redone for change in changes),
        "step_seconds": of(lambda change: change.step_seconds)[0],
    }
