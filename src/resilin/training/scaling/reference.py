"""The reference batch of a job, in the units of its weights and of its clocks."""

from __future__ import annotations

from dataclasses import replace

from resilin.core.clock import ClockName, Reference
from resilin.training.timeline import Timeline


class ReferenceBatch:
    """The batch that the learning rate was tuned for, as set on the loader or the model.

    Args:
        timeline: The clock of the job, and the reference of the `AdaptiveDataLoader` that trains.
        batch_size: Setting of the model; None if the loader sets it.
        tokens_per_step: Tokens in one reference step, if they are counted.
    """

    def __init__(
        self, timeline: Timeline, batch_size: int | None, tokens_per_step: float | None
    ) -> None:
        self._timeline = timeline
        self._batch_size = batch_size
        self.tokens_per_step = tokens_per_step
        """Tokens in one reference step, if they are counted."""

    @property
    def is_told(self) -> bool:
        """Whether the model was told the batch size."""
        return self._batch_size is not None

    def weight(self, per_sample: float) -> float:
        """The reference batch in the units of the weights.

        Args:
            per_sample: Mean weight of a sample.

        Raises:
            ValueError: It is not set, or model and loader contradict each other.
        """
        known = self._timeline.reference
        if known is not None:
            if self._batch_size not in (None, known.batch_size):
                raise ValueError(
                    f"batch_size ({self._batch_size}) of the AdaptiveDataParallel must be "
                    f"that of the AdaptiveDataLoader ({known.batch_size}), or left out"
                )
            return known.batch_size * per_sample
        if self._batch_size is None:
            raise ValueError(
                "the reference batch is not known: pass batch_size= (the global batch size that "
                "the learning rate was tuned for) or train with an AdaptiveDataLoader"
            )
        return self._batch_size * per_sample

    def per_sample(self) -> float:
        """Mean weight of a sample so far."""
        clock = self._timeline.clock
        return clock.tokens / clock.samples if clock.samples else 1.0

    def of_clock(self) -> Reference:
        """The reference run, as clocks need it."""
        known = self._timeline.reference or Reference(round(self.weight(1.0)))
        if known.tokens_per_step == self.tokens_per_step:
            return known
        return replace(known, tokens_per_step=self.tokens_per_step)

    def read(self, clock: ClockName) -> float:
        """Reading of a clock of the job, in reference steps."""
        return self._timeline.clock.read(clock, self.of_clock())

    def schedule_end(self, before: float) -> float | None:
        """Limit beyond which a schedule must not be stepped, in reference steps; None if unknown.

        The last step of an epoch may overshoot it. A run of known length ends at that length.
        Otherwise any epoch may be the last: a schedule then continues with the next epoch's steps.

        Args:
            before: Reading of the schedule's clock before the step.
        """
        if self._timeline.total_steps is not None:
            return self._timeline.total_steps
        return self.of_clock().epoch_end(before)
