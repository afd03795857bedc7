"""Records that rooms of training share: a micro-batch, and the sizes of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Number = float | Tensor
"""A number that a user records, or a tensor with one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Description of one micro-batch, made by the loader."""

    number: int
    """Identifies it: no other micro-batch of the job has this number."""
    index: int
    """Its place among this replica's micro-batches of the step, from 0."""
    last: bool
    """Whether it completes this replica's part of the step."""
    weight: float
    """Weight of its gradient, in samples or tokens; 0 for a filler batch."""
    total_weight: float | None
    """The same over all micro-batches of all replicas; None if only a reduction can tell."""
    count: int
    """Samples in it that count."""
    samples: int
    """Samples in the step, over all replicas."""
    scale: float
    """Scale of the step."""
    sample_steps: float
    """Reference steps that the reference run made with these samples."""
    training: bool = True
    """Whether the model may train on it; False in a loop that started as an evaluation."""


class Left(NamedTuple):
    """What a pass over the data has left."""

    num_processes: int
    """Processes that have made it."""
    sample: list[Tensor]
    """A few numbers of each tensor of the model."""


class StepSizes(NamedTuple):
    """Sizes of a step."""

    samples: int
    """Samples in it, over all replicas."""
    accumulation_steps: int
    """Largest number of micro-batches that a replica ran."""
