"""Progress of a Trainer of Transformers, as the Trainer counts it: in epochs and steps.

The length of a run is that of the reference run. The Trainer counts optimizer steps, of which there
are more or fewer, so after each step its counters are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from resilin.telemetry.extras import load
from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.script.events import record

if TYPE_CHECKING:
    from resilin.integrations.trainer_state import TrainerPart

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")


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
        reference = job.timeline.reference or self._loader._reference()
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


class CountSteps(_hf.TrainerCallback):  # type: ignore[misc]
    """Corrects the counters of the stock loop, and records evaluations as events of the job.

    Args:
        part: Returns the state of the run that is under way.
    """

    def __init__(self, part: Callable[[], TrainerPart | None]) -> None:
        self._part = part

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the hooks of other callbacks will reset."""
        part = self._part()
        assert part is not None
        part.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Correct the counters, also those of progress bars."""
        part = self._part()
        assert part is not None
        part.run.count(state)
        for callback in part.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the metrics of an evaluation."""
        if Home().job.recorder is not None:
            metrics: Mapping[str, Any] = kwargs["metrics"]
            record({name: value for name, value in metrics.items() if isinstance(value, float)})
