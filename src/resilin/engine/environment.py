"""What a launcher can say to the processes of a job, beyond what torchrun says."""

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
"""Where checkpoints go, unless the script says it: a path or an fsspec URL."""
CHECKPOINT_EVERY = "RESILIN_CHECKPOINT_EVERY"
"""How often, as `500steps`, `90s`, `10min` or `1h`, unless the script says it."""
MEMORY_DIR = "RESILIN_MEMORY_DIR"
"""Where this host keeps its copy of the newest state: a directory in memory. `off` keeps none."""
HANG_TIMEOUT = "RESILIN_HANG_TIMEOUT"
"""Seconds without progress after which the agent takes a job to be stuck, or `off`."""
PULSE_DIR = "RESILIN_PULSE_DIR"
"""Where workers show their agent what they do; set by the agent, for its own workers."""
AGENT = "RESILIN_AGENT"
"""Process of the agent that supervises this one, where that is not the parent."""
LOG = "RESILIN_LOG"
"""A logging level, such as `INFO`, at which resilin writes to standard error by itself."""
RUN_DIR = "RESILIN_RUN_DIR"
"""Where the events of the run go, whatever the script says: a local directory, or `off`."""
LAB = "RESILIN_LAB"
"""With 1, the run is one of many of the same script: its checkpoints go into its run directory."""
BATCH_TRACE = "RESILIN_BATCH_TRACE"
"""Path of a batch-size trace that the training follows, whatever the script says."""
BATCH_TRACE_END = "RESILIN_BATCH_TRACE_END"
"""What follows after that trace: `hold`, `repeat` or `error`."""
RULE = "RESILIN_RULE"
"""A scaling rule in place of the script's: its name, or `package.module:attribute`."""
CROSS_CHECK = "RESILIN_CROSS_CHECK"
"""How often replicas compare their parameters, whatever the script says: steps, `auto` or `off`."""
SEED = "RESILIN_SEED"
"""Seed of the order of samples, where the script gives none."""

RUNS = "resilin-runs"
"""Where the directories of runs are made that were given none."""
OFF = "off"
"""What a directory is called where there is to be none."""

_SHARED_MEMORY = Path("/dev/shm")
_UNITS = {"s": 1, "min": 60, "h": 3600}


def memory_parent() -> Path:
    """This user's place for the directories of jobs: in memory where the system has such a place.

    Elsewhere it is on disk: slower, but it outlives a worker all the same.
    """
    in_memory = sys.platform == "linux" and os.access(_SHARED_MEMORY, os.W_OK)
    root = _SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    return root / f"resilin-{os.getuid()}"


def parse_every(text: str) -> int | timedelta:
    """Reads an interval such as `500steps`, `90s`, `10min` or `1h`.

    Raises:
        ValueError: It is not one.
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
    """Messages without what a terminal would obey: they quote paths, checkpoints and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself. A traceback that follows it keeps its lines."""
        return clean(super().formatMessage(record))


def parse_hang_timeout(text: str) -> float:
    """Reads a number of seconds, or `off`, which is infinity.

    Raises:
        ValueError: It is neither.
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
    """Makes resilin write its log by itself, where the launcher asks for it. Once is enough."""
    level = os.environ.get(LOG)
    logger = logging.getLogger("resilin")
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("resilin: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
