"""Who holds up a job that makes no progress: from what its replicas have shown of themselves.

Each replica counts what it does: a step begins, it comes to the reduction, the reduction is over,
and so on. Somebody else looks at these counts now and then. While any of them moves, the job lives.
When none has moved for too long, the replicas that are behind the others are those that hold them
up; the ones that wait in the reduction are not.

A wrong alarm is worse than a late one, since it ends work that was under way. So what may take long
has a longer limit, or none, and time that nobody has seen pass, as while a machine was suspended,
does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

PATIENCE = 6.0
"""How much longer than in a step everything else may take: first steps, evaluation, saving."""
FIRST_STEPS = 3
"""Steps of a life that have the longer limit, too: something may be compiled in them."""
USUAL_STEPS = 20.0
"""How many usual steps a step may always take."""
LONGEST = 3.0
"""How many times as long as the longest pause of this life a pause may always be."""
MOST_SEEN = 5.0
"""Seconds that one look adds at most, however long ago the last one was."""


class Phase(IntEnum):
    """Where a replica is, in the order in which it comes by."""

    START = 0
    """It has not begun a step: models are built, data are prepared, state is restored."""
    BETWEEN = 1
    """Between two steps or two epochs: it keeps or saves its state, or evaluates."""
    STEP = 2
    """In a step, before its gradient is complete."""
    WAITING = 3
    """Its own part of the gradient is complete: it waits for the other replicas."""
    AFTER = 4
    """The reduction is over; the optimizer steps, and the rest of the loop body follows."""
    DONE = 5
    """The training is over; what the script does now may take as long as it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What one replica shows of itself."""

    rank: int
    """Which replica."""
    beats: int
    """What it has done so far, counted."""
    begun: int
    """Steps that it has begun in this life."""
    phase: Phase
    """Where it is."""
    alive: int = 0
    """Counted by a thread of its own once a second, whatever its main thread does."""
    evaluating: bool = False
    """Whether its model is not in training mode."""
    stopped: bool = False
    """Whether the system has stopped the process (SIGSTOP)."""
    debugged: bool = False
    """Whether somebody looks at it with a debugger."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it has come, comparable between replicas."""
        return self.begun, int(self.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What has been seen of the replicas so far, from the start of their life on."""

    counts: tuple[tuple[int, int, int], ...] = ()
    """Rank, beats and signs of life of each replica, when it was looked at last."""
    quiet: float = 0.0
    """Seconds since any of them did anything."""
    silent: tuple[tuple[int, float], ...] = ()
    """Rank of each replica, and seconds since it gave a sign of life."""
    longest: float = 0.0
    """The longest quiet time that came to an end by itself, in seconds, after the first steps."""
    watched: float = 0.0
    """Seconds since a first step began."""
    begun: int = 0
    """Steps that all of them have begun."""

    @property
    def usual_step(self) -> float:
        """Seconds of a step with all that is around it, on average."""
        # Not the quiet time that is under way, or a job that hangs would raise its own limit.
        return max(0.0, self.watched - self.quiet) / self.begun if self.begun else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A job that makes no progress."""

    quiet: float
    """Seconds for which nothing was done."""
    limit: float
    """Seconds that were allowed."""
    guilty: tuple[int, ...]
    """Ranks of those that hold the others up; empty if they are not among those looked at."""
    told_apart: bool
    """Whether the guilty ones differ from the others, or are just all there are."""


def look(before: Seen, signs: Sequence[Sign], elapsed: float) -> Seen:
    """Looks at the replicas once more.

    Args:
        before: What was seen until now.
        signs: What they show now: of all replicas that can be seen.
        elapsed: Seconds since the last look, by any clock. More than `MOST_SEEN` were not spent
            looking, so nobody knows what the replicas could have done in them.
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
    """Seconds for which these replicas may do nothing; infinite where that cannot be said.

    Args:
        seen: What was seen of them.
        signs: What they show now.
        timeout: The limit within a step, in seconds. It is raised where steps take long.
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
    """Says who holds up the job, if it is held up.

    Args:
        seen: What was seen of the replicas, this moment included.
        signs: What they show now.
        timeout: The limit within a step, in seconds.
        others_exist: Whether there are replicas that cannot be seen from here. If all that can be
            seen wait in the reduction, one of those is missing, and whoever sees it has as long
            again to deal with it.
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
    """Ranks of replicas that have given no sign of life, whatever they were doing."""
    return [rank for rank, silent in seen.silent if silent >= seconds]
