"""Gradient noise of the job: running averages per parameter group, and which steps are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from resilin.core import _validate, time_share
from resilin.core.noise import Noise, NoiseAverage, NoiseSample, default_horizon


class MeasureSchedule:
    """Selects the measured steps: every n-th, or as often as a budget of time allows.

    All replicas have to agree, so what it is told must be the same on each of them.
    """

    FIRST = 8
    """Steps at the start that are always measured: there is no estimate yet."""
    LONGEST = 256
    """Steps after which a measurement is due, whatever it costs."""

    BUDGET = 0.02
    """Time for measuring, as a fraction of the step, where nobody says otherwise."""

    def __init__(self, every: int | Literal["auto"], budget: float | None = None) -> None:
        if every != "auto":
            _validate.whole("stats_every", every, at_least=1)
            if budget is not None:
                raise ValueError(
                    f"stats_budget ({budget}) is for stats_every='auto', which is {every}"
                )
        self._every = every
        self._budget = self.BUDGET if budget is None else budget
        _validate.real("stats_budget", self._budget, above=0)
        self.interval = 1 if every == "auto" else int(every)
        """Steps from one measurement to the next."""
        self._since = 0
        self._measured = 0

    @property
    def asked(self) -> bool:
        """Whether the user gave a number of steps: measured at any batch size and by any rule."""
        return self._every != "auto"

    def due(self) -> bool:
        """Whether the step that begins now is to be measured."""
        return self._measured < (self.FIRST if self._every == "auto" else 1) or (
            self._since + 1 >= self.interval
        )

    def committed(self, *, measured: bool) -> None:
        """A step was made."""
        self._since = 0 if measured else self._since + 1
        self._measured += measured

    def observe(self, cost: float) -> None:
        """Learns what a measurement costs.

        Args:
            cost: Time of the measurement over time of the step, the same number on all replicas.
        """
        if self._every == "auto" and self._measured >= self.FIRST // 2:
            self.interval = time_share.interval(cost, self._budget, longest=self.LONGEST)

    def state_dict(self) -> dict[str, int]:
        """State of the schedule, for checkpoints."""
        return {"interval": self.interval, "since": self._since, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what `state_dict` returned; a fixed interval stays that of this run."""
        if self._every == "auto":
            self.interval = int(state["interval"])
        self._since, self._measured = int(state["since"]), int(state["measured"])


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
