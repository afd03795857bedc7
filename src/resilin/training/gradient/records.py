"""The records that the gradient of a step takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

from resilin.training.gradient.norms import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One micro-batch of this replica, as far as its gradient is concerned."""

    weight: float
    """Weight of its gradient; 0 if it must not count at all."""
    samples: int
    """Samples of this replica in it."""
    last: bool
    """Whether this replica's part of the step ends with it."""
    total: float | None
    """Weight of all micro-batches of all replicas; None if only a reduction can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart:
    """Information of a replica at the beginning of a step."""

    measure: bool
    """Whether to measure the step; the same on all replicas."""
    step_seconds: float
    """Usual duration of a step on this replica."""
    steps: int
    """Steps that this replica has made so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """Result of a step whose gradient is complete; the same bits on all replicas."""

    weight: float
    """Weight of all micro-batches that had a backward pass, over all replicas."""
    samples: int
    """Samples in them."""
    noise: Measured | None = None
    """Noise per parameter group, to be read in a later step; None if it was not measured."""
    cost: float = 0.0
    """Time that measuring took, as a fraction of the step; a mean over the replicas."""
    skipped: bool = False
    """Whether the step must not be made: a replica left it, or nothing in it was trained."""
    lost: bool = False
    """Whether it was not completed here, because a member is gone; it is skipped, too."""
