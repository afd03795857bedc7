"""Environment variables between a launcher and the processes of a job, besides torchrun's."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from resilin.core.text import clean

CHECKPOINT_DIR = "RESILIN_CHECKPOINT_DIR"
"""Directory for checkpoints, unless the script sets one: a path or an fsspec URL."""
CHECKPOINT_EVERY = "RESILIN_CHECKPOINT_EVERY"
"""Interval between checkpoints, unless the script sets one: `500steps`, `90s`, `10min`, `1h`."""
MEMORY_DIR = "RESILIN_MEMORY_DIR"
"""In-memory directory for the copies of the latest state on this host. `off` keeps none."""
HANG_TIMEOUT = "RESILIN_HANG_TIMEOUT"
"""Seconds without progress after which the agent considers a job hung, or `off`."""
PULSE_DIR = "RESILIN_PULSE_DIR"
"""Directory in which workers publish their state; set by the agent, for its own workers."""
AGENT = "RESILIN_AGENT"
"""Process id of the agent that supervises this process, if that is not the parent."""
LIVE = "RESILIN_LIVE"
"""Path of the launcher's socket, or `tcp://HOST:PORT`, for a worker of a live job."""
MEMBER = "RESILIN_MEMBER"
"""Name of this worker of a live job, which no other one ever has."""
COPY = "RESILIN_COPY"
"""Place of a worker in a copy of the model that is sharded over several: `MEMBER:PART:SIZE`."""
LIVE_OR_RESTART = "RESILIN_LIVE_OR_RESTART"
"""Set for a worker of a live job whose launcher can run the job without `--live` as well."""
LIVE_SECRET = "RESILIN_LIVE_SECRET"
"""Secret of a live job whose authority is reached over a network, in hexadecimal digits."""
LOG = "RESILIN_LOG"
"""Logging level, such as `INFO`, at which resilin logs to standard error."""
RUN_DIR = "RESILIN_RUN_DIR"
"""Local directory for the event log, overriding the script, or `off`."""
LAB = "RESILIN_LAB"
"""With 1, the run is one of many of the same script: its run directory holds its checkpoints."""
BATCH_TRACE = "RESILIN_BATCH_TRACE"
"""Path of a batch-size trace that the training follows, overriding the script."""
BATCH_TRACE_END = "RESILIN_BATCH_TRACE_END"
"""Continuation after the end of that trace: `hold`, `repeat` or `error`."""
STOP_AT = "RESILIN_STOP_AT"
"""Samples on the clock of the job at which the script is ended between two steps, with success."""
RULE = "RESILIN_RULE"
"""Scaling rule, overriding the script's: its name, or `package.module:attribute`."""
CROSS_CHECK = "RESILIN_CROSS_CHECK"
"""Interval of the cross-check of replicas, overriding the script: steps, `auto` or `off`."""
SEED = "RESILIN_SEED"
"""Seed of the order of samples, unless the script sets one."""
SCHEDULER = "RESILIN_SCHEDULER"
"""URL of the scheduler of a cluster, to which replica 0 sends the hints of the job."""
SCHEDULER_TOKEN = "RESILIN_SCHEDULER_TOKEN"
"""Token that the scheduler has given to this job."""
SCHEDULER_CA = "RESILIN_SCHEDULER_CA"
"""File with the certificate of the authority that has signed that of the scheduler."""
JOB = "RESILIN_JOB"
"""Id of the job in the cluster."""
ACCELERATOR = "RESILIN_ACCELERATOR"
"""Kind of accelerator of this node, in the words of the cluster; else torch's name of it."""
HINTS_SECONDS = "RESILIN_HINTS_SECONDS"
"""Seconds between two hints, 30 without it."""

RUNS = "resilin-runs"
"""Default parent of run directories."""
OFF = "off"
"""Value of a directory option that means none."""

_SHARED_MEMORY = Path("/dev/shm")
_UNITS = {"s": 1, "min": 60, "h": 3600}


def memory_parent() -> Path:
    """Parent of the job directories of this user: in memory, if the system has such a place.

    Otherwise it is on disk: slower, but it still outlives a worker.
    """
    in_memory = sys.platform == "linux" and os.access(_SHARED_MEMORY, os.W_OK)
    root = _SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    return root / f"resilin-{os.getuid()}"


def parse_every(text: str) -> int | timedelta:
    """Parse an interval such as `500steps`, `90s`, `10min` or `1h`.

    Raises:
        ValueError: The text is not an interval.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|s|min|h)\s*", text)
    if match is None:
        raise ValueError(
            f"{text!r} must be a number of steps, s, min or h, such as 500steps or 10min"
        )
    number, unit = match.groups()
    if unit.startswith("step"):
        if not number.isdigit() or int(number) < 1:
            raise ValueError(f"{text!r} must be a whole number of steps, at least 1")
        return int(number)
    try:
        return timedelta(seconds=float(number) * _UNITS[unit])
    except OverflowError:
        raise ValueError(f"{text!r} must be at most {timedelta.max.days} days") from None


class _OneLine(logging.Formatter):
    """Formats messages without control characters: they quote paths, checkpoints and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself. A traceback that follows it keeps its lines."""
        return clean(super().formatMessage(record))


def parse_hang_timeout(text: str) -> float:
    """Parse a number of seconds, or `off`, which is infinity.

    Raises:
        ValueError: The text is neither.
    """
    if text.strip() == OFF:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} must be a number of seconds above 0, or {OFF}")
    return seconds


def log_to_stderr() -> None:
    """Log to standard error, if the launcher asks for it. Further calls do nothing."""
    level = os.environ.get(LOG)
    logger = logging.getLogger("resilin")
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("resilin: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
