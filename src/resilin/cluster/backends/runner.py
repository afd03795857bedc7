"""The parent of one part on this machine, which outlives whoever started it.

It is a program of its own, `runner.py DIRECTORY NAME`, and needs nothing but the standard library.
`NAME.part` says what to run. The runner holds `NAME.lock` for as long as it lives, and keeps
`NAME.status`: a second runner of the same name finds either and leaves. It looks at `NAME.stop`,
which says until when the part may save. A part has ended when all of its processes have: those
whose parent dies become children of the runner.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TICK = 0.1
"""Seconds between two looks at the request to stop."""
LINGER = 10.0
"""Seconds that other processes of a part have to end after its first one."""
NOT_STARTED = 127
"""Exit code of a part whose command cannot be run, as in a shell."""
PR_SET_CHILD_SUBREAPER = 36
"""Linux: orphans among the descendants become children of this process."""


def process_start(pid: int) -> str:
    """Start time of a process as the kernel reports it; empty if it has ended, or is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_alive(pid: int, started: str) -> bool:
    """Whether the process that had this id and start time is alive."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False
    return bool(started) and process_start(pid) == started


def descendants(pid: int) -> set[int]:
    """Processes that come from this one, without it and without those that have ended."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found: set[int] = set()
    new = parents.get(pid, [])
    while new:
        found.update(new)
        new = [child for parent in new for child in parents.get(parent, []) if child not in found]
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_tree(pid: int) -> None:
    """Kill a process and all that come from it, none of which can start another one meanwhile."""
    held: set[int] = set()
    while new := ({pid} | descendants(pid)) - held:
        for each in new:
            send(each, signal.SIGSTOP)
        held |= new
    for each in held:
        send(each, signal.SIGKILL)


def write(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def read(path: Path) -> Any:
    """The JSON of a file; None if there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def main() -> int:
    """Run the part in the background, unless it has been run. Returns when that is on disk."""
    directory, name = Path(sys.argv[1]).absolute(), sys.argv[2]
    lock = os.open(directory / f"{name}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    if (directory / f"{name}.status").exists():
        return 0
    readable, writable = os.pipe()
    if os.fork():
        os.close(writable)
        return 0 if os.read(readable, 1) else 1
    os.close(readable)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    run(directory, name, writable)
    return 0


def run(directory: Path, name: str, ready: int) -> None:
    """Start the command of the part, and stay until all of its processes have ended."""
    part = read(directory / f"{name}.part")
    status = {
        "runner": os.getpid(),
        "runner_start": process_start(os.getpid()),
        "node": part["node"],
        "accelerators": part["accelerators"],
        "began": time.time(),
    }
    place = directory / f"{name}.status"
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    try:
        with open(part["log"] or os.devnull, "ab") as output:
            process = subprocess.Popen(
                part["command"],
                cwd=part["directory"],
                env={**os.environ, **part["environment"]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        ended = {"ended": time.time(), "code": NOT_STARTED, "reason": str(error)}
        write(place, {**status, **ended})
        os.write(ready, b"1")
        return
    status |= {"pid": process.pid, "start": process_start(process.pid)}
    write(place, status)
    os.write(ready, b"1")
    os.close(ready)
    code = watch(process.pid, directory / f"{name}.stop", woken)
    write(place, {**status, "ended": time.time(), "code": code, "reason": ""})


def watch(pid: int, stop: Path, woken: int) -> int:
    """Wait until all processes have ended, and pass on the request to stop.

    Returns:
        The exit code of the first one; 128 + N if signal N ended it.
    """
    code: int | None = None
    limit: float | None = None
    asked = False
    while True:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == pid:
                    number = os.waitstatus_to_exitcode(found[1])
                    code = number if number >= 0 else 128 - number
                    limit = min(limit or time.time() + LINGER, time.time() + LINGER)
        if code is not None and not descendants(os.getpid()):
            return code
        if (request := read(stop)) is not None:
            if not asked and time.time() < request["until"] and code is None:
                send(pid, signal.SIGUSR1)
            asked = True
            limit = request["until"] if limit is None else min(limit, request["until"])
        if limit is not None and time.time() >= limit:
            for each in descendants(os.getpid()) | ({pid} if code is None else set()):
                send(each, signal.SIGKILL)
        select.select([woken], [], [], TICK)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 1024)


if __name__ == "__main__":
    sys.exit(main())
