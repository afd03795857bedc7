"""Follow a capacity trace with real processes: emulated machines that join and leave.

A machine is an agent of `resilin run` with one worker, in its own session and with its own memory
directory. When the trace removes it, it gets SIGTERM, as from a cloud that reclaims it; the job
saves its state and continues without it. When none is left, the state stays in the checkpoints. The
script decides how the batch size depends on the number of replicas, as on a real cluster.

The clock of the trace starts with the first step. Starting a machine, and noticing a lost one, take
seconds of real time however much the trace is compressed: a trace that changes faster than that is
followed, but the job makes no progress in between.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilin.core import _validate
from resilin.core.trace import CapacityTrace, TraceError
from resilin.engine import environment
from resilin.lab import launch
from resilin.lab.replay import check_taken_up
from resilin.telemetry.read import last_event

POLL = 0.1
"""Seconds between two checks of the trace and of the machines."""
FAREWELL = 15.0
"""Seconds that the other machines get to exit after one has finished or failed."""
STORE_TIMEOUT = 60.0
"""Seconds for the rendezvous store to start."""


@dataclass(slots=True)
class Machine:
    """An emulated machine: one agent."""

    number: int
    """Its number, which separates its log and memory from those of others."""
    process: subprocess.Popen[bytes]
    """The agent."""
    memory: Path
    """Directory that stands for the memory of the machine."""
    told_to_stop: bool = False
    """Whether the trace has removed it; it may still be saving."""


class Machines:
    """The machines of one job, and their rendezvous store.

    Args:
        run_dir: Directory for checkpoints, events and logs.
        command: Builds the command line of an agent from the options of `resilin run`.
        env: Environment of the agents.
        most: Largest number of machines of the job.
    """

    def __init__(
        self,
        run_dir: Path,
        command: Callable[[Sequence[str]], list[str]],
        env: dict[str, str],
        most: int,
    ) -> None:
        self._run_dir = run_dir
        self._command = command
        self._env = env
        self._most = most
        self._machines: list[Machine] = []
        self._ended: list[tuple[Machine, int]] = []
        self._over: float | None = None
        line = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1", "--port", "0"]
        self._store = launch.begin(line, env, subprocess.PIPE)
        try:
            self._port = self._await_store()
        except BaseException:
            self.close()
            raise

    def _await_store(self) -> int:
        assert self._store.stdout is not None
        deadline, told = time.monotonic() + STORE_TIMEOUT, b""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._store.stdout], [], [], left)[0]:
                break
            if not (more := os.read(self._store.stdout.fileno(), 4096)):
                break
            told += more
            if match := re.search(rb"port (\d+)\n", told):
                return int(match[1])
        raise OSError(f"the rendezvous store did not start: {told.decode(errors='replace')!r}")

    @property
    def num_running(self) -> int:
        """Number of machines that run and were not asked to stop."""
        return sum(not machine.told_to_stop for machine in self._machines)

    def follow(self, wanted: int) -> None:
        """Start or stop machines until there are this many; the latest are stopped first."""
        for _ in range(wanted - self.num_running):
            self._start()
        here = [machine for machine in self._machines if not machine.told_to_stop]
        for machine in here[wanted:]:
            machine.told_to_stop = True
            machine.process.terminate()

    def _start(self) -> None:
        taken = {machine.number for machine in self._machines}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        memory = environment.memory_parent() / f"lab-{os.getpid()}-{number}"
        options = ["--nproc", "1", "--nnodes", f"1:{self._most}"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "replay"]
        options += ["--checkpoint-dir", str((self._run_dir / "checkpoints").absolute())]
        options += ["--memory-dir", str(memory)]
        env = dict(self._env)
        # Each machine has its own accelerators: two processes cannot share one under NCCL.
        devices = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        with log_of(self._run_dir, number).open("ab") as output:
            process = launch.begin(self._command(options), env, output)
        self._machines.append(Machine(number, process, memory))

    def finished(self) -> int | None:
        """The exit code of the job if it is over, else None.

        The job has finished when an agent exits with 0. An agent may fail only because it was too
        late for a finished job, so the others are waited for.
        """
        for machine in [m for m in self._machines if m.process.poll() is not None]:
            self._machines.remove(machine)
            self._ended.append((machine, launch.exit_code(machine.process)))
            shutil.rmtree(machine.memory, ignore_errors=True)
        if any(code == 0 for _, code in self._ended):
            return 0
        failed = [code for machine, code in self._ended if not machine.told_to_stop]
        if not failed:
            return None
        self._over = self._over or time.monotonic() + FAREWELL
        return failed[0] if not self._machines or time.monotonic() > self._over else None

    @property
    def is_failing(self) -> bool:
        """Whether a machine exited unasked, and the outcome of the job is not known yet."""
        return self._over is not None

    def close(self, *, gently: bool = False) -> None:
        """Stop the remaining processes, and reap them.

        Args:
            gently: Whether the job has finished, so that the agents will exit unasked.
        """
        processes = [machine.process for machine in self._machines]
        try:
            deadline = time.monotonic() + (FAREWELL if gently else 0)
            while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
                time.sleep(POLL)
            # A finished job has nothing to save. An agent may still wait for another one that the
            # trace removed at the very end, and handles no signal while it waits.
            launch.end(processes, launch.SCRIPT_GRACE if gently else launch.AGENT_GRACE)
        finally:
            launch.end([self._store], launch.SCRIPT_GRACE)
            if self._store.stdout is not None:
                self._store.stdout.close()
            for machine in self._machines:
                shutil.rmtree(machine.memory, ignore_errors=True)
            self._machines.clear()


def log_of(run_dir: Path, number: int) -> Path:
    """Log file with the output of a machine and its script."""
    return run_dir / f"machine-{number}.log"


def _quiet(message: str) -> None:
    pass


def replay_capacity(
    trace: CapacityTrace,
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    run_dir: Path,
    speed: float = 1.0,
    max_replicas: int | None = None,
    rule: str | None = None,
    seed: int | None = None,
    say: Callable[[str], None] = _quiet,
) -> int:
    """Run a script on emulated machines that join and leave according to a capacity trace.

    Args:
        trace: Number of machines over time, with one worker each.
        script: A script that trains with resilin. Its state is saved in `run_dir/checkpoints`.
        arguments: Arguments of the script.
        run_dir: An empty directory for events, checkpoints and a log of each machine.
        speed: Seconds of the trace per real second.
        max_replicas: Scale the counts to at most this many, as `CapacityTrace.scaled` does.
        rule: Scaling rule, overriding the script's: a name, or `package.module:attribute`.
        seed: Seed of the order of samples, unless the script sets one, and of random generators.
        say: Called with a description of each change.

    Returns:
        The exit code of the job: 0 when the script has finished.

    Raises:
        ValueError: There is no such script or rule.
        TraceError: The trace ends, or removes all machines for good, before the script finishes.
        NotTakenUp: The script succeeded, but did not train with resilin.
    """
    script = launch.check_script(script)
    if rule is not None:
        launch.check_rule(rule)
    _validate.real("speed", speed, above=0)
    if max_replicas is not None:
        trace = trace.scaled(max_replicas)
    _check_hope(trace, 0.0)
    env = launch.environment_of(run_dir, rule=rule, seed=seed)
    env.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def command(options: Sequence[str]) -> list[str]:
        return launch.command(script, arguments, seeded=seed is not None, run_options=options)

    machines = Machines(run_dir, command, env, max(1, *trace.replicas))
    code: int | None = None
    try:
        began: float | None = None
        while (code := machines.finished()) is None:
            if began is None and (trace.at(0) == 0 or last_event(run_dir) is not None):
                began = time.monotonic()
            now = 0.0 if began is None else (time.monotonic() - began) * speed
            wanted = trace.at(now)
            _check_hope(trace, now)
            if wanted != machines.num_running and not machines.is_failing:
                say(f"{now:.0f} s of the trace: {machines.num_running} -> {wanted} machines")
                machines.follow(wanted)
            time.sleep(POLL)
    finally:
        machines.close(gently=code == 0)
    if code == 0:
        check_taken_up(run_dir, traced=False)
    return code


def _check_hope(trace: CapacityTrace, now: float) -> None:
    """Raise an error if there will never be a machine again."""
    is_over = trace.end == "hold" and now >= trace.duration and not trace.replicas[-1]
    if is_over or not any(trace.replicas):
        raise TraceError(
            f"the trace has no replicas from {now:.0f} s on, and its end is {trace.end!r}: the "
            "script can never finish"
        )
