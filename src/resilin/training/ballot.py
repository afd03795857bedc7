"""`Ballot`: what replicas tell each other in a step, as numbers that are summed with its gradient.

Whoever needs the others' word (stop now, save now, a larger batch) votes in each step, so that all
replicas decide the same thing behind the same step, and nothing has to be sent for it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol


class Voter(Protocol):
    """Who has something to say in the ballot of each step, and acts on what all have said."""

    def votes(self) -> tuple[float, ...]:
        """What this replica says: as many numbers as the other replicas do."""
        ...

    def counted(self, votes: tuple[float, ...]) -> None:
        """What all replicas together have said in the ballot of a step: the sums."""
        ...


class Ballot:
    """The ballot of one step after another.

    Args:
        voters: Who takes part, in the same order on all replicas; may change between steps.
    """

    def __init__(self, voters: Sequence[Voter]) -> None:
        self._voters = voters
        self._cast: list[tuple[Voter, int]] = []

    def cast(self) -> tuple[float, ...]:
        """What all voters of this replica say."""
        votes = [(voter, voter.votes()) for voter in self._voters]
        self._cast = [(voter, len(said)) for voter, said in votes]
        return tuple(itertools.chain.from_iterable(said for _, said in votes))

    def count(self, sums: Iterable[float]) -> None:
        """Tells those who voted, and are still there, what came of it."""
        rest = iter(sums)
        for voter, num in self._cast:
            said = tuple(itertools.islice(rest, num))
            if voter in self._voters:
                voter.counted(said)
        self._cast = []
