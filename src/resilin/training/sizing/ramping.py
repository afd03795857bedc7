"""A `NoiseRamp` in a job: replica 0 proposes the next size, and all take it up at the same step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from resilin.core.events import DecisionEvent
from resilin.core.ramp import NoiseRamp
from resilin.training.sizing.context import SizingContext

logger = logging.getLogger("resilin")


class Ramping:
    """The ramp of one loader, and the size that it has reached.

    Args:
        context: What it reads of the job.
        ramp: The sizes.
    """

    def __init__(self, context: SizingContext, ramp: NoiseRamp) -> None:
        self._context = context
        self._ramp = ramp
        self._reason = ""
        self.batch_size = ramp.sizes[0]
        """The global batch size now; the same on all replicas."""

    def votes(self) -> tuple[float, ...]:
        """The next size on replica 0 if the noise allows it, else 0."""
        if self._context.engine.membership.replica != 0:
            return (0.0,)
        bound = self._context.lower_phi(self._ramp.confidence)
        size = self._ramp.next(self.batch_size, bound)
        if size == self.batch_size:
            return (0.0,)
        self._reason = f"the noise scale is above {bound:.6g} samples, and so above {size}"
        return (float(size),)

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up the size that replica 0 proposes, if it does."""
        if not votes[0]:
            return
        before, self.batch_size = self.batch_size, round(votes[0])
        if self._context.engine.membership.replica != 0:
            return
        logger.info("batch size %d -> %d: %s", before, self.batch_size, self._reason)
        told = self._context.events
        told.emit(
            DecisionEvent(
                **told.stamp(),
                batch_size_before=before,
                batch_size=self.batch_size,
                reason=self._reason,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """The size that was reached, for checkpoints; the same on all replicas."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the size that was reached, or the largest one of the list below it."""
        self.batch_size = self._ramp.resume(int(state["batch_size"]))
