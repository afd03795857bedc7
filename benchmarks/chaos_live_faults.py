"""Faults of the workers of one launcher: see `chaos_live`."""

from __future__ import annotations

import random
import signal
import time

from chaos_live_jobs import HEARTBEAT, START, Fault, Job

KINDS = (
    "kill",
    "kill replica 0",
    "stop",
    "leave",
    "kill two",
    "kill at the end of an epoch",
    "kill in evaluation",
    "kill a replacement",
    "kill twice",
    "leave and kill",
    "stop and kill",
)
FIRST = "kill in the first step"
"""The job may start again then: nothing was completed that could be lost."""
NEEDED = {
    "leave": 3,
    "kill two": 3,
    "kill twice": 3,
    "stop and kill": 3,
    "leave and kill": 4,
}
"""Members that a fault needs, so that one survives it, and two a leave; else 2."""


class Faults:
    """Faults of one job."""

    def __init__(self, job: Job, dice: random.Random, num_workers: int) -> None:
        self.job, self.dice, self.num_workers = job, dice, num_workers
        self.num_left = 0
        """Workers that were asked to leave: they are not replaced."""
        self.spared = -1
        """A process that is not hit by kinds that may hit any; -1 for none."""

    def await_strength(self, kind: str) -> None:
        """Waits until enough replacements have come: one member at least has to survive."""
        needed = NEEDED.get(kind, 2)
        self.job.until(
            lambda: self.job.complete() and len(self.job.members()) >= needed,
            f"{needed} members before {kind!r}",
            START,
        )

    def possible(self) -> list[str]:
        most = self.num_workers - self.num_left
        return [kind for kind in KINDS if NEEDED.get(kind, 2) <= most]

    def _choose(self, num: int = 1) -> list[int]:
        return self.dice.sample(sorted(self.job.members().keys() - {self.spared}), num)

    def happen(self, kind: str) -> Fault:
        """Makes one happen, in steps or wherever it says."""
        self.job.read()
        before = set(self.job.members())
        generation = max(line["generation"] for line in self.job.members().values())
        number, notice = signal.SIGKILL, 0.0
        victims = self._choose()
        if kind in {"kill two", "leave and kill"}:
            victims = self._choose(2)
        elif kind == "kill replica 0":
            victims = [pid for pid, line in self.job.members().items() if not line["replica"]]
        elif kind in {"kill at the end of an epoch", "kill in evaluation"}:
            event = "epoch ends" if kind.endswith("epoch") else "evaluated"
            victims = [self._at(event)]
        elif kind == "kill a replacement":
            return self._kill_a_replacement()
        if kind in {"stop", "stop and kill"}:
            number, notice = signal.SIGSTOP, HEARTBEAT
        elif kind in {"leave", "leave and kill"}:
            number = signal.SIGTERM
            self.num_left += 1
        when = time.time()
        self.job.hit(victims[0], number)
        for pid in victims[1:]:
            self.job.hit(pid, signal.SIGKILL)
        if kind in {"kill twice", "stop and kill"}:
            time.sleep(self.dice.uniform(0.0, 0.15))
            other = self.dice.choice(sorted(before - set(victims)))
            when = time.time()
            self.job.hit(other, signal.SIGKILL)
        return Fault(kind, when, notice, sorted(before - self.job.gone), generation)

    def _at(self, event: str) -> int:
        """Waits until a member writes this, and returns it."""
        members = set(self.job.members())
        seen = len(self.job.lines)

        def found() -> int | None:
            new = self.job.lines[seen:]
            return next(
                (m["pid"] for m in new if m["event"] == event and m["pid"] in members), None
            )

        pid: int = self.job.until(found, f"{event!r} of a member", START)
        time.sleep(self.dice.choice([0.0, 0.0, 0.01, 0.03]))
        return pid

    def _kill_a_replacement(self) -> Fault:
        """Kills a member, and then what comes in its place while it builds, joins or is healed."""
        first, seen = self._choose()[0], len(self.job.lines)
        self.job.hit(first, signal.SIGKILL)
        wanted = self.dice.choice(["process", "built", "built"])

        def found() -> int | None:
            new = self.job.lines[seen:]
            return next((m["pid"] for m in new if m["event"] == wanted), None)

        second: int = self.job.until(found, "replacement", START)
        time.sleep(self.dice.uniform(0.0, 0.1))
        self.job.read()
        survivors = set(self.job.members()) - {second}
        when = time.time()
        self.job.hit(second, signal.SIGKILL)
        return Fault("kill a replacement", when, 0.0, sorted(survivors))
