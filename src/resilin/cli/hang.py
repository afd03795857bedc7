"""Detection of hung workers: which worker blocks the job, and what it was doing.

Workers publish their state (`engine/pulse.py`), the system reports which of them are stopped or
traced, and `core/hang.py` decides. This module polls, collects stacks and reports.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilin.cli.errors import say
from resilin.core import hang
from resilin.core.hang import Hang, Phase, Seen, Sign
from resilin.core.lives import Life
from resilin.core.text import clean
from resilin.engine import environment, pulse
from resilin.engine.pulse import Shown

INTERVAL = 1.0
"""Seconds between two polls; a tenth of the timeout if that is shorter."""
ASKED = 3.0
"""Seconds that workers have to write their stacks."""
MOST_FRAMES = 12
"""Lines of a stack that are printed when the whole stack is in a file."""
MAX_LINES = 8
"""Largest number of workers that are listed, one line each."""


@dataclass(frozen=True, slots=True)
class Local:
    """A worker of this agent."""

    local_rank: int
    """Its number among the workers of this agent."""
    rank: int
    """Its number among all workers of the job."""
    pid: int
    """The process that the agent started; the training process may be a child of it."""


class Watchdog:
    """Polls the workers of an agent, and finds those that block the job.

    Args:
        directory: Directory in which workers publish their state; None if there is none.
        timeout: Seconds without progress within a step; infinite to disable the watchdog.
        clock: Source of time, in seconds.
    """

    def __init__(
        self,
        directory: Path | None,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._timeout = timeout
        self._clock = clock
        self._workers: Sequence[Local] = ()
        self._num_replicas = 0
        self._seen = Seen()
        self._looked = 0.0
        self._said_elsewhere = False

    def forget(self, local_rank: int | None = None) -> None:
        """Remove the published state of the previous workers before new ones start.

        Args:
            local_rank: The only worker that is started; None for all of them.
        """
        if self._directory is not None:
            for file in self._directory.iterdir():
                if local_rank is None or file.name.rpartition("-")[2] == str(local_rank):
                    file.unlink()

    def begin(self, workers: Sequence[Local], num_replicas: int) -> None:
        """Watch these workers from now on, out of `num_replicas` in the job."""
        self._workers, self._num_replicas = workers, num_replicas
        self._seen, self._looked, self._said_elsewhere = Seen(), self._clock(), False

    def life(self, seconds: float, workers: Sequence[Local] | None = None) -> Life:
        """Progress of the workers since they were started; called after they have ended.

        Args:
            seconds: How long they lived.
            workers: The workers; None for those that are watched.
        """
        those = self._workers if workers is None else workers
        shown = [shown for worker in those if (shown := self._read(worker)) is not None]
        shows = self._directory is not None and any(self._directory.iterdir())
        began = [each.began for each in shown if each.began is not None]
        if not began:
            return Life(seconds=seconds, shows=shows)
        ended = max(each.steps for each in shown)
        return Life(seconds=seconds, shows=True, began=max(began), ended=ended)

    def left(self) -> list[Local]:
        """Workers whose script ended in the middle of the training."""
        return [
            worker
            for worker in self._workers
            if (shown := self._read(worker)) is not None
            and shown.left
            and shown.phase is not Phase.DONE
        ]

    def ending(self) -> str:
        """How far a job came whose workers have ended well, in words."""
        return "finished" if self._directory is None else ending(self._directory)

    def is_exiting(self, worker: Local) -> bool:
        """Whether the script of this process has ended, in whatever way."""
        shown = self._read(worker)
        return shown is not None and shown.left and shown.pid == worker.pid

    def error(self, rank: int) -> str:
        """The error that a worker wrote before it failed; empty if it wrote none."""
        for worker in self._workers:
            if worker.rank == rank:
                return self.error_of(worker)
        return ""

    def error_of(self, worker: Local) -> str:
        """The error that a worker wrote, whether it is watched or not; empty if it wrote none."""
        if self._directory is not None:
            path = pulse.error_path(self._directory, worker.local_rank)
            with contextlib.suppress(OSError):
                return path.read_text(errors="replace")
        return ""

    def lost_a_peer(self, rank: int) -> bool:
        """Whether a worker failed because its connection to another one broke."""
        return self._directory is not None and any(
            pulse.lost_a_peer(self._directory, worker.local_rank)
            for worker in self._workers
            if worker.rank == rank
        )

    def look(self) -> tuple[Hang, list[Local]] | None:
        """Poll the workers, if it is time to.

        Returns:
            None while the job makes progress. If it is blocked: the hang, and the workers to kill;
            a report has been printed.
        """
        now = self._clock()
        if math.isinf(self._timeout) or now - self._looked < min(INTERVAL, self._timeout / 10):
            return None
        elapsed, self._looked = now - self._looked, now
        shown = {worker: self._read(worker) for worker in self._workers}
        signs = [_sign(worker, its) for worker, its in shown.items() if its is not None]
        # At most a part of the limit, or one long pause of this process could use it up.
        self._seen = hang.look(self._seen, signs, min(elapsed, self._timeout / 4))
        if len(signs) < len(self._workers):
            return None  # a worker has not started yet, or publishes nothing
        others_exist = self._num_replicas > len(self._workers)
        found = hang.find(self._seen, signs, self._timeout, others_exist=others_exist)
        if found is None:
            self._said_elsewhere = False
            return None
        guilty = [worker for worker in self._workers if worker.rank in found.guilty]
        if not guilty:
            if not self._said_elsewhere:
                self._said_elsewhere = True
                say(
                    f"no progress for {found.quiet:.0f} s: all workers here wait for a worker of "
                    "another agent, which has to handle it"
                )
            return None
        self._report(found, {worker: its for worker, its in shown.items() if its is not None})
        self._seen = Seen()  # reported once; a worker that survives is reported again after as long
        return found, guilty

    def kill(self, workers: Sequence[Local]) -> None:
        """Kill workers with SIGKILL, which also ends a worker that is stopped."""
        for worker in workers:
            shown = self._read(worker)
            for pid in {worker.pid, worker.pid if shown is None else shown.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # Reports -------------------------------------------------------------------------------

    def _report(self, found: Hang, shown: dict[Local, Shown]) -> None:
        say(
            f"no progress for {found.quiet:.0f} s (limit {found.limit:.0f} s, see --hang-timeout)"
            + ("" if found.told_apart else "; all workers here are at the same point")
        )
        for number, (worker, its) in enumerate(shown.items()):
            if number < MAX_LINES or worker.rank in found.guilty:
                say(f"worker {worker.rank} (process {its.pid}) {_state(worker, its)}")
        stacks = self._stacks(shown)
        path = _write_stacks(stacks)
        if path is not None:
            say(f"the stacks of all threads are in {path}")
        for worker, text in stacks.items():
            lines = _main_stack(text) if path is not None else text.splitlines()
            for line in [f"worker {worker.rank}:", *lines]:
                print(f"resilin:   {clean(line)}", file=sys.stderr, flush=True)

    def _stacks(self, shown: dict[Local, Shown]) -> dict[Local, str]:
        """Ask the workers for their stacks; returns those written within `ASKED` seconds."""
        if self._directory is None or pulse.STACKS is None:
            return {}
        asked = {}
        for worker, its in shown.items():
            if its.has_stacks and not _is_stopped(its.pid):
                asked[worker] = pulse.stacks_path(self._directory, worker.local_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(its.pid, pulse.STACKS)
        # Real seconds, whichever clock the watchdog uses: the workers need them to write.
        deadline = time.monotonic() + ASKED
        sizes: dict[Local, int] = {}
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, sizes = sizes, {worker: path.stat().st_size for worker, path in asked.items()}
            if sizes == before and all(sizes.values()):
                break
        return {worker: path.read_text(errors="replace") for worker, path in asked.items()}

    def _read(self, worker: Local) -> Shown | None:
        return None if self._directory is None else pulse.read(self._directory, worker.local_rank)


def furthest(directory: Path) -> Shown | None:
    """The published state of the worker that has come furthest; None if none has trained."""
    names = [each.name for each in directory.iterdir()] if directory.is_dir() else []
    shown = [pulse.read(directory, int(name)) for name in names if name.isdecimal()]
    trained = [each for each in shown if each is not None and each.began is not None]
    return max(trained, key=lambda each: (each.steps, each.epoch, each.saved), default=None)


def left_early(directory: Path) -> Shown | None:
    """The same if the loop over epochs was left before they were over; else None."""
    shown = furthest(directory)
    early = shown is not None and shown.epochs is not None and shown.epoch < shown.epochs
    return shown if early else None


def ending(directory: Path) -> str:
    """How far a job came whose workers have ended well, in words."""
    if (shown := furthest(directory)) is None:
        return "finished"
    if left_early(directory) is not None:
        where = f"in epoch {shown.epoch + 1} of {shown.epochs}, before its epochs were over"
        return f"ended at step {shown.steps}, {where}"
    known = shown.epochs is not None or shown.phase is Phase.DONE
    return "finished" if known else f"ended at step {shown.steps}"


def _sign(worker: Local, shown: Shown) -> Sign:
    return Sign(
        rank=worker.rank,
        beats=shown.beats,
        begun=shown.begun,
        phase=shown.phase,
        alive=shown.alive,
        evaluating=shown.evaluating,
        stopped=_is_stopped(shown.pid),
        debugged=shown.debugged or is_traced(shown.pid),
    )


def _state(worker: Local, shown: Shown) -> str:
    if _is_stopped(shown.pid):
        return f"is stopped (SIGSTOP), after step {shown.steps}"
    if shown.left:
        return f"has reached the end of its script, after step {shown.steps}"
    where = {
        Phase.START: "has not started training",
        Phase.BETWEEN: f"is between two steps, after step {shown.steps}",
        Phase.STEP: f"has not finished its part of step {shown.steps + 1}",
        Phase.WAITING: f"waits for the others in step {shown.steps + 1}",
        Phase.AFTER: f"has not finished the loop body of step {shown.steps}",
        Phase.DONE: "has finished training",
    }[shown.phase]
    return where + (", its model in evaluation mode" if shown.evaluating else "")


def _status(pid: int, field: str) -> str:
    """A field of `/proc/PID/status`; empty if it is not available."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""


def _is_stopped(pid: int) -> bool:
    return _status(pid, "State").startswith("T")


def is_traced(pid: int) -> bool:
    """Whether a debugger is attached to a process."""
    return _status(pid, "State").startswith("t") or _status(pid, "TracerPid") not in {"", "0"}


def _write_stacks(stacks: dict[Local, str]) -> Path | None:
    """Write the stacks to the run directory; returns the file, or None without a run directory."""
    directory = os.environ.get(environment.RUN_DIR, environment.OFF)
    if directory == environment.OFF or not stacks:
        return None
    path = Path(directory) / f"stacks-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(f"worker {worker.rank}\n{text}" for worker, text in stacks.items()),
        errors="replace",
    )
    return path


def _main_stack(text: str) -> list[str]:
    """The stack of the main thread: the one that received the signal, or the last one."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip()]
    current = [block for block in blocks if block[0].startswith("Current thread")]
    return (current or blocks[-1:] or [[]])[0][1 : 1 + MOST_FRAMES]
