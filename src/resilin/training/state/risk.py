"""The steps that a lost worker would cost, reported when that changes much."""

from __future__ import annotations

import logging

from resilin.core.events import RiskEvent
from resilin.training.events import Events
from resilin.training.state.memory_schedule import MEMORY_BUDGET, MemorySchedule

logger = logging.getLogger("resilin")


class RiskReport:
    """Reports how many completed steps the sudden death of a worker costs at most.

    Args:
        copies: When states are copied to memory.
        events: Who hears of it.
    """

    def __init__(self, copies: MemorySchedule, events: Events) -> None:
        self._copies = copies
        self._events = events
        self._reported: int | None = None

    def update(self, steps: int) -> None:
        """Reports once copies were measured, and when the number became half or the double.

        Args:
            steps: The number now.
        """
        before = self._reported
        in_memory = self._copies.at_risk is not None
        if in_memory and not self._copies.is_measured:
            return
        if before is not None and (steps == before or min(steps, before) > max(steps, before) / 2):
            return
        self._reported = steps
        self._events.emit(RiskEvent(**self._events.stamp(), steps=steps))
        if not in_memory:
            # How far the last checkpoint is back is no news; that copies do not fit was a warning.
            return
        if steps == 0:
            logger.info("a lost worker costs no completed step: every step is copied to memory")
        elif self._copies.is_automatic:
            logger.info(
                "a lost worker costs at most %d completed step(s): copying every step to memory "
                "would take more than %g%% of the time (memory_every=1 forces it)",
                steps,
                100 * MEMORY_BUDGET,
            )
        else:
            logger.info(
                "a lost worker costs at most %d completed step(s), as set by memory_every", steps
            )
