"""`Timeline`: progress of a job, by its clock and its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilin.core.clock import Clock, Reference
from resilin.training.records import StepSizes


@dataclass(slots=True)
class Timeline:
    """Position of a job in its training, and the state that it resumed from."""

    clock: Clock = field(default_factory=Clock)
    """Steps, samples, tokens and progress committed so far."""
    epoch: int = 0
    """Completed epochs of the user's loop."""
    committed_in: int = 0
    """The generation that committed the last step, or began the job."""
    total_epochs: int | None = None
    """Number of epochs in the whole job; None until `remaining_epochs_until` was called."""
    epoch_is_new: bool = False
    """Whether the loop has begun an epoch and not yet asked a loader for its data."""
    reference: Reference | None = None
    """The run that the learning rate was tuned for."""
    last_step: StepSizes | None = None
    """Sizes of the last step; None until this process has committed one."""
    replicas_before: int | None = None
    """Number of replicas when the state was taken that the job resumed from."""
    more_steps: float = 0.0
    """Reference steps of past epochs beyond those of as many epochs of the present length."""
    seeded_at: int | None = None
    """Step at which the random generators of all replicas were reseeded, if any."""
    carried_from: str = ""
    """State from a checkpoint of another framework, as text; empty if there is none."""

    @property
    def total_steps(self) -> float | None:
        """Length of the run in reference steps, if it is known."""
        if self.total_epochs is None or self.reference is None:
            return None
        if self.reference.steps_per_epoch is None:
            return None
        return self.total_epochs * self.reference.steps_per_epoch + self.more_steps

    def state(self, num_replicas: int) -> dict[str, Any]:
        """Clocks, epoch, number of replicas and reference batch, for checkpoints."""
        state = {
            "clock": self.clock.state(),
            "epoch": self.epoch,
            "replicas": num_replicas,
            "seeded_at": self.seeded_at,
            # Not restored, since the script says it again: for those who read the state.
            "reference": None if self.reference is None else self.reference.batch_size,
        }
        return {**state, "more_steps": self.more_steps} if self.more_steps else state

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.clock = Clock.from_state(state["clock"])
        self.epoch = int(state["epoch"])
        self.replicas_before = int(state["replicas"])
        self.seeded_at = state.get("seeded_at")
        self.more_steps = float(state.get("more_steps", 0.0))
