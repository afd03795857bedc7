"""Processes of a live job's workers: started cold or warm, signalled, and reaped.

Each worker leads a process group of its own: Ctrl-C reaches the launcher alone, and what a worker
has started ends with it. All functions are for the main thread of the launcher.

Workers end with their launcher, however that ends (on Linux): they would train on without
supervision, or wait for ever if they are stopped. So the kernel kills them. It does that for a
process whose parent has died, and for one whose pipe was closed at the other end, if the process
has asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from resilin.cli import warm
from resilin.cli.live.verdict import Verdict
from resilin.engine import environment
from resilin.engine.copies import Place

CREDENTIALS = ("ETCDCTL_", "RESILIN_ETCD_", "RESILIN_SECRET_FILE")
"""Beginnings of the names of variables with which a launcher reaches etcd: no worker needs them."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "LOCAL_")
"""Beginnings of the variables of torchrun. A job that is started by a worker of another one must
not take the numbers of that one for its own."""
_PR_SET_PDEATHSIG = 1
# Loaded before any fork: the child of a process with threads must not load libraries.
_prctl: Callable[..., Any] | None = (
    ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
)


class _Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


class _Forked:
    """A process of the fork server, which reaps it and says its exit code."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.sentinel: int | None = process.sentinel
        self._process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None and (code := self._process.exitcode) is not None:
            self._code, self.sentinel = code, None
            self._process.close()  # with its descriptors: a long job replaces many workers
        return self._code


@dataclass(eq=False)
class Worker:
    """One process of the job."""

    number: int
    """Its number, which no other one ever has."""
    name: str
    """Its name as a member."""
    slot: int
    """Its local rank: which of the machine's devices it uses. Its replacement has the same."""
    process: _Process
    """The process."""
    place: Place | None = None
    """The part that it has of a copy of the model; None if it has all of it."""
    started: float = field(default_factory=time.monotonic)
    """When it was started, on the monotonic clock."""
    beats: int = 0
    """Signs of life so far."""
    silent: float = 0.0
    """Seconds since the last of them; 0 before the first."""
    finished: bool = False
    """Whether it has said that its training is over."""
    dismissed: bool = False
    """Whether it was ended because the training that it waited to join is over."""
    follows: bool = False
    """Whether it was ended because another worker, with a part of the same copy, was lost."""
    froze: bool = False
    """Whether it was killed because it gave no sign of life."""
    gone: float | None = None
    """When it was seen to have exited; None while it runs."""
    verdict: Verdict | None = None
    """Meaning of its exit; None before that is known."""
    settled: bool = False
    """Whether all was done about its exit: it was replaced, given up, or reported."""

    @property
    def member(self) -> str:
        """Name of the member that it is, or that it is a part of."""
        return self.name if self.place is None else self.place.member

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def sentinel(self) -> int | None:
        """A descriptor that becomes readable when it exits; None if SIGCHLD says so."""
        if self.gone is not None or not isinstance(self.process, _Forked):
            return None
        return self.process.sentinel

    @property
    def lifetime(self) -> float:
        """Seconds from its start until it was gone, or until now."""
        return (time.monotonic() if self.gone is None else self.gone) - self.started

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and everything that it has started; also if it is stopped, or gone already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.poll() is None:  # just forked: it may lead no group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Starter:
    """Starts the workers of one launcher.

    Args:
        prefix: Beginning of the names of workers.
        num_slots: Number of workers on this machine.
        command: The command of a cold worker.
        script: The script of a warm worker with its arguments; None starts cold ones.
        settings: Variables that all workers get.
        processes_per_copy: Workers over which each copy of the model is sharded.
    """

    def __init__(
        self,
        prefix: str,
        num_slots: int,
        command: Sequence[str],
        script: Sequence[str] | None,
        settings: Mapping[str, str],
        processes_per_copy: int = 1,
    ) -> None:
        self.processes_per_copy = processes_per_copy
        """Workers over which each copy of the model is sharded."""
        self._member = ""
        self._prefix = prefix
        self._num_slots = num_slots
        self._command = command
        self._script = script
        self._settings = settings
        self._next = 0
        if script is not None:
            warm.start_server()

    def start(self, slot: int, socket: str) -> Worker:
        """Start a worker. Those of a copy of the model are started in the order of their slots.

        Args:
            slot: Its local rank.
            socket: Path of the launcher's socket.
        """
        number, self._next = self._next, self._next + 1
        name = f"{self._prefix}-{number}"
        kept_back = (*TORCHRUN, *CREDENTIALS, environment.COPY)
        env = {name: value for name, value in os.environ.items() if not name.startswith(kept_back)}
        env |= {
            **self._settings,
            environment.LIVE: socket,
            environment.MEMBER: name,
            environment.AGENT: str(os.getpid()),
            "LOCAL_RANK": str(slot),
            "LOCAL_WORLD_SIZE": str(self._num_slots),
        }
        part = slot % self.processes_per_copy
        self._member = self._member if part else name
        place = Place(self._member, part, self.processes_per_copy)
        if place.size > 1:
            env[environment.COPY] = place.to_environment()
        process = self._cold(env) if self._script is None else self._warm(env, self._script)
        return Worker(number, name, slot, process, place)

    def _cold(self, env: Mapping[str, str]) -> _Process:
        return subprocess.Popen(
            self._command, env=env, start_new_session=True, preexec_fn=tied_to(os.getpid())
        )

    def _warm(self, env: dict[str, str], script: Sequence[str]) -> _Process:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=run_warm, args=(env, *script))
        process.start()
        return _Forked(process)


def run_warm(env: Mapping[str, str], script: str, *arguments: str) -> None:
    """Run the script in this process, which the fork server has just forked."""
    tie_forked()
    os.environ.clear()  # those of the fork server are of its own start
    os.environ.update(env)
    warm.run_script(script, *arguments)


# The end of the launcher -----------------------------------------------------------------------


def tied_to(parent: int) -> Callable[[], None]:
    """A function for a child between fork and exec: it is killed when this parent dies.

    To the kernel, the parent is the thread that started the child: it must be one that stays.
    """

    def tie() -> None:
        if _prctl is None:
            return
        if _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def tie_forked() -> None:
    """Tie this process, forked by a fork server, and its children to the process that asked for it.

    Its parent is the fork server, which lives for as long as any worker does. But it has a pipe
    from the process that asked, and the death of that one is an event on it.
    """
    os.setsid()
    if sys.platform != "linux":
        return
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    fcntl.fcntl(launcher.sentinel, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(launcher.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(launcher.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not launcher.is_alive():  # it went before the kernel was asked
        os.killpg(0, signal.SIGKILL)
