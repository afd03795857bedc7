"""State that a worker publishes for its agent, in a small file in memory.

A worker that waits for another one, hangs in its own code, or was stopped, cannot report it. So
each worker records its phase as it runs, which costs a few microseconds, and the agent reads all of
these files. The file outlives the worker, and shows afterwards how far it got.

Only the worker itself can write its stacks. The agent asks for them with a signal, which works
while the main thread waits in native code, but not while the process is stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from resilin.compat.python_names import frame_of_main_thread
from resilin.core.hang import Phase
from resilin.core.text import clean
from resilin.engine import environment
from resilin.engine.lost import lost_connection

logger = logging.getLogger("resilin")

STACKS: int | None = getattr(signal, "SIGRTMIN", None)
"""Signal that asks a worker for its stacks; None if the system has no spare one. Signals with names
(SIGUSR2) belong to scripts and schedulers."""
INTERVAL = 1.0
"""Seconds between two signs of life."""
_RECORD = struct.Struct("<8s10q")
_MAGIC = b"pulse 2\n"
_SIZE = 4096
_EVALUATING, _DEBUGGED, _HAS_STACKS, _LEFT, _SAVED = 1, 2, 4, 8, 16
_DEBUGGERS = ("pdb.py", "bdb.py", "ipdb.py", "pudb.py")
_LONGEST_ERROR = 300


class Pulse:
    """Published state of a worker; this class publishes nothing, for processes without an agent."""

    shown: bool = False
    """Whether the state is published."""

    def start(self, steps: int) -> None:
        """The job has started, after this many committed steps."""

    def begin_step(self) -> None:
        """A step begins."""

    def beat(self, phase: Phase, steps: int) -> None:
        """The worker is in this phase, with this many committed steps."""

    def follow(self, evaluating: Callable[[], bool]) -> None:
        """Call this function periodically to learn whether the worker evaluates."""

    def epochs(self, done: int, total: int) -> None:
        """So many epochs of the loop over epochs are over."""

    def saved(self) -> None:
        """The last state of a loop that was left is on storage."""

    def missed(self) -> bool:
        """Whether another worker of this agent waits for this one in a step."""
        return False

    def reset(self) -> None:
        """The job was given up; another one may follow in this process."""

    def close(self) -> None:
        """Stop publishing."""


class FilePulse(Pulse):
    """Publishes the state in files of a directory that the agent has created.

    Args:
        directory: The directory.
        local_rank: Number of this worker among those of the agent, which names the files.
    """

    shown = True

    def __init__(self, directory: Path, local_rank: int) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._beats = self._begun = self._steps = self._alive = self._flags = 0
        self._began = self._epochs = -1
        self._epoch = 0
        self._directory, self._local_rank = directory, local_rank
        self._phase = Phase.START
        self._evaluating: Callable[[], bool] | None = None
        self._closed = threading.Event()
        descriptor = os.open(directory / f"{local_rank}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Written, not only truncated to this size: if memory is full, this fails here, where
            # touching the map would kill the process.
            os.write(descriptor, bytes(_SIZE))
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        if STACKS is not None:
            # Kept open for the life of the process, for the signal handler.
            self._stacks = open(stacks_path(directory, local_rank), "w")  # noqa: SIM115
            faulthandler.register(STACKS, self._stacks, all_threads=True)
            self._flags |= _HAS_STACKS
        self._write()
        self._tell_errors(directory, local_rank)
        atexit.register(self._leave, os.getpid())
        self._thread = threading.Thread(target=self._live, name="resilin-pulse", daemon=True)
        self._thread.start()

    def start(self, steps: int) -> None:
        """The job has started, after this many committed steps."""
        with self._lock:
            self._began = self._steps = steps
            self._write()

    def begin_step(self) -> None:
        """A step begins."""
        self._begun += 1
        self.beat(Phase.STEP, self._steps)

    def beat(self, phase: Phase, steps: int) -> None:
        """The worker is in this phase, with this many committed steps."""
        with self._lock:
            self._beats += 1
            self._phase, self._steps = phase, steps
            self._write()

    def epochs(self, done: int, total: int) -> None:
        """So many epochs of the loop over epochs are over."""
        with self._lock:
            self._epoch, self._epochs = done, total
            self._write()

    def saved(self) -> None:
        """The last state of a loop that was left is on storage."""
        with self._lock:
            self._flags |= _SAVED
            self._write()

    def missed(self) -> bool:
        """Whether another worker of this agent waits for this one in a step."""
        ranks = {int(each.name) for each in self._directory.iterdir() if each.name.isdecimal()}
        others = [read(self._directory, rank) for rank in ranks - {self._local_rank}]
        return any(
            each is not None and each.phase is Phase.WAITING and each.steps >= self._steps
            for each in others
        )

    def follow(self, evaluating: Callable[[], bool]) -> None:
        """Call this function periodically to learn whether the worker evaluates."""
        self._evaluating = evaluating

    def reset(self) -> None:
        """The job was given up: until the next one starts, the process may take any time."""
        with self._lock:
            self._evaluating = None
            self._began, self._steps, self._phase = -1, 0, Phase.START
            self._epoch, self._epochs = 0, -1
            self._beats += 1
            self._write()

    def close(self) -> None:
        """End the thread; the last published state stays."""
        self._closed.set()
        self._thread.join()

    def _write(self) -> None:
        fields = (self._pid, self._beats, self._begun, self._steps, self._began)
        more = (int(self._phase), self._alive, self._flags, self._epoch, self._epochs)
        _RECORD.pack_into(self._map, 0, _MAGIC, *fields, *more)

    def _live(self) -> None:
        beats, quiet = 0, 0.0
        while not self._closed.wait(INTERVAL):
            quiet = quiet + INTERVAL if beats == self._beats else 0.0
            beats = self._beats
            flags = 0
            evaluating = self._evaluating
            if evaluating is not None and evaluating():
                flags |= _EVALUATING
            if quiet and _is_debugged():
                flags |= _DEBUGGED
            with self._lock:
                self._alive += 1
                self._flags = flags | self._flags & (_HAS_STACKS | _LEFT | _SAVED)
                self._write()

    def _leave(self, pid: int) -> None:
        """The script has ended or failed, and the process will exit soon."""
        if os.getpid() == pid:
            with self._lock:
                self._flags |= _LEFT
                self._write()

    def _tell_errors(self, directory: Path, local_rank: int) -> None:
        """Record the error that this process fails with, for the report of the agent."""
        usual, pid = sys.excepthook, os.getpid()

        def hook(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            if os.getpid() == pid:
                _write_error(directory, local_rank, error)
            usual(kind, error, traceback)

        sys.excepthook = hook


def _write_error(directory: Path, local_rank: int, error: BaseException) -> None:
    # The directory is gone if the agent is.
    with contextlib.suppress(OSError):
        path = error_path(directory, local_rank)
        path.write_text(clean(f"{type(error).__name__}: {error}", _LONGEST_ERROR), errors="replace")
        if lost_connection(error) is not None:
            _lost_path(path).touch()


def tell_error(error: BaseException) -> bool:
    """Record the error that this process fails with, for the report of the agent.

    Returns:
        Whether there is an agent that reads it.
    """
    directory = _directory()
    if directory is not None:
        _write_error(directory, _local_rank(), error)
    return directory is not None


def _is_debugged() -> bool:
    """Whether the main thread is, or may be, in a Python debugger."""
    if "pydevd" in sys.modules or "debugpy" in sys.modules:
        return True
    frame = frame_of_main_thread()
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


_published: dict[tuple[Path, int, int], FilePulse] = {}
"""The pulse of this process by directory, local rank and process id. The jobs of one process share
it: two threads would overwrite each other's state in the file."""


