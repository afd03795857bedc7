"""Actors of a live job on Ray: requested, watched, and killed.

There are always as many requests as the job may have workers. Those for which the cluster has no
place wait in Ray, whose autoscaler sees them, and start when there is a node for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from resilin.integrations.ray_worker import LiveWorker, Place
from resilin.telemetry.extras import load

TICK = 0.1
"""Seconds between two looks at signs of life."""
MOST_SEEN = 4 * TICK
"""Longest silence that one look adds, in seconds: the authority itself may have been stopped."""


@dataclass(eq=False)
class Hand:
    """One worker, from its request on."""

    number: int
    """Its number, which no other one ever has."""
    name: str
    """Its name as a member."""
    actor: Any
    """Its actor."""
    placed: Any
    """The answer that it runs."""
    place: Place | None = None
    """Process and node; None before it runs."""
    result: Any = None
    """The answer of its function; None before that was called."""
    finished: bool = False
    """Whether its function has returned."""
    value: Any = None
    """Return value of that."""
    beats: int = 0
    """Signs of life, when they were last looked at."""
    silent: float = 0.0
    """Seconds since the last of them; 0 before the first."""

    @property
    def awaited(self) -> Any:
        """The answer that comes next; None if none does."""
        if self.finished or (self.place is not None and self.result is None):
            return None
        return self.placed if self.place is None else self.result

    def __str__(self) -> str:
        """The worker, for a line of the log."""
        where = "" if self.place is None else f" (process {self.place.pid})"
        return f"worker {self.number}{where}"


@dataclass
class Crew:
    """All workers of one life of a job that are requested or run.

    Args:
        prefix: Beginning of their names.
        options: Options of their actors: the resources of each, and where it is placed.
    """

    prefix: str
    options: Mapping[str, Any]
    hands: list[Hand] = field(default_factory=list)
    """Those that are requested or run."""
    _next: int = 0
    _looked: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> list[Hand]:
        """Those whose function was called and has not ended."""
        return [each for each in self.hands if each.result is not None and not each.finished]

    def request(self, total: int) -> None:
        """Request workers until there are this many."""
        ray: Any = load("ray", "ray", "run_live")
        while len(self.hands) < total:
            number, self._next = self._next, self._next + 1
            actor = ray.remote(LiveWorker).options(**self.options).remote()
            self.hands.append(Hand(number, f"{self.prefix}-{number}", actor, actor.place.remote()))

    def answered(self) -> list[Hand]:
        """The workers whose next answer is there; waits for one, at most `TICK` seconds."""
        ray: Any = load("ray", "ray", "run_live")
        awaited = {each.awaited: each for each in self.hands if each.awaited is not None}
        if not awaited:
            time.sleep(TICK)
            return []
        done, _ = ray.wait(list(awaited), num_returns=1, timeout=TICK)
        if done:
            done, _ = ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        return [awaited[each] for each in done]

    def frozen(self, limit: float, beats: Mapping[str, int]) -> Iterator[Hand]:
        """The workers that have given no sign of life for longer than the limit.

        Args:
            limit: Seconds of silence, from the first sign of life on.
            beats: Signs of life so far, by name.
        """
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, MOST_SEEN), now
        for each in self.running:
            heard = beats.get(each.name, 0)
            if heard == each.beats:
                each.silent += elapsed if heard else 0.0
            else:
                each.beats, each.silent = heard, 0.0
            if each.silent >= limit:
                yield each

    def release(self, hand: Hand) -> None:
        """Kill a worker: no process serves two members."""
        ray: Any = load("ray", "ray", "run_live")
        if hand in self.hands:
            self.hands.remove(hand)
        ray.kill(hand.actor)

    def close(self) -> None:
        """Kill all of them."""
        for each in list(self.hands):
            self.release(each)
