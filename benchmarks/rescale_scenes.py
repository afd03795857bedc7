"""The faults and changes that `rescale.py` measures, one after the other in one job."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chaos import Host
from rescale_figures import Change, first_after, steps
from rescale_runs import FIRST_FAULT, SETTLE, Job, signalled

AWAY = 2.0
"""Seconds for which an authority is away."""
WATCHED = 10.0
"""Seconds for which a job without its authority is watched, if it does not come back."""


@dataclass
class Found:
    """What one job has shown."""

    changes: dict[str, Change] = field(default_factory=dict)
    authority: dict[str, Any] = field(default_factory=dict)
    """What happened after the authority was killed."""


Told = Callable[[str, Change], None]


def one_machine(job: Job, turn: int, *, quick: bool, tell: Told) -> Found:
    """Workers of one launcher: SIGKILL, join, SIGSTOP, leave. A job that restarts has no joins."""
    found, num = Found(), job.num_workers
    job.start()
    members = job.running(num, FIRST_FAULT + turn, frozenset())
    victim = min(members, key=lambda pid: (members[pid]["rank"] - turn) % num)
    if not job.live:
        train, known = set(members), job.known()
        act = signalled(victim, signal.SIGKILL)
        found.changes["kill"] = job.restart(act, num, train)
        tell("kill", found.changes["kill"])
        if job.contender == "warm" and not quick:
            train = set(job.running(num, SETTLE, known))
            act = signalled(min(train), signal.SIGSTOP)
            found.changes["stop"] = job.restart(act, num, train)
            tell("stop", found.changes["stop"])
        return found
    stay = set(members)
    faults = [("kill", signal.SIGKILL)] if quick else _FAULTS
    for number, (name, sent) in enumerate(faults):
        victim = victim if number == 0 else min(stay)
        stay -= {victim}
        began = time.time()
        change = found.changes[name] = job.change(signalled(victim, sent), stay)
        tell(name, change)
        since = max(_over(job, pid, began) for pid in stay)
        joined = "join" if number == 0 else "join_again"
        change, new = job.join(since, stay)
        found.changes[joined] = change
        tell(joined, change)
        stay |= {new}
    leaver = min(stay)
    stay -= {leaver}
    found.changes["leave"] = job.change(signalled(leaver, signal.SIGTERM), stay)
    tell("leave", found.changes["leave"])
    return found


_FAULTS = [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)]


def _over(job: Job, pid: int, began: float) -> float:
    """When a process has begun its first step after a fault; a joiner may have come since."""
    over = first_after(job.lines(), pid, "wrapped", began)
    assert over is not None
    return over


def several(job: Job, turn: int, *, quick: bool, tell: Told) -> Found:
    """One worker per launcher: one leaves, one joins, one is lost, and the authority is killed."""
    found, num = Found(), job.num_agents
    job.start()
    train = set(job.running(num, FIRST_FAULT + turn, frozenset()))

    def place(index: int) -> tuple[Host, int]:
        """A launcher, and the process of its worker."""
        host = job.hosts[index]
        own = {line["pid"] for line in job.lines() if line["host"] == host.number}
        return host, max(own & train)

    def measure(name: str, act: Callable[[], float], gone: set[int], replicas: int) -> None:
        nonlocal train
        if not job.live:
            known = job.known()
            found.changes[name] = job.restart(act, replicas, train)
            train = set(job.running(replicas, SETTLE, known))
        elif gone:
            train -= gone
            found.changes[name] = job.change(act, train)
        else:
            found.changes[name], new = job.join(act(), train)
            train |= {new}
        tell(name, found.changes[name])

    # A bare script restarts in the same way, whoever comes or goes.
    if not quick and job.contender != "bare":
        host, pid = place(turn % num)
        measure("leave", partial(job.dismiss, host), {pid}, num - 1)
        host.end(memory=True)
        measure("join", partial(_start, job, num), set(), num)
    if job.live and not quick:
        found.authority = _outage(job, train)
    host, pid = place((turn + 1) % num)
    measure("host", partial(job.lose, host, pid), {pid}, num - 1)
    if not job.live and not quick:
        found.authority = _end_of_store(job)
    return found


def _start(job: Job, number: int) -> float:
    when = time.time()
    job.start_host(number)
    return when


def _outage(job: Job, train: set[int]) -> dict[str, Any]:
    """Kill etcd, start it again, and say what the members did meanwhile."""
    when = time.time()
    job.kill_authority()
    time.sleep(AWAY)
    job.start_authority()
    back = time.time()
    job.wait_for(
        lambda lines: all(first_after(lines, pid, "step", back + AWAY) for pid in train),
        "steps after the authority has come back",
    )
    gaps, made, usual = [], [], []
    for pid in train:
        times = [line["time"] for line in steps(job.lines(), pid=pid)]
        first = max(i for i, time_ in enumerate(times) if time_ <= when)
        pairs = list(itertools.pairwise(times))
        gaps.append(max(b - a for a, b in pairs[first:]))
        usual += [b - a for a, b in pairs[:first]]
        made.append(sum(when < time_ < back for time_ in times))
    usual.sort()
    return {
        "away": round(back - when, 2),
        "steps_meanwhile": min(made),
        "stall": round(max(gaps) - usual[len(usual) // 2], 3),
    }


def _end_of_store(job: Job) -> dict[str, Any]:
    """Kill the store of the rendezvous, and say whether the job continues."""
    when = time.time()
    job.kill_authority()
    while time.time() < when + WATCHED:
        if any(host.process.poll() is not None for host in job.hosts):
            break
        time.sleep(0.05)
    ended = [host.number for host in job.hosts if host.process.poll() is not None]
    last = max(line["time"] for line in steps(job.lines()))
    continues = not ended and last > time.time() - 3
    return {"continues": continues, "ended_after": round(time.time() - when, 2) if ended else None}
