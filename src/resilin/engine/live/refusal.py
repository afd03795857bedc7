"""Refusal of a live job by a script that cannot be live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from resilin.engine import environment, pulse

NOT_LIVE = 69
"""Exit code of a process that cannot be live (`EX_UNAVAILABLE` of sysexits.h)."""


def refuse_live(reason: str) -> NoReturn:
    """End this process, whose script cannot be live.

    On one machine its launcher then runs the job without `--live`. Over several machines the
    launchers have no rendezvous for that, and it is an error.

    Args:
        reason: What the script does, and the rule against it.

    Raises:
        SystemExit: The launcher runs the job without `--live`.
        ValueError: It cannot.
    """
    if environment.LIVE_OR_RESTART not in os.environ:
        raise ValueError(f"{reason}. Start the job without --live: a lost worker then restarts it")
    directory, local_rank = Path(os.environ[environment.PULSE_DIR]), int(os.environ["LOCAL_RANK"])
    pulse.error_path(directory, local_rank).write_text(reason)
    raise SystemExit(NOT_LIVE)
