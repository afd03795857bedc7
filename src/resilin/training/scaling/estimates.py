"""Gradient noise of the job: running averages per parameter group, and which steps are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from resilin.core import _validate, time_share
from resilin.core.noise import Noise, NoiseAverage, NoiseSample, default_horizon
from resilin.engine.devices import Fetched
from resilin.training.gradient.norms import Measured


class MeasureSchedule:
    """Selects the measured steps: every n-th, or as often as a budget of time allows.

    All replicas have to agree, so what it is told must be the same on each of them.
    """

    FIRST = 8
    """Steps at the start that are always measured: there is no estimate yet."""
    LONGEST = 256
    """Steps after which a measurement is due, whatever it costs."""

    BUDGET = 0.01
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


class Unread(NamedTuple):
    """A measured step whose numbers may still be on the device."""

    noise: Measured | Known
    """Noise per parameter group."""
    gradient_scale: Fetched | None
    """Factor on the gradients, as that of a GradScaler; None for 1."""
    elapsed: float
    """Weight of the batches since the measurement before, with that of this step."""
    horizon: float
    """Horizon of the averages, if these begin with it."""

    def samples(self) -> tuple[NoiseSample, ...] | None:
        """Noise per parameter group; None if it is unknown or not finite. Waits if it must."""
        samples = self.noise.read()
        if samples is None:
            return None
        if self.gradient_scale is not None:
            # The loss scale multiplies gradients; it must not reach the noise.
            unscale = self.gradient_scale.read()[0] ** -2
            samples = tuple(
                replace(s, sqr_norm=s.sqr_norm * unscale, trace=s.trace * unscale) for s in samples
            )
        if not all(math.isfinite(s.sqr_norm) and math.isfinite(s.trace) for s in samples):
            return None
        return samples


class Known(NamedTuple):
    """Noise of a measured step that was read before, as from a checkpoint."""

    value: tuple[NoiseSample, ...] | None

    def read(self) -> tuple[NoiseSample, ...] | None:
        """Noise per parameter group; None if it is unknown."""
        return self.value


class Averages(NamedTuple):
    """Averages over the measured steps, and how much was trained since the last one."""

    groups: tuple[NoiseAverage, ...] | None = None
    """One for each parameter group; None before the first measurement."""
    unmeasured: float = 0.0
    """Weight of the batches since then."""
    unread: Unread | None = None
    """The last step, if it was measured and is not in the averages yet."""

    def read(self) -> Averages:
        """The averages with the last step in them. Waits for the device if that was measured."""
        groups, unmeasured, unread = self
        if unread is None:
            return self
        samples = unread.samples()
        if samples is None:
            return Averages(groups, unmeasured + unread.elapsed)
        groups = groups or (NoiseAverage(horizon=unread.horizon),) * len(samples)
        updated = tuple(
            average.update(sample, elapsed=unread.elapsed)
            for average, sample in zip(groups, samples, strict=True)
        )
        return Averages(updated, unmeasured)

    def after(
        self,
        noise: Measured | None,
        *,
        weight: float,
        gradient_scale: Fetched | None,
        reference: float,
        total_steps: float | None,
    ) -> Averages:
        """The averages after one more step; what it has measured is read in the next one.

        The first measurement of a job is worth a wait: there is nothing else to go by.

        Args:
            noise: Noise per group; None if the step was not measured.
            weight: Weight of the step's batch.
            gradient_scale: What gradients were multiplied by, as by a GradScaler; None for 1.
            reference: The reference batch in the units of the weight.
            total_steps: Length of the run in reference steps, if known.
        """
        groups, unmeasured, _ = self.read()
        if noise is None:
            return Averages(groups, unmeasured + weight)
        horizon = default_horizon(reference, total_steps)
        unread = Unread(noise, gradient_scale, unmeasured + weight, horizon)
        made = Averages(groups, unread=unread)
        return made.read() if groups is None else made


class NoiseEstimates:
    """Averages of the measured noise, and the schedule by which it is measured.

    What a step has measured is read in the next one, on all replicas alike: only then nobody has to
    wait for the device. The first measurement of all counts at once.

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
        self.averages = Averages()
        """What is known after the last step that was made."""

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
        """Noise of each parameter group's gradient before the last step; None until measured."""
        return self.noise_in(self.averages)

    def newest(self) -> list[Noise | None]:
        """The same with the last step in it. Waits for the device if that was measured."""
        return self.noise_in(self.averages.read())

    def noise_in(self, averages: Averages) -> list[Noise | None]:
        """Noise of each parameter group's gradient in these averages; None until measured."""
        if averages.groups is None:
            return [None] * self._num_groups
        return [average.noise for average in averages.groups]

    def state_dict(self) -> dict[str, Any]:
        """Averages, the last measurement and schedule, for checkpoints. Waits for the device."""
        groups, unmeasured, last = self.averages
        unread = None
        if last is not None:
            samples = last.samples()
            unread = {
                "samples": None if samples is None else [asdict(s) for s in samples],
                "elapsed": last.elapsed,
                "horizon": last.horizon,
            }
        return {
            "averages": None if groups is None else [a.state() for a in groups],
            "unmeasured": unmeasured,
            "unread": unread,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: It belongs to an optimizer with another number of parameter groups.
        """
        averages, unread = state["averages"], state.get("unread")
        samples = None if unread is None else unread["samples"]
        for saved in (averages, samples):
            if saved is not None and len(saved) != self._num_groups:
                raise ValueError(
                    f"the saved noise has {len(saved)} parameter groups, the optimizer has "
                    f"{self._num_groups}"
                )
        last = None
        if unread is not None:
            known = None if samples is None else tuple(NoiseSample(**s) for s in samples)
            last = Unread(Known(known), None, unread["elapsed"], unread["horizon"])
        self.averages = Averages(
            None if averages is None else tuple(NoiseAverage.from_state(a) for a in averages),
            float(state["unmeasured"]),
            last,
        )
        self.schedule.load_state_dict(state["schedule"])
