"""`Reporter`: when the hints of a job are made and sent to the scheduler of its cluster.

A record is made between two steps, in the main thread, and takes some milliseconds; another thread
sends it. Records are made after the first steps that were measured, after each change of the
replicas, when the scheduler has another menu, every `SECONDS`, and at the end; and never for more
than `SHARE` of the time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable

from resilin.core import time_share
from resilin.core.hints import JobHints
from resilin.engine import environment
from resilin.training.report.measured import Measured
from resilin.training.report.scheduler import Sender, from_environment

logger = logging.getLogger("resilin")

SECONDS = 30.0
"""Time between two records."""
FIRST = 5
"""Steps that are measured with new replicas before they are reported."""
SHARE = 0.01
"""Part of the time that making records may take."""
ALLOWANCE = 0.1
"""Seconds of it that are free, so that a short run reports."""
MAX_REPLICAS = 64
"""Largest number of replicas in the speedup of a record."""


class Reporter:
    """Makes and sends the records of one job; on the process that speaks for it.

    Args:
        sender: Sends them.
        seconds: Time between two of them.
    """

    def __init__(self, sender: Sender, seconds: float = SECONDS) -> None:
        self._sender = sender
        self._seconds = seconds
        self._began = time.perf_counter()
        self._spent = 0.0
        self._latest = -math.inf
        self._reported: tuple[int | None, bool] | None = None
        self._broken = False

    def between_steps(self, measured: Measured, make: Callable[[], JobHints]) -> None:
        """Makes and sends a record if one is due.

        Args:
            measured: Measurements of the job; takes over the menu of the scheduler.
            make: Makes the record.
        """
        due = self._take_answer(measured)
        now = time.perf_counter()
        # Twice for each generation: after its first step, and when it was measured.
        state = (measured.generation, measured.num_here >= FIRST)
        known = measured.num_here >= FIRST or bool(measured.changes)
        due |= known and state != self._reported
        due |= self._reported is not None and now - self._latest >= self._seconds
        within = time_share.is_within(self._spent, now - self._began, SHARE, free=ALLOWANCE)
        if due and within:
            self._report(make)
            self._latest, self._reported = now, state

    def finish(self, make: Callable[[], JobHints]) -> None:
        """Sends the last record of a training, and waits a moment for that."""
        self._report(make)
        self._sender.flush()

    def close(self) -> None:
        """Sends nothing any more."""
        self._broken = True
        self._sender.close()

    def _take_answer(self, measured: Measured) -> bool:
        """Whether the scheduler has another menu than before."""
        answer = self._sender.answer
        if answer is None or answer.menu == measured.menu:
            return False
        measured.menu = answer.menu
        return True

    def _report(self, make: Callable[[], JobHints]) -> None:
        if self._broken:
            return
        began = time.perf_counter()
        try:
            told = make().with_speedup(MAX_REPLICAS).to_json()
            self._sender.offer(json.dumps(told, allow_nan=False).encode())
        except Exception:
            # Training never ends for what it reports.
            logger.exception("the hints of this job cannot be made, and are not sent any more")
            self._broken = True
        self._spent += time.perf_counter() - began


def from_settings() -> Reporter | None:
    """The reporter that the environment asks for; None, with a warning, if it is wrong."""
    try:
        scheduler = from_environment()
        if scheduler is None:
            return None
        text = os.environ.get(environment.HINTS_SECONDS) or str(SECONDS)
        seconds = _seconds(text)
    except ValueError as error:
        logger.warning("no hints are sent to the scheduler: %s", error)
        return None
    return Reporter(Sender(scheduler), seconds)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{environment.HINTS_SECONDS} ({text!r}) must be a number of seconds above 0"
        )
    return seconds
