"""Gradient noise of the job: running averages per parameter group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from resilin.core.noise import Noise, NoiseAverage, NoiseSample, default_horizon
from resilin.training.gradient.norms import MeasureSchedule


class Mark(NamedTuple):
    """The estimates at one moment."""

    averages: list[NoiseAverage] | None
    unmeasured: float
    interval: int


class NoiseEstimates:
    """Averages of the measured noise, and the schedule by which it is measured.

    Args:
        num_groups: Parameter groups of the optimizer.
        schedule: Which steps are measured.
        adaptive: Whether the scaling rule uses the noise.
    """

    def __init__(self, num_groups: int, schedule: MeasureSchedule, adaptive: bool = True) -> None:
        self.schedule = schedule
        """Selects the steps that are measured."""
        self._adaptive = adaptive
        self._num_groups = num_groups
        self._averages: list[NoiseAverage] | None = None
        self._unmeasured = 0.0

    def due(self, *, autoscaled: bool, split_at: float | None = None) -> bool:
        """Whether the next step is to be measured.

        Args:
            autoscaled: Whether an autoscaler chooses the batch size by the noise.
            split_at: Scale of a step that would have to be split in two for it alone, which
                changes losses that couple samples. At the reference batch the gain is 1 whatever
                the noise, and below it the smallest gain is safe: there nothing is split, unless
                the user or an autoscaler asks for the noise. None if nothing has to be split.
        """
        wanted = autoscaled or self.schedule.asked
        if split_at is None or split_at > 1:
            wanted = wanted or self._adaptive
        return wanted and self.schedule.due()

    @property
    def group_noise(self) -> list[Noise | None]:
        """Noise of each parameter group's gradient; None until it was measured."""
        if self._averages is None:
            return [None] * self._num_groups
        return [average.noise for average in self._averages]

    def take_in(
        self,
        samples: Sequence[NoiseSample] | None,
        *,
        weight: float,
        gradient_scale: float,
        reference: float,
        total_steps: float | None,
    ) -> None:
        """Takes in what one step has measured. Samples that are not finite are left out.

        Args:
            samples: Noise per group; None if the step was not measured.
            weight: Weight of the step's batch.
            gradient_scale: What gradients were multiplied by, as by a GradScaler.
            reference: The reference batch in the units of the weight.
            total_steps: Length of the run in reference steps, if known.
        """
        self._unmeasured += weight
        if samples is None:
            return
        unscale = gradient_scale**-2
        samples = [
            replace(s, sqr_norm=s.sqr_norm * unscale, trace=s.trace * unscale) for s in samples
        ]
        if not all(math.isfinite(s.sqr_norm) and math.isfinite(s.trace) for s in samples):
            return
        if self._averages is None:
            horizon = default_horizon(reference, total_steps)
            self._averages = [NoiseAverage(horizon=horizon) for _ in samples]
        self._averages = [
            average.update(sample, elapsed=self._unmeasured)
            for average, sample in zip(self._averages, samples, strict=True)
        ]
        self._unmeasured = 0.0

    def mark(self) -> Mark:
        """The present averages and interval, to go back to."""
        return Mark(self._averages, self._unmeasured, self.schedule.interval)

    def go_back(self, mark: Mark) -> None:
        """Forgets what was taken in since this mark."""
        self._averages, self._unmeasured, self.schedule.interval = mark

    def state_dict(self) -> dict[str, Any]:
        """Averages and schedule, for checkpoints."""
        averages = None if self._averages is None else [a.state() for a in self._averages]
        return {
            "averages": averages,
            "unmeasured": self._unmeasured,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: It belongs to an optimizer with another number of parameter groups.
        """
        averages = state["averages"]
        if averages is not None and len(averages) != self._num_groups:
            raise ValueError(
                f"the saved noise has {len(averages)} parameter groups, the optimizer has "
                f"{self._num_groups}"
            )
        self._averages = (
            None if averages is None else [NoiseAverage.from_state(a) for a in averages]
        )
        self._unmeasured = float(state["unmeasured"])
        self.schedule.load_state_dict(state["schedule"])
