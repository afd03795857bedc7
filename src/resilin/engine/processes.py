"""Whether a process of this machine is alive, also if its number was given to another one since."""

from __future__ import annotations

import os
from pathlib import Path


def process_gone(pid: int, started: str | None) -> bool:
    """Whether a process of this host has ended, also if nobody has collected it yet.

    Args:
        pid: Its number.
        started: What `process_start` said of it; a number may be given to another process later.
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
    """When a process began, in the kernel's words; empty if it has ended, None if not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if not Path("/proc/self/stat").exists() else ""
    return "" if fields[0] in "ZX" else fields[19]
