"""Whether a process of this machine is alive, even if its pid may have been reused."""

from __future__ import annotations

import os
from pathlib import Path


def process_gone(pid: int, started: str | None) -> bool:
    """Whether a process of this host has ended, also as a zombie.

    Args:
        pid: Its process id.
        started: Its `process_start`, because a process id may be reused.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    now = process_start(pid)
    return now is not None and now != started


def process_start(pid: int) -> str | None:
    """Start time of a process, as the kernel reports it; empty if it has ended, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if not Path("/proc/self/stat").exists() else ""
    return "" if fields[0] in "ZX" else fields[19]
