"""Progress of a Trainer of Transformers, as the Trainer counts it: in epochs and steps.

The length of a run is that of the reference run. The Trainer counts optimizer steps, of which there
are more or fewer, so after each step its counters are corrected.
"""

from __future__ import annotations

import math
from typing import Any

from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader


class ReferenceRun:
    """The reference run that a Trainer was configured for.

    Args:
        home: The job.
        loader: The data to train on.
        steps: Reference steps of the whole run.
    """

    def __init__(self, home: Home, loader: AdaptiveDataLoader, steps: float) -> None:
        self._job = home.job
        self._loader = loader
        self.steps = steps
        """Reference steps of the whole run."""

    @property
    def done(self) -> float:
        """Reference steps that are done, by the clock of the rule."""
        job = self._job
        assert job.model is not None
        reference = job.timeline.reference or self._loader.reference_run()
        return job.clock.read(job.model.rule.clock, reference)

    def count(self, state: Any) -> None:
        """Set the epoch and the last step of a TrainerState, after a step.

        It assumes that the steps that are left are like the last one.
        """
        model, reference = self._job.model, self._job.timeline.reference
        assert model is not None
        assert reference is not None
        assert reference.steps_per_epoch is not None
        done = self.done
        state.epoch = round(done / reference.steps_per_epoch, 9)
        pace = model.gain if model.rule.clock == "progress" else model.scale
        left = math.ceil((self.steps - done) / pace - 1e-6)
        state.max_steps = state.global_step + max(0, left)
