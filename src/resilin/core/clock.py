"""Training time under a varying batch size: steps, samples, tokens and progress.

Optimizer steps stop measuring anything once their batch varies. The `samples` and `tokens`
clocks preserve cost: each sample counts once. The `progress` clock preserves the trajectory:
each step counts for its gain. All three are read in reference steps, the steps that the
reference batch would have taken, which is the unit every schedule is written in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from resilin.core import _validate

ClockName = Literal["samples", "tokens", "progress"]
"""What training time is measured by."""
CLOCKS: tuple[ClockName, ...] = ("samples", "tokens", "progress")
"""The names of all clocks."""

Unit = Literal["steps", "epochs", "samples"]
"""What a schedule is written in: reference steps, epochs or samples of the reference run."""
UNITS: tuple[Unit, ...] = ("steps", "epochs", "samples")
"""The names of all units."""

_T = TypeVar("_T")

_ROUNDING = 1e-6
"""Reference steps by which a sum of fractional gains may fall short of the whole number it is."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The run that the user tuned: what one of its steps and epochs amounts to."""

    batch_size: int
    """The reference batch: samples in one reference step."""
    steps_per_epoch: float | None = None
    """Reference steps in one epoch; `len(loader)` at the reference batch."""
    tokens_per_step: float | None = None
    """Tokens in one reference step, for the `tokens` clock."""

    def __post_init__(self) -> None:
        _validate.whole("reference batch size", self.batch_size, at_least=1)
        if self.steps_per_epoch is not None:
            _validate.real("steps_per_epoch", self.steps_per_epoch, above=0)
        if self.tokens_per_step is not None:
            _validate.real("tokens_per_step", self.tokens_per_step, above=0)

    def epoch_end(self, reading: float) -> float | None:
        """Where the epoch ends that a clock's reading belongs to; None if its length is unknown."""
        if self.steps_per_epoch is None:
            return None
        return (math.floor((reading + _ROUNDING) / self.steps_per_epoch) + 1) * self.steps_per_epoch


