"""The steps that a lost worker would cost, reported when that changes much."""

from __future__ import annotations

import logging

from resilin.core.events import RiskEvent
from resilin.training.events import Events
from resilin.training.state.memory_schedule import MemorySchedule

logger = logging.getLogger("resilin")

PATIENCE = 1000
"""Steps in a row with half of the reported number, before a smaller one is reported."""


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
        self._lower = 0

    def update(self, steps: int) -> None:
        """Reports the number once copies were measured, when it doubles, and when it stays at half.

        Where steps are short, the number goes up and down with each measurement, and each
        checkpoint sets it back: a smaller number counts only if it lasts.

        Args:
            steps: The number now.
        """
        in_memory = self._copies.at_risk is not None
        if in_memory and not self._copies.is_measured:
            return
        if not self._is_news(steps):
            return
        first = self._reported is None
        self._reported, self._lower = steps, 0
        self._events.emit(RiskEvent(**self._events.stamp(), steps=steps))
        if not in_memory:
            # How far the last checkpoint is back is no news; that copies do not fit was a warning.
            return
        if self._copies.is_automatic:
            # The number follows the measured times: `resilin top` shows it as it changes.
            logger.log(
                logging.INFO if first else logging.DEBUG,
                "a lost worker costs %s now%s",
                f"about {_completed(steps)}" if steps else "no completed step",
                ": copies in memory are made as often as pays off (memory_every=1: every step)"
                if first
                else "",
            )
        elif steps == 0:
            logger.info("a lost worker costs no completed step: every step is copied to memory")
        else:
            logger.info("a lost worker costs at most %s, as set by memory_every", _completed(steps))

    def _is_news(self, steps: int) -> bool:
        before = self._reported
        if before is None or (steps > before and steps >= 2 * before):
            return True
        self._lower = self._lower + 1 if steps < before and 2 * steps <= before else 0
        return self._lower >= PATIENCE


def _completed(steps: int) -> str:
    return f"{steps} completed step{'s' * (steps != 1)}"
