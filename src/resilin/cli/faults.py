"""Faults of workers: how a process ended, in words, and their place in the event log of the run."""

from __future__ import annotations

import os
import signal
import socket
import time

from resilin.core.events import FaultEvent
from resilin.engine import environment
from resilin.engine.stop import RESTART
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import last_event


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def count(number: int, noun: str) -> str:
    """A number with its noun, such as `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ending(pid: int, code: int) -> str:
    """The end of a worker, in words.

    Args:
        pid: Its process id.
        code: Its exit code; -N if signal N killed it.
    """
    if code == RESTART:
        how = f"asked for a restart (code {RESTART})"
    elif code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = f"exited with code {code}"
    return f"(process {pid}) {how}"


def record(
    kind: str, detail: str, replica: int | None = None, *, without_step: bool = False
) -> None:
    """Write a fault to the event log of the run, if there is one."""
    directory = os.environ.get(environment.RUN_DIR, environment.OFF)
    if directory == environment.OFF:
        return
    # A launcher does not train: it takes step and generation from the latest event of a worker.
    last = last_event(directory)
    log = EventLog(directory, f"agent-{host()}-{os.getpid()}")
    log.write(
        FaultEvent(
            time=time.time(),
            step=0 if last is None else last.step,
            generation=0 if last is None else last.generation,
            kind=kind,
            detail=detail,
            replica=replica,
            without_step=without_step,
        )
    )
    log.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
