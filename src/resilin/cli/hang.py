"""The watch over the workers of one agent: who holds up the job, and what it was doing.

The workers show what they do (`engine/pulse.py`), the system says which of them are stopped or
traced, and `core/hang.py` decides. This is what is around that: looking, asking for stacks, saying.
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
"""Seconds between two looks, or a tenth of the timeout."""
ASKED = 3.0
"""Seconds that workers have to write their stacks down."""
MOST_FRAMES = 12
"""Lines of a stack that are printed where all of them are in a file."""
MAX_LINES = 8
"""Locals that get a line each."""


@dataclass(frozen=True, slots=True)
class Local:
    """A worker of this agent."""

    local_rank: int
    """Which of the agent's."""
    rank: int
    """Which of the job's."""
    pid: int
    """The process that the agent has started; what trains may be a child of it."""


class Watchdog:
    """Looks at the workers of an agent, and finds those that hold up the job.

    Args:
        directory: Where they show what they do; None where there is no such place.
        timeout: Seconds without progress, within a step; infinite for no watch.
        clock: Tells seconds.
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

    def forget(self) -> None:
        """Removes what the workers before have shown: new ones are started."""
        if self._directory is not None:
            for file in self._directory.iterdir():
                file.unlink()

    def begin(self, workers: Sequence[Local], num_replicas: int) -> None:
        """Watches these workers from now on, of so many in the job."""
        self._workers, self._num_replicas = workers, num_replicas
        self._seen, self._looked, self._said_elsewhere = Seen(), self._clock(), False

    def life(self, seconds: float) -> Life:
        """What the workers have made of their life, which has ended."""
        shown = [shown for worker in self._workers if (shown := self._read(worker)) is not None]
        shows = self._directory is not None and any(self._directory.iterdir())
        began = [each.began for each in shown if each.began is not None]
        if not began:
            return Life(seconds=seconds, shows=shows)
        ended = max(each.steps for each in shown)
        return Life(seconds=seconds, shows=True, began=max(began), ended=ended)

    def left(self) -> list[Local]:
        """Locals whose script has come to an end in the middle of the training."""
        return [
            worker
            for worker in self._workers
            if (shown := self._read(worker)) is not None
            and shown.left
            and shown.phase is not Phase.DONE
        ]

    def error(self, rank: int) -> str:
        """What a worker failed with, in its own words; empty if it left none."""
        if self._directory is None:
            return ""
        for worker in self._workers:
            if worker.rank == rank:
                path = pulse.error_path(self._directory, worker.local_rank)
                with contextlib.suppress(OSError):
                    return path.read_text(errors="replace")
        return ""

    def look(self) -> tuple[Hang, list[Local]] | None:
        """Looks at the workers, if it is time to.

        Returns:
            None while all is well. If the job is held up: how, and the workers to be ended. What is
            known of it has been said.
        """
        now = self._clock()
        if math.isinf(self._timeout) or now - self._looked < min(INTERVAL, self._timeout / 10):
            return None
        elapsed, self._looked = now - self._looked, now
        shown = {worker: self._read(worker) for worker in self._workers}
        signs = [_sign(worker, its) for worker, its in shown.items() if its is not None]
        # A part of the limit at most, or one long pause of this very process could use it up.
        self._seen = hang.look(self._seen, signs, min(elapsed, self._timeout / 4))
        if len(signs) < len(self._workers):
            return None  # somebody has not begun yet, or shows nothing
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
                    f"no progress for {found.quiet:.0f} s: all workers here wait for a replica of "
                    "another agent, which has to deal with it"
                )
            return None
        self._report(found, {worker: its for worker, its in shown.items() if its is not None})
        self._seen = Seen()  # said once; one that cannot be ended is named again, after as long
        return found, guilty

    def kill(self, workers: Sequence[Local]) -> None:
        """Ends workers that would not end by themselves; SIGKILL ends one that is stopped, too."""
        for worker in workers:
            shown = self._read(worker)
            for pid in {worker.pid, worker.pid if shown is None else shown.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # Saying --------------------------------------------------------------------------------

    def _report(self, found: Hang, shown: dict[Local, Shown]) -> None:
        say(
            f"no progress for {found.quiet:.0f} s (limit {found.limit:.0f} s, see --hang-timeout)"
            + ("" if found.told_apart else "; all workers here are at the same place")
        )
        for number, (worker, its) in enumerate(shown.items()):
            if number < MAX_LINES or worker.rank in found.guilty:
                say(f"rank {worker.rank} (process {its.pid}) {_state(worker, its)}")
        stacks = self._stacks(shown)
        path = _write_stacks(stacks)
        if path is not None:
            say(f"the stacks of all threads are in {path}")
        for worker, text in stacks.items():
            lines = _main_stack(text) if path is not None else text.splitlines()
            for line in [f"rank {worker.rank}:", *lines]:
                print(f"resilin:   {clean(line)}", file=sys.stderr, flush=True)

    def _stacks(self, shown: dict[Local, Shown]) -> dict[Local, str]:
        """Asks the workers for their stacks; what came within a moment."""
        if self._directory is None or pulse.STACKS is None:
            return {}
        asked = {}
        for worker, its in shown.items():
            if its.has_stacks and not _is_stopped(its.pid):
                asked[worker] = pulse.stacks_path(self._directory, worker.local_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(its.pid, pulse.STACKS)
        # Real seconds, whichever clock the watch goes by: the workers need them to write.
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


def _sign(worker: Local, shown: Shown) -> Sign:
    return Sign(
        rank=worker.rank,
        beats=shown.beats,
        begun=shown.begun,
        phase=shown.phase,
        alive=shown.alive,
        evaluating=shown.evaluating,
        stopped=_is_stopped(shown.pid),
        debugged=shown.debugged or _is_traced(shown.pid),
    )


def _state(worker: Local, shown: Shown) -> str:
    if _is_stopped(shown.pid):
        return f"is stopped (SIGSTOP), after step {shown.steps}"
    if shown.left:
        return f"has come to the end of its script, after step {shown.steps}"
    where = {
        Phase.START: "has not begun to train",
        Phase.BETWEEN: f"is between two steps, after step {shown.steps}",
        Phase.STEP: f"has not come to the end of its part of step {shown.steps + 1}",
        Phase.WAITING: f"waits for the others in step {shown.steps + 1}",
        Phase.AFTER: f"has not come to the end of the loop body of step {shown.steps}",
        Phase.DONE: "is done with the training",
    }[shown.phase]
    return where + (", its model in evaluation mode" if shown.evaluating else "")


def _status(pid: int, field: str) -> str:
    """What the system says of a process; empty where it says nothing."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""


def _is_stopped(pid: int) -> bool:
    return _status(pid, "State").startswith("T")


def _is_traced(pid: int) -> bool:
    return _status(pid, "State").startswith("t") or _status(pid, "TracerPid") not in {"", "0"}


def _write_stacks(stacks: dict[Local, str]) -> Path | None:
    """Writes them to the directory of the run; None if there is none."""
    directory = os.environ.get(environment.RUN_DIR, environment.OFF)
    if directory == environment.OFF or not stacks:
        return None
    path = Path(directory) / f"stacks-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(f"rank {worker.rank}\n{text}" for worker, text in stacks.items()),
        errors="replace",
    )
    return path


def _main_stack(text: str) -> list[str]:
    """The stack of the main thread: the one that took the signal, or the last one."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip()]
    current = [block for block in blocks if block[0].startswith("Current thread")]
    return (current or blocks[-1:] or [[]])[0][1 : 1 + MOST_FRAMES]