def of_this_process() -> Pulse:
    """The pulse of this worker; one that publishes nothing, if there is no agent."""
    directory = _directory()
    if directory is None:
        return Pulse()
    key = (directory, _local_rank(), os.getpid())
    if key not in _published:
        try:
            _published[key] = FilePulse(directory, key[1])
        except OSError as error:
            logger.warning("the agent cannot see the state of this worker: %s", error)
            return Pulse()
    return _published[key]


def announce() -> None:
    """Publish that this worker uses resilin, and will publish its state once it trains."""
    directory = _directory()
    if directory is not None:
        # If memory is full, this worker counts as one that publishes nothing.
        with contextlib.suppress(OSError):
            (directory / f"here-{_local_rank()}").touch()


def _directory() -> Path | None:
    # The directory is gone if the agent is.
    directory = Path(os.environ.get(environment.PULSE_DIR) or os.devnull)
    return directory if directory.is_dir() else None


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


# For the agent ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The last published state of a worker."""

    pid: int
    """Its process id."""
    beats: int
    """Count of its events so far."""
    begun: int
    """Steps that it has begun in this life."""
    steps: int
    """Steps that are committed, over all lives."""
    began: int | None
    """Committed steps when this life started; None if it has not started training."""
    phase: Phase
    """Its phase."""
    alive: int
    """Signs of life."""
    evaluating: bool
    """Whether its model is not in training mode."""
    debugged: bool
    """Whether a Python debugger is active in it."""
    left: bool
    """Whether its script has ended, in whatever way."""
    has_stacks: bool
    """Whether it can be asked for its stacks. The signal would end a process that cannot."""
    saved: bool
    """Whether the last state of a loop that it has left is on storage."""
    epoch: int
    """Epochs of its loop that are over."""
    epochs: int | None
    """Epochs of the whole loop; None if that is not known."""


def read(directory: Path, local_rank: int) -> Shown | None:
    """The last published state of a worker; None if there is none yet."""
    try:
        with open(directory / f"{local_rank}", "rb") as file:
            data = file.read(_RECORD.size)
        magic, *fields, epoch, epochs = _RECORD.unpack(data)
        pid, beats, begun, steps, began, phase, alive, flags = fields
        known = Phase(phase)
    except (OSError, struct.error, ValueError):
        return None
    if magic != _MAGIC:
        return None
    return Shown(
        pid=pid,
        beats=beats,
        begun=begun,
        steps=steps,
        began=None if began < 0 else began,
        phase=known,
        alive=alive,
        evaluating=bool(flags & _EVALUATING),
        debugged=bool(flags & _DEBUGGED),
        left=bool(flags & _LEFT),
        has_stacks=bool(flags & _HAS_STACKS),
        saved=bool(flags & _SAVED),
        epoch=epoch,
        epochs=None if epochs < 0 else epochs,
    )


def stacks_path(directory: Path, local_rank: int) -> Path:
    """File in which a worker writes its stacks on request."""
    return directory / f"stacks-{local_rank}"


def error_path(directory: Path, local_rank: int) -> Path:
    """File in which a worker writes the error that it fails with."""
    return directory / f"error-{local_rank}"


def lost_a_peer(directory: Path, local_rank: int) -> bool:
    """Whether a worker failed because its connection to another one broke: the cause is there."""
    return _lost_path(error_path(directory, local_rank)).exists()


def _lost_path(error: Path) -> Path:
    return error.with_name(error.name.replace("error", "lost"))
