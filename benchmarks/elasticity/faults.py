"""The faults of a run: what happens to which host, and when.

A list of faults is the same for all contenders. Times are seconds since the first step that all
hosts of the start have made together. Hosts are numbered; one that joins gets the lowest number
that is free.

- `kill`: SIGKILL of the worker. Its launcher stays, and may start it again.
- `lose`: SIGKILL of everything on the host, and its memory is gone.
- `leave`: the host's launcher gets SIGTERM, and all that is left is killed `NOTICE` seconds later.
- `join`: a host is started.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NUM_HOSTS = 3
"""Hosts at the start, and the most at any time."""
NOTICE = 4.0
"""Seconds from the notice of a leave to the end of the host."""
FIRST = 4.0
"""Seconds before the first fault."""
GAP = (17.0, 20.0)
"""Seconds between two faults: the least and the most. All contenders can restart in that time."""
KINDS = (("kill", "lose"), ("kill", "leave"))
"""Kinds of faults, turn by turn."""


class Fault(NamedTuple):
    """Something that happens to a host."""

    time: float
    what: str
    host: int


def _happen(hosts: set[int], time: float, what: str, host: int | None = None) -> Fault:
    """The next fault, and what it does to the hosts that are there."""
    if what == "join":
        host = min(set(range(NUM_HOSTS)) - hosts)
        hosts.add(host)
    assert host is not None
    if what in ("lose", "leave"):
        hosts.remove(host)
    return Fault(round(time, 2), what, host)


def schedule(
    seed: int,
    kinds: Iterable[str],
    gap: tuple[float, float] = GAP,
) -> list[Fault]:
    """Faults of these kinds in an order of the seed; a host joins after each one that goes."""
    dice = random.Random(seed)
    hosts, faults, now = set(range(NUM_HOSTS)), list[Fault](), FIRST
    order = list(kinds)
    dice.shuffle(order)
    for what in order:
        faults.append(_happen(hosts, now, what, dice.choice(sorted(hosts))))
        now += dice.uniform(*gap)
        if what != "kill":
            faults.append(_happen(hosts, now, "join"))
            now += dice.uniform(*gap)
    return faults


def spot(starts: Sequence[float], counts: Sequence[int], seconds: float, seed: int) -> list[Fault]:
    """Faults along a trace of capacity: hosts are lost without a notice, and join.

    Args:
        starts: When each count begins to hold, from 0.
        counts: Accelerators that a market had; the most become `NUM_HOSTS` hosts, none becomes 1.
        seconds: Seconds into which the trace is compressed.
        seed: Chooses the hosts that are lost.

    Raises:
        ValueError: The trace has another number of times than counts, or no time.
    """
    if len(starts) != len(counts) or len(starts) < 2:
        raise ValueError(f"a trace needs as many times ({len(starts)}) as counts ({len(counts)})")
    dice = random.Random(seed)
    hosts, faults = set(range(NUM_HOSTS)), list[Fault]()
    for start, count in zip(starts, counts, strict=True):
        now = seconds * start / starts[-1]
        wanted = min(NUM_HOSTS, max(1, round(NUM_HOSTS * count / max(counts))))
        while len(hosts) > wanted:
            faults.append(_happen(hosts, now, "lose", dice.choice(sorted(hosts))))
        while len(hosts) < wanted:
            faults.append(_happen(hosts, now, "join"))
    return faults
