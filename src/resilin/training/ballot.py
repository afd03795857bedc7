"""`Ballot`: numbers that replicas sum in each step, together with its gradient.

Every part that needs an agreement (stop now, save now, a larger batch) votes in each step, so that
all replicas make the same decision after the same step, without a separate message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol


class Voter(Protocol):
    """A part that votes in the ballot of each step, and acts on the sums."""

    def votes(self) -> tuple[float, ...]:
        """Votes of this replica: as many numbers as on the other replicas."""
        ...

    def counted(self, votes: tuple[float, ...]) -> None:
        """Receive the sums of the votes of all replicas in a step."""
        ...


class Ballot:
    """The ballot of one step after another.

    Args:
        voters: The voters, in the same order on all replicas; may change between steps.
    """

    def __init__(self, voters: Sequence[Voter]) -> None:
        self._voters = voters
        self._cast: list[tuple[Voter, int]] = []

    def cast(self) -> tuple[float, ...]:
        """Votes of all voters of this replica."""
        votes = [(voter, voter.votes()) for voter in self._voters]
        self._cast = [(voter, len(said)) for voter, said in votes]
        return tuple(itertools.chain.from_iterable(said for _, said in votes))

    def count(self, sums: Iterable[float]) -> None:
        """Pass the sums to the voters of this ballot that are still present."""
        rest = iter(sums)
        for voter, num in self._cast:
            said = tuple(itertools.islice(rest, num))
            if voter in self._voters:
                voter.counted(said)
        self._cast = []
