"""Live jobs that are disturbed, and the faults that have happened to them: see `chaos_live`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_live_figures import Line, footprint_of

HERE = Path(__file__).parent
HEARTBEAT = 3.0
"""Seconds after which a worker that is stopped is killed."""
LIMIT = 60.0
"""Seconds that a job may take to resume: what takes longer counts as hung."""
START = 240.0
"""Seconds that it takes new processes to start and build, at most."""
LOOK = 0.01
"""Seconds between two looks at the diaries."""


class Hung(Exception):
    """The job does not do what it should for too long."""


@dataclass
class Fault:
    """One that has happened."""

    kind: str
    time: float
    notice: float
    """Seconds that it takes to be noticed."""
    survivors: list[int]
    generation: int = -1
    """The one that it ended, if it is known."""
    seconds: float = 0.0
    """From the fault to the first step afterwards of the last survivor."""
    cut_off: frozenset[int] = frozenset()
    """Processes that can do nothing but wait until it is over."""


@dataclass
class Job:
    """One job: its launchers, and what its processes have written."""

    folder: Path
    launchers: list[subprocess.Popen[bytes]]
    lines: list[Line] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    """Processes that faults have hit."""
    sizes: list[dict[str, int]] = field(default_factory=list)
    """Footprints of launchers after each fault."""
    _newest: dict[int, Line] = field(default_factory=dict)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[Line]:
        """Takes in what the diaries say since the last time, and returns it."""
        new: list[Line] = []
        for path in sorted((self.folder / "diaries").iterdir()):
            read = self._read.get(path, 0)
            if path.stat().st_size == read:
                continue
            with path.open("rb") as file:
                file.seek(read)
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = read + len(whole) + bool(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        self.lines += new
        self._newest |= {line["pid"]: line for line in new if line["event"] == "done"}
        return new

    def until(self, holds: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
        """Waits until something can be said of the diaries."""
        deadline = time.time() + limit
        while time.time() < deadline:
            self.read()
            if found := holds():
                return found
            for launcher in self.launchers:
                if launcher.poll() is not None:
                    raise Hung(f"a launcher ended with {launcher.returncode}: no {what}")
            time.sleep(LOOK)
        raise Hung(f"no {what} within {limit:g} s")

    def members(self) -> dict[int, Line]:
        """The newest step of each process that trains, by process."""
        newest = {pid: line for pid, line in self._newest.items() if pid not in self.gone}
        generation = max((line["generation"] for line in newest.values()), default=-1)
        return {pid: line for pid, line in newest.items() if line["generation"] == generation}

    def complete(self) -> bool:
        """Whether all members of the newest generation have made a step in it."""
        members = self.members()
        return bool(members) and len(members) == max(m["replicas"] for m in members.values())

    def hit(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process that does not survive it."""
        self.gone.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def await_recovery(self, fault: Fault) -> None:
        """Waits until all survivors have made a step, and all members of their generation."""
        first: dict[int, float] = {}
        looked = 0

        def resumed() -> bool:
            nonlocal looked
            new, looked = self.lines[looked:], len(self.lines)
            for line in new:
                newer = line["event"] in {"done", "end"} and line["generation"] > fault.generation
                if newer and line["time"] > fault.time:
                    first.setdefault(line["pid"], line["time"])
            return all(pid in first for pid in fault.survivors)

        if fault.survivors:
            self.until(resumed, f"step of all after {fault}")
            fault.seconds = max(first[pid] for pid in fault.survivors) - fault.time
        self.until(self.complete, "complete generation")
        for launcher in self.launchers:
            if launcher.poll() is None:
                self.sizes.append({"pid": launcher.pid, **footprint_of(launcher.pid)})

    def finish(self) -> None:
        """Has it end two epochs later, and waits for that."""
        self.read()
        epoch = 2 + max(line.get("epoch", 0) for line in self.lines)
        (self.folder / "last_epoch").write_text(str(epoch))
        for launcher in self.launchers:
            launcher.wait(timeout=120)
        self.read()

    def end(self) -> None:
        """Ends all processes that are left."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for pid in {line["pid"] for line in self.lines}:
            with contextlib.suppress(OSError):
                if b"chaos_live_job" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        """The output of the launchers and their workers."""
        logs = sorted(self.folder.glob("launcher*.log"))
        return "\n".join(path.read_text(errors="replace") for path in logs)


def launch(
    folder: Path, name: str, num_workers: int, *options: str, prefix: list[str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a launcher.

    Args:
        folder: That of the job.
        name: Name of its log.
        num_workers: Number of its workers.
        options: More options of `resilin run`.
        prefix: Beginning of the command.
    """
    command = [sys.executable, "-m", "resilin.cli", "run", "--live", "--nproc", str(num_workers)]
    command += ["--heartbeat", str(HEARTBEAT), *options, str(HERE / "chaos_live_job.py")]
    with (folder / f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            [*(prefix or []), *command, str(folder), "--pause", "0.02", "--name", name],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": str(folder / "events")},
        )
