"""All processes of a host, found and killed.

Some launchers start sessions of their own, and workers outlive them. So processes are found as
descendants, and by a token in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from subprocess import Popen

TOKEN = "ELASTICITY_TOKEN"
"""Environment variable by which the processes of a host are found."""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def processes_of(root: int | None, token: str | None) -> list[int]:
    """A process, its descendants, and all others with the token in their environment."""
    parents, found = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int(_stat(int(path.name))[1])
            mark = f"{TOKEN}={token}".encode()
            if token is not None and mark in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    front = found if root is None else {root} | found
    while front:
        found |= front
        front = {pid for pid, parent in parents.items() if parent in front} - found
    return sorted(found - {os.getpid()})


def alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def kill_all(process: Popen[bytes], token: str | None) -> None:
    """Kills a process and all that belongs to it, until nothing is left, and reaps it."""
    for _ in range(40):
        # Its number may be that of a stranger once it is reaped.
        root = process.pid if process.poll() is None else None
        living = [pid for pid in processes_of(root, token) if alive(pid)]
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not living:
            break
        time.sleep(0.05)
    process.wait(timeout=30)
