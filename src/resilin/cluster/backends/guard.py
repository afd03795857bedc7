"""A process that runs the command of a part, and leaves nothing of it behind.

    python -m resilin.cluster.backends.guard

It reads one JSON object per line from its standard input: first `command`, `environment`,
`directory` and `log`, then any number of `{"grace": seconds}`, each a request to stop. It writes
`{"pid": ...}` when the command runs, and `{"code": ...}` when no process of it is left; or
`{"code": 127, "error": ...}` if it could not be started. When its input ends, whoever asked for the
part is gone: then all processes of the part are killed at once, or they would train beside those
that replace them.

It makes itself independent of its parent, and adopts every orphan among its descendants: workers
of `resilin run` have sessions of their own, and a signal to one process group does not reach them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""Setting of Linux: orphans among the descendants become children of this process."""
CANNOT_START = 127
"""Exit code of a command that could not be started, as in a shell."""
TICK = 0.1
"""Longest time between two looks at the command, in seconds."""


class Requests:
    """Lines of JSON that arrive on a file descriptor."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._rest = b""
        self._lines: list[Mapping[str, Any]] = []
        self.ended = False
        """Whether there will be no more of them."""

    def next(self, seconds: float) -> Mapping[str, Any] | None:
        """The next request; None if there is none within this time."""
        if not self._lines and self.ended:
            time.sleep(seconds)
        elif not self._lines and select.select([self._source], [], [], seconds)[0]:
            data = os.read(self._source, 65536)
            self.ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines += [json.loads(line) for line in lines]
        return self._lines.pop(0) if self._lines else None


class Command:
    """The command of a part, and all processes that it starts.

    Args:
        order: Its `command`, `environment`, `directory` and `log`.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        log_file = Path(order["log"] or os.devnull)
        # The directory of the controller need not be on this machine.
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                order["command"],
                env={**os.environ, **order["environment"]},
                cwd=order["directory"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        """Its process."""

    def code(self) -> int | None:
        """Its exit code, 128 + N if signal N ended it; None while it runs."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(found[1])
        code = self._process.returncode
        return 128 - code if code is not None and code < 0 else code

    def ask(self) -> None:
        """Ask it to save and leave."""
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> int:
        """Kill all that is left of it.

        Returns:
            Its exit code.
        """
        while True:
            code = self.code()
            family = descendants(os.getpid())
            if code is not None and not family:
                return code
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def descendants(root: int) -> list[int]:
    """Children of a process, and theirs; those that have ended are left out."""
    children: dict[int, list[int]] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # The name of the program is in parentheses, and may contain anything.
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry.name))
            if state in "ZX":
                ended.add(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:  # which grows meanwhile
        found += children.get(pid, [])
    return [pid for pid in found if pid not in ended]


def watch(command: Command, requests: Requests) -> int:
    """Wait for the end of a command, and end it when asked to; kill what it leaves behind.

    Returns:
        Its exit code.
    """
    deadline: float | None = None
    while command.code() is None:
        if (request := requests.next(TICK)) is not None:
            if deadline is None and request["grace"] > 0 and command.code() is None:
                command.ask()
            end = time.monotonic() + request["grace"]
            deadline = end if deadline is None else min(deadline, end)
        if requests.ended or (deadline is not None and time.monotonic() >= deadline):
            break
    return command.kill()


def main() -> int:
    """Run one command until it has ended, and no process of it is left."""
    # Its parent may kill its own children; from here on this process is not one of them.
    if os.fork():
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The command must not inherit that a thread of somebody else blocks or ignores a signal.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    requests = Requests(sys.stdin.fileno())
    while (order := requests.next(TICK)) is None:
        if requests.ended:
            return 1
    try:
        command = Command(order)
    except OSError as error:
        _say(code=CANNOT_START, error=str(error))
        return 1
    _say(pid=command.pid)
    _say(code=watch(command, requests))
    return 0


def _say(**facts: object) -> None:
    # Whoever asked may be gone; the processes are ended all the same.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
