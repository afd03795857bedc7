"""The jobs of `rescale.py`: launchers, diaries, the authority, and faults.

A contender is one way to run a job: `live` is `resilin run --live --warm`, `warm` is `resilin run
--warm`, `cold` the same without `--warm`, `bare` a plain script under torchrun that reloads a
`torch.save` file, `default` the same with torchrun's own rendezvous settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import rescale_jobs
from chaos import Host
from rescale_figures import (
    Change,
    Line,
    continued,
    first_after,
    has_continued,
    restarted,
    steps,
)

from resilin.cli.etcd_server import Etcd, Settings
from resilin.cli.options import RENDEZVOUS
from resilin.cli.run import OWN_STORE

HERE = Path(__file__).parent
LIMIT = 150.0
"""Seconds to wait for anything, at most."""
HEARTBEAT = 3.0
"""Seconds without a sign of life after which a live worker is killed."""
HANG_TIMEOUT = 3.0
"""The same of a job that restarts; it allows for slow steps besides."""
FIRST_FAULT = 12
"""Steps before the first fault."""
SETTLE = 5
"""Steps between two changes."""


@dataclass
class Job:
    """One job: its launchers, and what its processes have written down."""

    contender: str
    size: str
    folder: Path
    num_agents: int
    num_workers: int
    """Workers of each agent."""
    hosts: list[Host] = field(default_factory=list)
    _etcd: Etcd | None = None
    _store: Popen[str] | None = None
    _port: int = 0

    @property
    def live(self) -> bool:
        return self.contender == "live"

    # Its processes -------------------------------------------------------------------------

    def command(self, memory: Path) -> list[str]:
        ours, tuned = self.contender in ("live", "warm", "cold"), self.contender != "default"
        module = ["resilin.cli", "run"] if ours else ["torch.distributed.run"]
        command = [sys.executable, "-m", *module]
        command += ["--nproc-per-node", str(self.num_workers), "--max-restarts", "100"]
        command += ["--memory-dir", str(memory)] if ours else []
        command += ["--warm"] if self.contender in ("live", "warm") else []
        command += ["--live", "--heartbeat", str(HEARTBEAT)] if self.live else []
        if self.contender == "warm":
            command += ["--hang-timeout", str(HANG_TIMEOUT)]
        if self.live and self._etcd is not None:
            command += ["--membership", self._etcd.url, "--rdzv-id", self.folder.name]
        elif self.num_agents > 1:
            command += ["--nnodes", f"1:{self.num_agents}", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}"]
            command += ["--rdzv-id", self.folder.name]
            # `resilin run` has them from itself.
            settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
            command += ["--rdzv-conf", settings] if tuned and not ours else []
        elif not self.live:
            command += ["--standalone"]
        script = "ours" if ours else "bare"
        return [*command, str(HERE / "rescale_jobs.py"), script, self.size, str(self.folder)]

    def start(self) -> None:
        (self.folder / "diaries").mkdir(parents=True)
        if self.num_agents > 1:
            self.start_authority()
        for number in range(self.num_agents):
            self.start_host(number)

    def start_host(self, number: int) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RESILIN_RUN_DIR": str(self.folder / "events"),
            rescale_jobs.HOST: str(number),
        }
        if self.contender != "default":
            # With the store that torch takes by default, new workers were seen to look for the
            # dead ones, and to hang.
            environment[OWN_STORE] = "1"
        memory = Path("/dev/shm") / f"{self.folder.parent.name}-{self.folder.name}-{number}"
        with (self.folder / f"host-{number}.log").open("wb") as output:
            process = Popen(
                self.command(memory),
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        self.hosts.append(Host(number, memory, process))

    def start_authority(self) -> None:
        """Start what agents agree by: etcd for a live job, else the store of the rendezvous."""
        if self.live:
            data = self.folder / "etcd"
            self._etcd = Etcd(Settings(port=self._port, data=data))
            self._port = self._etcd.port
            return
        command = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1"]
        self._store = Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
        assert self._store.stdout is not None
        self._port = int(self._store.stdout.readline().split()[-1])

    def kill_authority(self) -> None:
        process: Any = self._etcd.process if self._etcd is not None else self._store
        process.kill()
        process.wait()

    def end(self) -> None:
        for host in self.hosts:
            host.end(memory=True)
        for pid in {line["pid"] for line in self.lines()}:
            kill(pid)
        if self._etcd is not None:
            self._etcd.close()
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        for memory in Path("/dev/shm").glob(f"{self.folder.parent.name}-{self.folder.name}-*"):
            shutil.rmtree(memory, ignore_errors=True)

    # Its diaries ---------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        found = []
        for path in (self.folder / "diaries").iterdir():
            whole = path.read_bytes().rpartition(b"\n")[0]
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda line: line["time"])

    def wait_for(self, condition: Callable[[list[Line]], bool], what: str) -> list[Line]:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            lines = self.lines()
            if condition(lines):
                return lines
            for host in self.hosts:
                if host.process.poll() is not None:
                    code = host.process.returncode
                    raise RuntimeError(f"{self.folder.name}: agent {host.number} ended: {code}")
            time.sleep(0.02)
        raise TimeoutError(f"{self.folder.name}: no {what} within {LIMIT:g} s")

    def running(self, replicas: int, num_steps: int, known: frozenset[int]) -> dict[int, Line]:
        """Waits until so many new processes have made some steps: the last step of each."""

        def found(lines: list[Line]) -> dict[int, Line]:
            made = {p: own for p in _pids(lines) - known if (own := steps(lines, pid=p))}
            return {pid: own[-1] for pid, own in made.items() if len(own) >= num_steps}

        what = f"{replicas} replicas with {num_steps} steps"
        return found(self.wait_for(lambda lines: len(found(lines)) >= replicas, what))

    # Faults and changes --------------------------------------------------------------------

    def restart(self, act: Callable[[], float], replicas: int, before: set[int]) -> Change:
        """Measure a change after which all processes are new.

        Args:
            act: Makes it happen, and returns when it did.
            replicas: Number of processes afterwards.
            before: Processes that train.
        """
        old = self.known()
        when = act()

        def recovered(lines: list[Line]) -> bool:
            return len({line["pid"] for line in steps(lines)} - old) >= replicas

        lines = self.wait_for(recovered, "recovery")
        return restarted(lines, when, old, before)

    def known(self) -> frozenset[int]:
        """All processes so far."""
        return frozenset(_pids(self.lines()))

    def change(self, act: Callable[[], float], stay: set[int]) -> Change:
        """Measure a change that these processes live through.

        Args:
            act: Makes it happen, and returns when it did.
            stay: The processes.
        """
        when = act()
        lines = self.wait_for(lambda lines: has_continued(lines, when, stay), "live change")
        return continued(lines, when, stay)

    def join(self, since: float, stay: set[int]) -> tuple[Change, int]:
        """Measure the join of a process that is on its way, and return it, too."""

        def joined(lines: list[Line]) -> bool:
            new = [p for p in _pids(lines) - stay if first_after(lines, p, "wrapped", since)]
            return bool(new) and has_continued(lines, since, stay)

        lines = self.wait_for(joined, "member that joins")
        new = [pid for pid in _pids(lines) - stay if first_after(lines, pid, "wrapped", since)]
        return continued(lines, since, stay, since=since), new[-1]

    def lose(self, host: Host, pid: int) -> float:
        """Loses a launcher with its worker."""
        when = time.time()
        self.hosts.remove(host)
        host.end(memory=True)
        kill(pid)  # whoever has started it
        return when

    def dismiss(self, host: Host) -> float:
        """Asks a launcher to leave."""
        when = time.time()
        self.hosts.remove(host)
        host.process.send_signal(signal.SIGTERM)
        return when


def _pids(lines: list[Line]) -> set[int]:
    return {line["pid"] for line in lines}


def signalled(pid: int, number: signal.Signals) -> Callable[[], float]:
    """A function that sends a signal to a process, and returns when it did."""

    def act() -> float:
        when = time.time()
        os.kill(pid, number)
        return when

    return act


def kill(pid: int) -> None:
    """Kills a worker, if it is one still: its number may be another process's by now."""
    with contextlib.suppress(OSError):
        if rescale_jobs.HOST.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)
