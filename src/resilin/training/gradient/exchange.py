"""What a reducer knows of the step under way, and what it sends to the other replicas for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from resilin.core.step import Share, Step
from resilin.engine.collectives import Wait, wait_for
from resilin.training.ballot import Ballot
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.timing import SyncTimer


class Exchange:
    """The step, as `training.step` has it, and the way to the ballot.

    Args:
        ballot: What replicas agree on in a step.
        parameters: The parameters of the model.
        sync: Times the reduction.
        wait: Waits for a collective.
    """

    def __init__(
        self, ballot: Ballot, parameters: Parameters, sync: SyncTimer, wait: Wait = wait_for
    ) -> None:
        self.ballot = ballot
        self.group: dist.ProcessGroup | None = None
        """The replicas, for tensors on the host; None if there is only this one."""
        self.step = Step()
        """The step under way, or the one to come. `training.step` alone assigns it."""
        self.sync = sync
        self._parameters = parameters
        self._wait = wait

    def sum_of_weights(self) -> float:
        """Adds up the weights of all processes, and waits for it. Collective."""
        return self.add_up([self.step.own_weight])[0]

    def add_up(self, numbers: list[float]) -> list[float]:
        """Adds up numbers of the host over all processes, and waits for it. Collective."""
        if self.group is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        self._wait(dist.all_reduce(total, group=self.group, async_op=True))
        added: list[float] = total.tolist()
        return added

    def send(self, share: Share) -> None:
        """Sends the ballot of the step to all replicas, once."""
        self.ballot.send(self.step.head(share, self._parameters.signature), self.group)
