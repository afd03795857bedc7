"""The current job: the one thing that loader, model and epochs share without being told.

It is the only hidden global of resilin. It holds the clocks, and what is being trained on right
now: the loader sets `micro_batch` before it hands out data, the model reads it to know what its
gradient weighs. `reset_job()` starts a new one, as tests and notebooks need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from resilin.core.clock import Clock, Reference
from resilin.core.rules import ScalingRule


class TrainedModel(Protocol):
    """What the rest of the job may ask of the model."""

    training: bool
    rule: ScalingRule

    def measures_next(self) -> bool:
        """Whether noise is measured in the next step."""
        ...

    def release(self) -> None:
        """Gives optimizer, scheduler and scaler their own methods back."""
        ...


class CommittingLoader(Protocol):
    """What the model may ask of the loader."""

    def commit(self) -> None:
        """Moves the cursor behind the current step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What the loader says about the micro-batch that it has just handed out."""

    index: int
    """Its place among this replica's micro-batches of the step, from 0."""
    last: bool
    """Whether it completes this replica's part of the step."""
    weight: float
    """Samples (or tokens) by which its gradient counts; 0 if none of them are its own."""
    total_weight: float | None
    """The same over all micro-batches of all replicas; None if only a reduction can tell."""
    samples: int
    """Samples in the step, over all replicas."""
    scale: float
    """Scale of the step."""
    sample_steps: float
    """Reference steps that the reference run made with these samples."""


@dataclass(slots=True)
class Job:
    """What is being trained, and how far it has come."""

    clock: Clock = field(default_factory=Clock)
    """Steps, samples, tokens and progress committed so far."""
    epoch: int = 0
    """Epochs of the user's loop that are done."""
    total_epochs: int | None = None
    """How many there will be, once `remaining_epochs_until` was told."""
    reference: Reference | None = None
    """The run that the learning rate was tuned for."""
    micro_batch: MicroBatch | None = None
    """What the loop body is working on; None outside a resilin loader."""
    loader: CommittingLoader | None = None
    """The loader that is being iterated."""
    model: TrainedModel | None = None
    """The model that is being trained."""

    @property
    def total_steps(self) -> float | None:
        """Length of the run in reference steps, if it is known."""
        if self.total_epochs is None or self.reference is None:
            return None
        if self.reference.steps_per_epoch is None:
            return None
        return self.total_epochs * self.reference.steps_per_epoch


_current = Job()


def current_job() -> Job:
    """The job of this process."""
    return _current


def reset_job() -> Job:
    """Forgets the current job and begins a new one. Models and loaders of the old one are stale."""
    global _current
    if _current.model is not None:
        _current.model.release()
    _current = Job()
    return _current
