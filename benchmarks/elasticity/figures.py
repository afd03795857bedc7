"""What the ledgers of a run say: samples, steps, pauses and goodput. Pure.

A line of a ledger is a dict: `begin` lines have the samples that a worker had in a step, `done`
lines say that it has completed the step. `life` names the group of workers that made it together.
"""

from __future__ import annotations

import difflib
import io
import itertools
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]
USUAL = 0.4
"""Seconds that a step takes at most when nothing is wrong: one host alone needs 0.3 s."""


class Step(NamedTuple):
    """One completed step of the run that counts."""

    time: float
    """When its first worker had completed it."""
    replicas: int
    parts: list[Line]
    """What each worker had in it."""


def lineage(lines: Iterable[Line]) -> dict[int, Step]:
    """The steps that count: of each number those of the group that made it last.

    A worker that is killed between its step and its line has a `begin` line only. Its samples are
    in the step if another worker of its group has completed it.
    """
    begun: dict[tuple[str, int], dict[int, Line]] = defaultdict(dict)
    done: dict[int, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "begin":
            begun[line["life"], line["step"]][line["pid"]] = line
        elif line["event"] == "done":
            done[line["step"]].append(line)
    steps = {}
    for number in sorted(done):
        life = done[number][-1]["life"]
        parts = list(begun[life, number].values())
        when = min(line["time"] for line in done[number] if line["life"] == life)
        steps[number] = Step(when, parts[0]["replicas"], parts)
    return steps


def samples(steps: Mapping[int, Step], num_samples: int, epochs: int) -> tuple[int, int]:
    """Samples that are repeated and that are missing, each counted in its epoch."""
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for step in steps.values():
        for part in step.parts:
            used.setdefault(part["epoch"], Counter()).update(part["samples"])
    repeated = sum(sum(count.values()) - len(count) for count in used.values())
    # What is trained after the last epoch is beyond the task.
    repeated += sum(len(count) for epoch, count in used.items() if epoch >= epochs)
    missing = sum(num_samples - len(used[epoch]) for epoch in range(epochs))
    return repeated, missing


def redone(lines: Iterable[Line]) -> int:
    """Steps that all workers of a group had completed, and that were made again."""
    groups: dict[tuple[str, int], set[int]] = defaultdict(set)
    sizes: dict[tuple[str, int], int] = {}
    for line in lines:
        if line["event"] == "process":
            continue
        key = line["life"], line["step"]
        if line["event"] == "done":
            groups[key].add(line["pid"])
        else:
            sizes[key] = line["replicas"]
    complete = Counter(
        step for (life, step), pids in groups.items() if len(pids) >= sizes[life, step]
    )
    return sum(complete.values()) - len(complete)


def first_full(lines: Iterable[Line], num_hosts: int) -> float | None:
    """When all hosts had completed one step together; None before that."""
    hosts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "done":
            together = hosts[line["life"], line["step"]]
            together.add(line["host"])
            if len(together) == num_hosts:
                return float(line["time"])
    return None


def progress(lines: Iterable[Line]) -> list[tuple[float, int]]:
    """When the job came further than ever, and to which step."""
    found: list[tuple[float, int]] = []
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "done" and (not found or line["step"] > found[-1][1]):
            found.append((line["time"], line["step"]))
    return found


def waits(lines: Iterable[Line], faults: Sequence[float], end: float) -> list[float]:
    """Seconds to the next step, for each fault.

    This is the longest time between two new steps, among those in which this fault lies or that
    begin before the next one: a restart for a host that joins begins later than the fault. What
    begins within `USUAL` seconds before the next fault is that fault's. A step that was completed
    before and is made again is not new.

    Args:
        lines: Those of the ledgers.
        faults: When they happened, in order.
        end: When the run was over; the last wait of a job that stands still ends there.
    """
    times = [when for when, _ in progress(lines)]
    if not times or end > times[-1]:
        times.append(end)
    gaps = list(itertools.pairwise(times))
    found = []
    for number, fault in enumerate(faults):
        until = faults[number + 1] if number + 1 < len(faults) else times[-1]
        own = [b - a for a, b in gaps if b > fault and (a <= fault or a < until - USUAL)]
        if own:
            found.append(max(own))
    return found


def useful(steps: Mapping[int, Step], since: float) -> int:
    """Distinct samples of each epoch that were trained after some time."""
    found = {
        (part["epoch"], sample)
        for step in steps.values()
        if step.time > since
        for part in step.parts
        for sample in part["samples"]
    }
    return len(found)


def lines_changed(plain: str, other: str) -> int:
    """Lines of code that a script has and the plain one has not."""
    a, b = _code(plain), _code(other)
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return len(b) - sum(block.size for block in blocks)


def _code(text: str) -> list[str]:
    """Lines of a script without comments, the first docstring and empty lines."""
    skipped: set[int] = set()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token in tokens:
        first = token.type == tokenize.STRING and token.start[1] == 0
        if first or (token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()):
            skipped.update(range(token.start[0], token.end[0] + 1))
    found = enumerate(text.splitlines(), 1)
    return [line for number, line in found if line.strip() and number not in skipped]


def middle(values: Iterable[float | None]) -> list[float] | None:
    """Median, least and most of those that are known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return [float(f"{v:.4g}") for v in (statistics.median(known), min(known), max(known))]