def step_scale(actual: int, planned: int, reference: int) -> float:
    """The scale S of a step, also for the short last batch of an epoch.

    The reference run had a short last batch too, and stepped with its full learning rate. So a
    remainder has the scale of the whole reference steps it would have made, at most the scale
    that was planned: at the reference batch S is always 1.

    Args:
        actual: Samples really in the batch.
        planned: The global batch size that was asked for.
        reference: The reference batch size.
    """
    _validate.whole("actual", actual, at_least=1)
    _validate.whole("reference", reference, at_least=1)
    if actual > planned:
        raise ValueError(f"a step of {actual} samples exceeds its planned batch ({planned})")
    if actual == planned:
        return planned / reference
    return min(planned / reference, float(-(-actual // reference)))


@dataclass(frozen=True, slots=True)
class Clock:
    """How far training has come, by every measure. A value: `advance` returns the next one."""

    steps: int = 0
    """Optimizer steps committed."""
    samples: int = 0
    """Samples used, exactly."""
    tokens: float = 0.0
    """Tokens (or any weight of the batches) used."""
    progress: float = 0.0
    """Accumulated gain, in reference steps."""
    sample_steps: float = 0.0
    """Reference steps by samples: those the reference run made with as many samples."""

    def advance(
        self,
        *,
        samples: int,
        scale: float,
        gain: float,
        tokens: float = 0.0,
        sample_steps: float | None = None,
    ) -> Clock:
        """Commits one optimizer step.

        Args:
            samples: Samples in the step.
            scale: Its scale S, as from `step_scale`.
            gain: Reference steps the step was worth.
            tokens: Tokens in the step.
            sample_steps: Reference steps that the reference run made with these samples, where a
                sample stream knows it exactly (`SampleStream.reference_steps`); None takes the
                scale.
        """
        _validate.whole("samples", samples, at_least=1)
        _validate.real("scale", scale, above=0)
        _validate.real("gain", gain, above=0)
        _validate.real("tokens", tokens, at_least=0)
        made = scale if sample_steps is None else sample_steps
        _validate.real("sample_steps", made, at_least=0)
        return Clock(
            steps=self.steps + 1,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            progress=self.progress + gain,
            sample_steps=self.sample_steps + made,
        )

    def read(self, clock: ClockName, reference: Reference) -> float:
        """Training time in reference steps.

        Raises:
            ValueError: The tokens clock without `reference.tokens_per_step`.
        """
        _validate.one_of("clock", clock, CLOCKS)
        if clock == "progress":
            return self.progress
        if clock == "samples":
            return self.sample_steps
        if reference.tokens_per_step is None:
            raise ValueError("the tokens clock needs tokens_per_step of the reference run")
        return self.tokens / reference.tokens_per_step

    def state(self) -> dict[str, float]:
        """All of it, for a checkpoint; JSON-compatible."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Clock:
        """Restores what `state` returned."""
        return replace(cls(), **state)


def scheduler_steps(before: float, after: float) -> int:
    """How often a scheduler written per reference step must be stepped now.

    Args:
        before: Reading of its clock before the optimizer step, in reference steps.
        after: The reading after it.

    Returns:
        The whole reference steps that were completed in between: 0 when the batch shrank,
        several when it grew.
    """
    if after < before:
        raise ValueError(f"the clock went back from {before} to {after}")
    return math.floor(after + _ROUNDING) - math.floor(before + _ROUNDING)


@dataclass(frozen=True, slots=True)
class Schedule(Generic[_T]):
    """A value that varies over training, written for the reference run.

    Examples:
        >>> warm = Schedule(lambda epoch: 128 if epoch < 5 else 1024, unit="epochs")
        >>> warm.now(Clock(sample_steps=10.0), Reference(128, steps_per_epoch=2))
        1024
    """

    function: Callable[[float], _T]
    """Maps training time to the value."""
    unit: Unit = "steps"
    """The unit of the function's argument."""
    clock: ClockName = "samples"
    """What moves the schedule on."""

    def __post_init__(self) -> None:
        _validate.one_of("unit", self.unit, UNITS)
        _validate.one_of("clock", self.clock, CLOCKS)

    def now(self, clock: Clock, reference: Reference) -> _T:
        """The value at this time.

        Raises:
            ValueError: A schedule in epochs without `reference.steps_per_epoch`.
        """
        time = clock.read(self.clock, reference)
        if self.unit == "samples":
            time *= reference.batch_size
        elif self.unit == "epochs":
            if reference.steps_per_epoch is None:
                raise ValueError("a schedule in epochs needs steps_per_epoch of the reference run")
            time /= reference.steps_per_epoch
        return self.function(time)


@dataclass(frozen=True, slots=True)
class Budget:
    """When training is over: a length in reference steps, and a hard cap on its cost."""

    reference_steps: float
    """Length of the run, as the reference run counted it."""
    max_samples: int | None = None
    """Samples that must not be exceeded, whatever progress was made. None sets no cap."""
    clock: ClockName = "progress"
    """What the length is measured by."""

    def __post_init__(self) -> None:
        _validate.real("reference_steps", self.reference_steps, above=0)
        _validate.one_of("clock", self.clock, CLOCKS)
        if self.max_samples is not None:
            _validate.whole("max_samples", self.max_samples, at_least=1)

    def spent(self, clock: Clock, reference: Reference) -> str | None:
        """Why training is over, in words; None while it goes on."""
        time = clock.read(self.clock, reference)
        if time >= self.reference_steps - _ROUNDING:
            return f"{time:.6g} of {self.reference_steps:.6g} reference steps are done"
        if self.max_samples is not None and clock.samples >= self.max_samples:
            return (
                f"{clock.samples} of at most {self.max_samples} samples are used, after "
                f"{time:.6g} of {self.reference_steps:.6g} reference steps"
            )
        return None

    def limit(self, clock: Clock, batch_size: int) -> int:
        """The largest batch, up to `batch_size`, that keeps within `max_samples`."""
        if self.max_samples is None:
            return batch_size
        return max(0, min(batch_size, self.max_samples - clock.samples))
