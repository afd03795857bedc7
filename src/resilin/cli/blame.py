"""The cause of a restart: the worker that failed first, on whichever machine it ran.

When a worker is gone, gloo fails in every worker that was connected to it. Those failures follow
from the first one, and are not reported. An agent whose workers only lost a connection reads the
cause from the store of the rendezvous, where the agent of the first worker writes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import DistError

from resilin.cli.faults import count, ending
from resilin.core.text import clean
from resilin.engine.stop import RESTART

WAIT = 1.0
"""Longest time that an agent waits for the cause, in seconds: an agent checks its workers ten times
a second, and a machine that is gone writes nothing."""
_INTERVAL = 0.05
_LONGEST = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker that has failed."""

    rank: int
    """Its number among all workers of the job."""
    pid: int
    """Its process id."""
    code: int
    """Its exit code; -N if signal N killed it."""
    error: str = ""
    """The error that it wrote; empty if it wrote none."""
    follows: bool = False
    """Whether it failed because its connection to another worker broke."""

    @property
    def asked(self) -> bool:
        """Whether it asked for a restart, which is no fault."""
        return self.code == RESTART

    def told(self, where: str = "", lifetime: float | None = None) -> str:
        """The end of the worker in words, with its error.

        Args:
            where: Name of its machine, for a reader on another one.
            lifetime: Seconds that it ran for.
        """
        on = f" on {where}" if where else ""
        after = "" if lifetime is None else f" after {lifetime:.1f} s"
        # The error of a worker that a signal killed is not the reason of its end.
        error = f": {self.error}" if self.error and self.code > 0 else ""
        return f"worker {self.rank}{on} {ending(self.pid, self.code)}{after}{error}"


def causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures that do not follow from another one; all of them if each seems to."""
    first = [each for each in failures if not each.follows]
    return first or list(failures)


def lines(failures: Sequence[Failure], lifetime: float, most: int) -> list[str]:
    """One line for each way in which workers failed, at most `most`.

    Args:
        failures: The causes, first one first.
        lifetime: Seconds that the workers ran for.
        most: Largest number of lines.
    """
    alike: dict[tuple[int, str], list[Failure]] = {}
    for each in failures:
        if not each.asked:
            alike.setdefault((each.code, each.error), []).append(each)
    found = []
    for first, *others in alike.values():
        ranks = ", ".join(str(each.rank) for each in others[:most])
        ranks += ", ..." if len(others) > most else ""
        same = f" (and {count(len(others), 'more worker')} in the same way: {ranks})"
        found.append(first.told(lifetime=lifetime) + same * bool(others))
    more = len(found) - most
    return found[:most] + [f"and {more} more"] * (more > 0)


class KeyStore(Protocol):
    """The methods that are used of the store of a rendezvous."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys were written."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value, and wait for it if it was not written."""
        ...


class Causes:
    """Causes that the agents of a generation tell each other.

    A store that does not answer tells nothing: its machine may be the one that is gone.

    Args:
        store: The store of the rendezvous; None without one.
        rank: Number of this agent.
        num_agents: Number of agents.
        clock: Source of time, in seconds.
    """

    def __init__(
        self,
        store: KeyStore | None = None,
        rank: int = 0,
        num_agents: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [each for each in range(num_agents) if each != rank]
        self._clock = clock

    def publish(self, text: str) -> None:
        """Tell the other agents why the workers of this one have failed."""
        if self._store is not None and self._others:
            try:
                self._store.set(_key(self._rank), text)
            except DistError:
                self._store = None

    def of_others(self, seconds: float = WAIT) -> str | None:
        """What another agent has published.

        Args:
            seconds: Longest time to wait for it.

        Returns:
            The cause; None if no agent has published one.
        """
        deadline = self._clock() + seconds
        while self._store is not None and self._others:
            try:
                for each in self._others:
                    if self._store.check([_key(each)]):
                        # Written by another machine: it may be anything.
                        return clean(self._store.get(_key(each)).decode(errors="replace"), _LONGEST)
            except DistError:
                self._store = None
            if self._clock() >= deadline:
                return None
            time.sleep(_INTERVAL)
        return None


def _key(agent: int) -> str:
    return f"resilin/cause/{agent}"
