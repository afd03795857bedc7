"""`Ballot`: what replicas agree on in a step, as numbers that are summed with its gradient.

One small reduction per step carries it all: the weights of the gradient (`Head`), and what voters
have to say (stop now, save now, a larger batch). So all replicas decide the same thing after the
same step, and nothing has to be sent for it alone. All of these are numbers of the host, and go
through a group for tensors on the host: no device has to come this far before they are read.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.core.step import Head, check
from resilin.engine.collectives import Wait, wait_for


class Voter(Protocol):
    """Takes part in the ballot of each step, and acts on its outcome."""

    def votes(self) -> tuple[float, ...]:
        """Numbers of this replica: as many as the other replicas have."""
        ...

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes the sums of these numbers over all replicas."""
        ...


_LENGTH = len(Head._fields)
_ROOM = 64
"""Ballots are filled up to a multiple of it: unequal ones still arrive, and are told apart."""


class Ballot:
    """The ballot of one step after another.

    Args:
        voters: Who takes part, in the same order on all replicas; may change between steps.
        wait: Waits for the reduction.
        processes_per_replica: Processes that send the same numbers, those of one replica: sums are
            divided by it, so that each replica counts once.
    """

    def __init__(
        self,
        voters: Sequence[Voter],
        wait: Wait = wait_for,
        *,
        processes_per_replica: int = 1,
    ) -> None:
        self._voters = voters
        self._wait = wait
        self._per_replica = processes_per_replica
        self.forget()

    def forget(self) -> None:
        """Forgets the ballot of a step that is over."""
        self._cast: list[tuple[Voter, int]] = []
        self._head: Head | None = None
        self._group: dist.ProcessGroup | None = None
        self._work: dist.Work | None = None
        self._sums: Head | None = None
        self._votes: Sequence[float] = ()
        self.sent: Tensor | None = None
        """Numbers that were sent to other replicas in this step, if any were."""

    def send(self, head: Head, group: dist.ProcessGroup | None) -> None:
        """Sends the ballot of this replica. It does not wait for the others.

        Args:
            head: This replica's part of the step.
            group: The replicas, for tensors on the host; None if there is only this one.
        """
        numbers: list[float] = []
        for voter in self._voters:
            said = voter.votes()
            self._cast.append((voter, len(said)))
            numbers.extend(said)
        voters = zlib.crc32(self._voted().encode()) & 0xFFFFF
        self._head, self._group = head._replace(voters=float(voters)), group
        if group is None:
            self._sums, self._votes = self._head, numbers
            return
        filled = -(_LENGTH + len(numbers)) % _ROOM
        self.sent = torch.tensor([*self._head, *numbers, *[0.0] * filled], dtype=torch.float64)
        self._work = dist.all_reduce(self.sent, group=group, async_op=True)

    def sums(self) -> Head:
        """Waits for the ballots of all replicas, and returns the sums of their heads.

        Raises:
            PeerLost: One of them is gone.
            RuntimeError: Replicas do not make the same step.
        """
        if self._sums is None:
            assert self._work is not None
            assert self._head is not None
            assert self.sent is not None
            self._wait(self._work)
            numbers: list[float] = self.sent.tolist()
            head, replicas = Head(*numbers[:_LENGTH]), dist.get_world_size(self._group)
            check(self._head, head, replicas)
            if head.voters != replicas * self._head.voters:
                raise RuntimeError(
                    f"replicas vote on different things: this one has {self._voted()}, and not all "
                    f"of the {replicas} have the same; settings of the job, such as cross_check, "
                    "autoscaling, and variables RESILIN_..., must be the same on all hosts"
                )
            if self._per_replica > 1:
                numbers = [number / self._per_replica for number in numbers]
            self._sums, self._votes = Head(*numbers[:_LENGTH]), numbers[_LENGTH:]
        return self._sums

    def _voted(self) -> str:
        """Who has voted, and with how many numbers."""
        cast = [f"{type(voter).__name__} ({num})" for voter, num in self._cast if num]
        return ", ".join(cast) or "none"

    def said_to(self, voter: Voter) -> tuple[float, ...]:
        """The sums that a voter is told when they are counted."""
        return next((said for each, said in self._told() if each is voter), ())

    def _told(self) -> list[tuple[Voter, tuple[float, ...]]]:
        rest = iter(self._votes)
        return [(voter, tuple(itertools.islice(rest, num))) for voter, num in self._cast]

    def count(self) -> None:
        """Tells those who voted, and are still there, the sums; once per ballot."""
        told, self._cast = self._told(), []
        if self._sums is None:
            return
        for voter, said in told:
            if voter in self._voters:
                voter.counted(said)
