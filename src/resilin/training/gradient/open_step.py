"""The record of one step: each step has its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from resilin.engine.collectives import Wait, wait_for
from resilin.training.ballot import Ballot, Head
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.records import Part, Reduced, StepStart
from resilin.training.gradient.timing import SyncTimer

_IDLE = StepStart(measure=False, step_seconds=0.0, steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This replica's part of a reduction, once its gradient is computed."""

    divisor: float
    """Total weight that its gradient was divided by; the same on all replicas."""
    num_gradients: int = 0
    """Gradients that were measured separately; 0 if it has no samples."""
    seconds: float = 0.0
    """Time that measuring takes in the whole step."""


class OpenStep:
    """One step, from its first micro-batch until it is made, skipped or left."""

    __slots__ = (
        "_ballot",
        "_group",
        "_parameters",
        "_sync",
        "_wait",
        "backwards",
        "changes",
        "fresh",
        "part",
        "result",
        "samples",
        "skips",
        "start",
        "trained",
        "waited",
        "weight",
    )

    def __init__(
        self,
        parameters: Parameters,
        ballot: Ballot,
        group: dist.ProcessGroup | None,
        sync: SyncTimer,
        wait: Wait = wait_for,
    ) -> None:
        self._parameters = parameters
        self._ballot = ballot
        self._group = group
        self._sync = sync
        self._wait = wait
        self.start = _IDLE
        """Facts that were known when it began."""
        self.part: Part | None = None
        """The micro-batch at hand; None before the first one."""
        self.trained = False
        """Whether that had a backward pass, or is having it."""
        self.waited = False
        """Whether `optimizer.step()` has waited since that."""
        self.fresh = False
        """Whether a backward pass has ended and its micro-batch is not taken in yet."""
        self.backwards = 0
        """Backward passes so far."""
        self.weight = 0.0
        """Weight of the micro-batches that had one."""
        self.samples = 0
        """Samples in them."""
        self.skips = False
        """Whether this replica leaves the step without its last backward pass."""
        self.changes = False
        """Whether it has other trained parameters than in the step before."""
        self.result: Reduced | None = None
        """Outcome of its reduction, once its gradient is complete."""

    @property
    def untouched(self) -> bool:
        """Whether nothing of it has begun."""
        return self.part is None and self.result is None and self.start is _IDLE

    @property
    def pending(self) -> bool:
        """Whether `.grad` holds a part of the step, which was not made yet."""
        return self.backwards > 0 and (self.result is None or not self.result.skipped)

    @property
    def complete(self) -> bool:
        """Whether `.grad` is the mean over the global batch, and was not used yet."""
        return self.result is not None and not self.result.skipped

    @property
    def leaves_batch(self) -> bool:
        """Whether it needs the batch at hand no more: it is over, or another one follows."""
        if self.part is None or (self.result is not None and self.result.skipped):
            return True
        return self.trained and not self.part.last

    @property
    def lost(self) -> bool:
        """Whether a member was lost before its gradient was complete."""
        return self.result is not None and self.result.lost

    # For reducers --------------------------------------------------------------------------

    @property
    def measure(self) -> bool:
        """Whether the step is measured; the same on all replicas."""
        return self.start.measure

    @property
    def empty(self) -> bool:
        """Whether this replica takes part in the reduction without a gradient."""
        return self.skips or self.changes

    @property
    def reduces(self) -> bool:
        """Whether a reduction is due: the micro-batch under way is the last one."""
        return self.empty or (self.part is not None and self.part.last)

    @property
    def own_weight(self) -> float:
        """Weight of this replica's gradient in the reduction."""
        return 0.0 if self.empty else self.weight

    @property
    def total(self) -> float | None:
        """Weight of all micro-batches of all replicas; None if only a reduction can tell."""
        return None if self.part is None else self.part.total

    def computed(self) -> None:
        """Marks the moment at which this replica has computed all of its gradient."""
        self._sync.computed()

    def sum_of_weights(self) -> float:
        """Adds up the weights of all processes, and waits for it. Collective."""
        return self.add_up([self.own_weight])[0]

    def add_up(self, numbers: list[float]) -> list[float]:
        """Adds up numbers of the host over all processes, and waits for it. Collective."""
        if self._group is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        self._wait(dist.all_reduce(total, group=self._group, async_op=True))
        added: list[float] = total.tolist()
        return added

    def send(self, share: Share) -> None:
        """Sends the ballot of the step to all replicas, once.

        Args:
            share: This replica's part of the reduction.
        """
        start, empty = self.start, self.empty
        head = Head(
            weight=self.own_weight,
            samples=0.0 if empty else float(self.samples),
            gradients=float(share.num_gradients),
            seconds=share.seconds,
            step_seconds=start.step_seconds,
            steps=float(start.steps),
            divisor=0.0 if empty else share.divisor,
            skips=float(self.skips),
            changes=float(self.changes),
            signature=float(self._parameters.signature),
        )
        self._ballot.send(head, self._group)

    # For the step --------------------------------------------------------------------------

    def begin(self, part: Part) -> None:
        """Takes the next micro-batch."""
        self.part, self.trained, self.waited = part, False, False

    def reweigh(self, weight: float) -> None:
        """Corrects the weight of the micro-batch at hand, where each sample weighs 1."""
        assert self.part is not None
        self.part = replace(self.part, weight=weight, samples=round(weight))

    def count(self) -> None:
        """Counts the micro-batch at hand, whose backward pass has begun."""
        assert self.part is not None
        self.trained = True
        self.weight += self.part.weight
        self.samples += self.part.samples
