"""What a launcher can say to the processes of a job, beyond what torchrun says."""

from __future__ import annotations

import logging
import os

CHECKPOINT_DIR = "RESILIN_CHECKPOINT_DIR"
"""Where checkpoints go, unless the script says it: a path or an fsspec URL."""
CHECKPOINT_EVERY = "RESILIN_CHECKPOINT_EVERY"
"""How often, as `500steps`, `90s`, `10min` or `1h`, unless the script says it."""
MEMORY_DIR = "RESILIN_MEMORY_DIR"
"""Where this host keeps its copy of the newest state: a directory in memory. `off` keeps none."""
LOG = "RESILIN_LOG"
"""A logging level, such as `INFO`, at which resilin writes to standard error by itself."""


def log_to_stderr() -> None:
    """Makes resilin write its log by itself, where the launcher asks for it. Once is enough."""
    level = os.environ.get(LOG)
    logger = logging.getLogger("resilin")
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("resilin: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
