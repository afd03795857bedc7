"""`Batches`: a sample stream cut into batches, and the reference run over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from resilin.core.clock import Reference
from resilin.core.stream import SampleStream, Tail

_ROUNDING = 1e-6
"""Progress, in reference steps, by which sums of gains may miss a whole epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The data of one loader, by positions in its stream."""

    stream: SampleStream
    """The order of the samples."""
    tail: Tail
    """Treatment of the remainder of an epoch."""
    batch_size: int
    """The reference batch."""

    # Asked for several times in each step.
    steps_per_epoch: float = field(init=False, repr=False, compare=False)
    """Reference steps in one epoch of the data."""
    reference: Reference = field(init=False, repr=False, compare=False)
    """The run that the learning rate was tuned for."""

    def __post_init__(self) -> None:
        steps = self.stream.steps_per_epoch(self.batch_size, tail=self.tail)
        object.__setattr__(self, "steps_per_epoch", steps)
        reference = Reference(self.batch_size, steps_per_epoch=steps or None)
        object.__setattr__(self, "reference", reference)

    def span(self, position: int, batch_size: int) -> range:
        """The positions of a step that begins here; later where a tail is dropped."""
        return self.stream.batch(position, batch_size, tail=self.tail)

    # The reference run ---------------------------------------------------------------------

    def reference_steps(self, start: int, stop: int) -> float:
        """Reference steps that the reference run made with the samples between two positions."""
        size, tail = self.batch_size, self.tail
        until = self.stream.reference_steps(stop, size, tail=tail)
        return until - self.stream.reference_steps(start, size, tail=tail)

    # Epochs --------------------------------------------------------------------------------

    def epoch(self, position: int, batch_size: int) -> int:
        """The epoch of the data, from 0, that the next step from this position belongs to."""
        return self.span(position, batch_size).start // self.stream.num_samples

    def epoch_end(self, position: int, batch_size: int) -> int:
        """The end of the data of that epoch."""
        return (self.epoch(position, batch_size) + 1) * self.stream.num_samples

    def are_over(self, position: int, end: int, batch_size: int) -> bool:
        """Whether no step of an epoch that ends at `end` begins at this position or later.

        A tail that is to be dropped belongs to no batch.
        """
        return position >= end or self.span(position, batch_size).start >= end

    def epochs_of_progress(self, progress: float) -> int:
        """Whole epochs of the reference run in this progress."""
        return whole_epochs(progress, self.steps_per_epoch)

    def reaches(self, progress: float, epochs: int) -> bool:
        """Whether this progress completes so many epochs of the reference run."""
        return progress >= epochs * self.steps_per_epoch - _ROUNDING


def whole_epochs(progress: float, steps_per_epoch: float) -> int:
    """Whole epochs of so many reference steps in this progress."""
    return math.floor((progress + _ROUNDING) / steps_per_epoch)
