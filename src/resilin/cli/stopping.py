"""Signals that stop a job: the first one counts, and the workers get the time to save.

Clusters repeat their signal, a worker that leaves its machine sends SIGTERM to its agent, and users
press Ctrl-C twice. torch's agent takes each signal for a new request: the second replaces the exit
code, and the third kills workers that are saving. Here further signals are ignored, except for
SIGINT, which ends the wait.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from resilin.cli.options import stop_signals
from resilin.engine.stop import SIGNALS

STDERR = 2
"""File descriptor of standard error."""


class StopSignals:
    """Handlers of the signals that stop the job of this process."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The signal that stopped the job; None before it."""
        self.kill: Callable[[], None] | None = None
        """Kills the workers, if there are any."""

    def install(self) -> None:
        """Take the signals. Call it again after torch has installed its own handlers."""
        for number in stop_signals():
            signal.signal(number, self.take)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Stop the job, or ignore the signal if the job is being stopped.

        Raises:
            SignalException: It is the first one. Its value is the signal for the workers.
        """
        given = signal.Signals(number)
        if self.first is None:
            self.first = given
            if self.kill is not None:
                again = " (SIGINT again kills them)" * (given is signal.SIGINT)
                _write(f"{given.name}: stopping the workers{again}")
            # torch passes on what is raised. SIGINT, SIGHUP and SIGQUIT would end a worker without
            # a save; the others ask it to save.
            sent = given if given in SIGNALS else signal.SIGTERM
            raise SignalException(f"stopped by {given.name}", sigval=sent)
        if given is signal.SIGINT and self.kill is not None:
            kill, self.kill = self.kill, None
            _write("SIGINT again: killing the workers")
            kill()


def _write(line: str) -> None:
    # Not by print: the signal may have interrupted one, whose buffer does not allow another.
    os.write(STDERR, f"resilin: {line}\n".encode())
