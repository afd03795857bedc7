"""`StepScaling`: changes to the optimizer for the batch size of a step.

The noise of the gradient and the scale of the step give its gain; the scaling rule turns both into
factors for the optimizer. They are a value, made once per step from its complete gradient; only a
step that is made changes what is known of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from resilin.core.clock import ClockName
from resilin.core.noise import Noise, gain
from resilin.core.rules import Factors, ScalingRule, group_factors, rule_name, total_noise
from resilin.core.step import Reduced
from resilin.engine.devices import Fetched
from resilin.training.records import MicroBatch
from resilin.training.scaling.choice import compare_settings, compare_with_saved, settings_of
from resilin.training.scaling.estimates import Averages, NoiseEstimates
from resilin.training.scaling.reference import ReferenceBatch
from resilin.training.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Scaled:
    """Scale, gain and factors of one step."""

    scale: float = 1.0
    """Global batch over reference batch."""
    gain: float = 1.0
    """Worth of the step in reference steps."""
    factors: tuple[Factors, ...] = ()
    """Factors of the rule for each parameter group."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step that is to be made needs of its complete gradient."""

    reduced: Reduced
    """Result of the reduction."""
    scaled: Scaled
    """Scale, gain and factors."""
    averages: Averages
    """What is known of the noise after it."""


class StepScaling:
    """Gain and factors of one step after another.

    Args:
        rules: The scaling rule of each optimizer; all have the same clock.
        estimates: Averages of the measured noise.
        reference: The batch that the learning rate was tuned for.
        timeline: The clock of the job.
        optimizers: The optimizers, as the script has made them.
    """

    def __init__(
        self,
        rules: Sequence[ScalingRule],
        estimates: NoiseEstimates,
        reference: ReferenceBatch,
        timeline: Timeline,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.rules = tuple(rules)
        self._rule_of_group = [
            rule
            for rule, optimizer in zip(rules, optimizers, strict=True)
            for _ in optimizer.param_groups
        ]
        self.estimates = estimates
        self.reference = reference
        self.last = Scaled(factors=(Factors(),) * len(self._rule_of_group))
        """The last step that was made."""
        self._timeline = timeline
        self._settings = settings_of(optimizers)

    @property
    def clock(self) -> ClockName:
        """The clock of all rules."""
        return self.rules[0].clock

    @property
    def rule_names(self) -> str:
        """Their names, such as `adamscale`, or `muonscale+adamscale` if they differ."""
        return "+".join(dict.fromkeys(map(rule_name, self.rules)))

    # Measurements --------------------------------------------------------------------------

    @property
    def group_noise(self) -> list[Noise | None]:
        """Noise of each parameter group's gradient that the last step was made with."""
        return self.estimates.group_noise

    @property
    def noise(self) -> Noise | None:
        """Noise of the whole model's gradient; None until it was measured."""
        return total_noise(self.group_noise)

    @property
    def sample_noise(self) -> Noise | None:
        """The noise per sample, also if batches are weighted by something else."""
        return self.per_sample(self.noise)

    def per_sample(self, noise: Noise | None) -> Noise | None:
        """This noise per sample."""
        if noise is None:
            return None
        return replace(noise, trace=noise.trace / self.reference.per_sample())

    def scalars(self) -> dict[str, float]:
        """Numbers of the last step, by the names of their curves."""
        last, noise = self.last, self.sample_noise
        values = {"gain": last.gain, "scale": last.scale, "lr_factor": last.factors[0].lr}
        if noise is not None:
            values.update(sqr_norm=noise.sqr_norm, trace=noise.trace)
        return values

    def predict_gain(self, scale: float) -> float:
        """The gain that a step at this scale would have now."""
        reference = self.reference.weight(self.reference.per_sample())
        return gain(total_noise(self.estimates.newest()), scale * reference, reference)

    # One step ------------------------------------------------------------------------------

    def prepare(
        self,
        reduced: Reduced,
        micro: MicroBatch | None,
        *,
        gradient_scale: Fetched | None,
    ) -> Prepared:
        """Turns a complete gradient into gain and factors. Nothing is changed.

        Args:
            reduced: The result of the reduction.
            micro: The last micro-batch of the step; None if it came from another loader.
            gradient_scale: Factor on all gradients, such as that of a GradScaler; None for 1.
        """
        samples = reduced.samples
        scale = samples / self.reference.weight(1.0)
        if micro is not None:
            # Less where the loop has left micro-batches out.
            scale = micro.scale * (samples / micro.samples)
        reference = self.reference.weight(reduced.weight / samples)
        averages = self.estimates.averages.after(
            reduced.noise,
            weight=reduced.weight,
            gradient_scale=gradient_scale,
            reference=reference,
            total_steps=self._timeline.total_steps,
        )
        noise = self.estimates.noise_in(averages)
        factors = group_factors(
            self._rule_of_group,
            batch_size=scale * reference,
            reference=reference,
            noise=noise,
            elapsed=self.reference.read(self.clock),
        )
        worth = gain(total_noise(noise), scale * reference, reference)
        return Prepared(reduced, Scaled(scale, worth, factors), averages)

    def made(self, prepared: Prepared, *, measured: bool) -> None:
        """Takes over what is known after a step that was made.

        Args:
            prepared: What it was made with.
            measured: Whether the noise was measured in it.
        """
        self.last, self.estimates.averages = prepared.scaled, prepared.averages
        if measured:
            self.estimates.schedule.observe(prepared.reduced.cost)

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Estimates, rule and settings of the optimizer. Waits for the device."""
        ours = {"rule": self.rule_names, "settings": self._settings}
        return {**self.estimates.state_dict(), **ours}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; another rule is logged, and stays that of this run.

        Raises:
            ValueError: It belongs to another optimizer.
        """
        self.estimates.load_state_dict(state)
        compare_with_saved(self.rule_names, state.get("rule"))
        compare_settings(self._settings, state.get("settings"))
