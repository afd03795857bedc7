"""Detection of the replica that blocks a job without progress.

Each replica counts its events: a step begins, it reaches the reduction, the reduction is complete,
and so on. A watchdog polls these counts. While any of them changes, the job makes progress. When
none has changed for too long, the replicas with the least progress are blocking the others; those
that wait in the reduction are not.

A false alarm is worse than a late one, since it kills running work. So phases that may take long
have a longer limit, or none, and time that the watchdog has not observed, as while a machine was
suspended, does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

PATIENCE = 6.0
"""Factor on the limit of a step for everything else: first steps, evaluation, saving."""
FIRST_STEPS = 3
"""First steps of a life, which also have the longer limit: they may compile something."""
USUAL_STEPS = 20.0
"""Number of typical step durations that a step may always take."""
LONGEST = 3.0
"""Factor on the longest pause of this life that a pause may always take."""
MOST_SEEN = 5.0
"""Largest number of seconds that one poll adds, however long ago the last one was."""


class Phase(IntEnum):
    """The phase of a replica, in the order of a step."""

    START = 0
    """No step has begun: models are built, data are prepared, state is restored."""
    BETWEEN = 1
    """Between two steps or two epochs: it copies or saves its state, or evaluates."""
    STEP = 2
    """In a step, before its gradient is complete."""
    WAITING = 3
    """Its own part of the gradient is complete: it waits for the other replicas."""
    AFTER = 4
    """The reduction is over; the optimizer steps, and the rest of the loop body follows."""
    DONE = 5
    """The training is over; the rest of the script may take any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The published state of one replica."""

    rank: int
    """Number of the replica's worker."""
    beats: int
    """Count of its events so far."""
    begun: int
    """Steps that it has begun in this life."""
    phase: Phase
    """Its phase."""
    alive: int = 0
    """Count that a separate thread increases once a second, whatever the main thread does."""
    evaluating: bool = False
    """Whether its model is not in training mode."""
    stopped: bool = False
    """Whether the system has stopped the process (SIGSTOP)."""
    debugged: bool = False
    """Whether a debugger is attached to it."""

    @property
    def position(self) -> tuple[int, int]:
        """Its position in the training, comparable between replicas."""
        return self.begun, int(self.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observations of the replicas since the start of their life."""

    counts: tuple[tuple[int, int, int], ...] = ()
    """Rank, beats and signs of life of each replica at the last poll."""
    quiet: float = 0.0
    """Seconds since the last event of any of them."""
    silent: tuple[tuple[int, float], ...] = ()
    """Rank of each replica, and seconds since its last sign of life."""
    longest: float = 0.0
    """Longest quiet time that ended without intervention, in seconds, after the first steps."""
    watched: float = 0.0
    """Seconds since a first step began."""
    begun: int = 0
    """Steps that all of them have begun."""

    @property
    def usual_step(self) -> float:
        """Mean seconds of a step, including everything between steps."""
        # Without the current quiet time, or a hung job would raise its own limit.
        return max(0.0, self.watched - self.quiet) / self.begun if self.begun else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A job that makes no progress."""

    quiet: float
    """Seconds without progress."""
    limit: float
    """Seconds that were allowed."""
    guilty: tuple[int, ...]
    """Ranks of the replicas that block the others; empty if they are not among those polled."""
    told_apart: bool
    """Whether the guilty replicas are at another point than the others; False if all are guilty."""


def look(before: Seen, signs: Sequence[Sign], elapsed: float) -> Seen:
    """Update the observations with one poll.

    Args:
        before: Observations so far.
        signs: Current states of all visible replicas.
        elapsed: Seconds since the last poll, by any clock. At most `MOST_SEEN` of them count: it is
            unknown whether the replicas could run in the rest.
    """
    elapsed = min(max(elapsed, 0.0), MOST_SEEN)
    counts = tuple((sign.rank, sign.beats, sign.alive) for sign in signs)
    known = {rank: (beats, alive) for rank, beats, alive in before.counts}
    waited = dict(before.silent)
    moved = len(known) != len(counts) or any(
        rank not in known or known[rank][0] != beats for rank, beats, _ in counts
    )
    silent = tuple(
        (rank, waited.get(rank, 0.0) + elapsed)
        if rank in known and known[rank][1] == alive
        else (rank, 0.0)
        for rank, _, alive in counts
    )
    begun = min((sign.begun for sign in signs), default=0)
    quiet = before.quiet + elapsed
    longest = before.longest
    if moved and before.begun > FIRST_STEPS:
        longest = max(longest, quiet)
    return Seen(
        counts=counts,
        quiet=0.0 if moved else quiet,
        silent=silent,
        longest=longest,
        watched=before.watched + elapsed if before.begun else 0.0,
        begun=begun,
    )


def limit(seen: Seen, signs: Sequence[Sign], timeout: float) -> float:
    """Seconds that these replicas may go without progress; infinite if there is no limit.

    Args:
        seen: Observations of them.
        signs: Their current states.
        timeout: The limit within a step, in seconds. It is raised if steps take long.
    """
    if not signs or any(sign.debugged for sign in signs):
        return math.inf
    if any(sign.stopped for sign in signs):
        return timeout
    if _frozen(seen, PATIENCE * timeout):
        return PATIENCE * timeout
    busy = [sign for sign in signs if sign.phase is not Phase.WAITING]
    if any(sign.phase in (Phase.START, Phase.DONE) for sign in busy):
        return math.inf
    base = max(timeout, USUAL_STEPS * seen.usual_step, LONGEST * seen.longest)
    in_step = seen.begun > FIRST_STEPS and all(
        sign.phase in (Phase.STEP, Phase.AFTER) and not sign.evaluating for sign in busy
    )
    return base if in_step else PATIENCE * base


def find(
    seen: Seen, signs: Sequence[Sign], timeout: float, *, others_exist: bool = False
) -> Hang | None:
    """Find the replicas that block the job, if it is blocked.

    Args:
        seen: Observations of the replicas, including this poll.
        signs: Their current states.
        timeout: The limit within a step, in seconds.
        others_exist: Whether there are replicas that are not visible here. If all visible ones wait
            in the reduction, one of the others is missing, and its watchdog gets as long again to
            handle it.
    """
    allowed = limit(seen, signs, timeout)
    if seen.quiet < allowed:
        return None
    frozen = [sign.rank for sign in signs if sign.stopped]
    frozen = frozen or _frozen(seen, PATIENCE * timeout)
    if frozen:
        guilty, told_apart = frozen, True
    else:
        last = min(sign.position for sign in signs)
        guilty = [sign.rank for sign in signs if sign.position == last]
        told_apart = len(guilty) < len(signs)
        waits = all(sign.phase is Phase.WAITING for sign in signs)
        if waits and others_exist and seen.quiet < 2 * allowed:
            guilty, told_apart = [], True
    return Hang(quiet=seen.quiet, limit=allowed, guilty=tuple(guilty), told_apart=told_apart)


def _frozen(seen: Seen, seconds: float) -> list[int]:
    """Ranks of replicas without a sign of life for this long, in any phase."""
    return [rank for rank, silent in seen.silent if silent >= seconds]
