"""Training time under a varying batch size: steps, samples, tokens and progress.

Optimizer steps no longer measure training time once their batch varies. The `samples` and
`tokens` clocks preserve cost: each sample counts once. The `progress` clock preserves the
trajectory: each step counts for its gain. All three are read in reference steps, the steps that
the reference batch would have taken, which is the unit of every schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from resilin.core import _validate

ClockName = Literal["samples", "tokens", "progress"]
"""Clocks that can measure training time."""
CLOCKS: tuple[ClockName, ...] = ("samples", "tokens", "progress")
"""The names of all clocks."""

Unit = Literal["steps", "epochs", "samples"]
"""Units of a schedule: reference steps, epochs or samples of the reference run."""
UNITS: tuple[Unit, ...] = ("steps", "epochs", "samples")
"""The names of all units."""

_T = TypeVar("_T")

_ROUNDING = 1e-6
"""Largest rounding error of a sum of gains that should be a whole number, in reference steps."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The run that the user tuned: the size of its steps and epochs."""

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
        """End of the epoch that contains this reading; None if the length of epochs is unknown."""
        if self.steps_per_epoch is None:
            return None
        return (math.floor((reading + _ROUNDING) / self.steps_per_epoch) + 1) * self.steps_per_epoch


def step_scale(actual: int, planned: int, reference: int) -> float:
    """The scale S of a step, also for the short last batch of an epoch.

    The reference run had a short last batch too, and took it with its full learning rate. So a
    remainder has the scale of the whole reference steps that its samples would have made, at most
    the planned scale: at the reference batch S is always 1.

    Args:
        actual: Samples in the batch.
        planned: The planned global batch size.
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
    """Training time by every measure. A value: `advance` returns the next one."""

    steps: int = 0
    """Optimizer steps committed."""
    samples: int = 0
    """Samples used, exactly."""
    tokens: float = 0.0
    """Tokens (or any weight of the batches) used."""
    progress: float = 0.0
    """Accumulated gain, in reference steps."""
    sample_steps: float = 0.0
    """Reference steps by samples: the steps of the reference run with as many samples."""

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
            gain: Worth of the step in reference steps.
            tokens: Tokens in the step.
            sample_steps: Steps that the reference run made with these samples, if a sample stream
                knows them exactly (`SampleStream.reference_steps`); None uses the scale.
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
        """The state for a checkpoint; JSON-compatible."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Clock:
        """The inverse of `state`."""
        return replace(cls(), **state)


def scheduler_steps(before: float, after: float) -> int:
    """Number of times that a scheduler in reference steps must be stepped now.

    Args:
        before: Reading of its clock before the optimizer step, in reference steps.
        after: The reading after it.

    Returns:
        The whole reference steps that were completed in between: 0 when the batch shrank,
        several when it grew.
    """
    if after < before:
        raise ValueError(f"the clock moved backwards from {before} to {after}")
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
    """The clock that the schedule follows."""

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
    """The end of training: a length in reference steps, and a hard limit on samples."""

    reference_steps: float
    """Length of the run, as the reference run counted it."""
    max_samples: int | None = None
    """Limit of samples, whatever the progress. None sets no limit."""
    clock: ClockName = "progress"
    """The clock that measures the length."""

    def __post_init__(self) -> None:
        _validate.real("reference_steps", self.reference_steps, above=0)
        _validate.one_of("clock", self.clock, CLOCKS)
        if self.max_samples is not None:
            _validate.whole("max_samples", self.max_samples, at_least=1)

    def spent(self, clock: Clock, reference: Reference) -> str | None:
        """The reason why training is over; None while it is not."""
        time = clock.read(self.clock, reference)
        if time >= self.reference_steps - _ROUNDING:
            return f"{time:.6g} of {self.reference_steps:.6g} reference steps are completed"
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
