"""The hosts of one run, the faults that happen to them, and their ledgers.

A host is a launcher in a session of its own, with all processes that come from it and a directory
in memory. A host whose launcher ends with an error is started again after a second, as Kubernetes
and most schedulers do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from faults import NOTICE, NUM_HOSTS, Fault
from figures import first_full
from launch import Contender
from processes import TOKEN, alive, kill_all

START = 120.0
"""Seconds in which all hosts must have made a step together."""
HERE = Path(__file__).parent


@dataclass
class Host:
    """One launcher, and what comes from it."""

    token: str
    process: Popen[bytes]
    memory: Path

    def lose(self) -> None:
        """Kills everything on it, and empties its memory."""
        kill_all(self.process, self.token)
        shutil.rmtree(self.memory, ignore_errors=True)


@dataclass
class Run:
    """One run of a contender.

    Args:
        contender: Who runs.
        folder: A directory that all hosts share.
        settings: Environment variables of the task.
    """

    contender: Contender
    folder: Path
    settings: dict[str, str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    happened: list[tuple[float, Fault]] = field(default_factory=list)
    spared: int = 0
    """Kills that met no worker: the host was just starting one."""
    relaunched: int = 0
    """Launchers that ended with an error, and were started again."""
    began: float | None = None
    """When all hosts had made a step together."""
    ended: float = 0.0
    _hosts: dict[int, Host] = field(default_factory=dict)
    _leaving: list[tuple[float, Host]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return (self.folder / "final.pt").exists()

    def carry_out(self, faults: Sequence[Fault], limit: float) -> None:
        """Runs until the end or the limit, with faults."""
        self.folder.mkdir(parents=True)
        with self.contender.authority(self.folder, self._environment(-1)) as options:
            try:
                for number in range(NUM_HOSTS):
                    self._start(number, options)
                self._await(lambda: self._is_full(), START, options)
                if self.began is not None:
                    for fault in faults:
                        self._await(lambda: False, self.began + fault.time - time.time(), options)
                        if self.finished:
                            break
                        self._happen(fault, options)
                    self._await(lambda: False, self.began + limit - time.time(), options)
                self.ended = time.time()
            finally:
                for host in [*self._hosts.values(), *(host for _, host in self._leaving)]:
                    host.lose()
        self._take_in()

    def _is_full(self) -> bool:
        self._take_in()
        self.began = first_full(self.lines, NUM_HOSTS)
        return self.began is not None

    def _await(self, condition: Callable[[], bool], seconds: float, options: list[str]) -> None:
        deadline = time.time() + seconds
        while not self.finished and not condition() and time.time() < deadline:
            self._care(options)
            time.sleep(min(0.1, max(0.0, deadline - time.time())))

    def _care(self, options: list[str]) -> None:
        """Ends hosts whose notice is over, and starts those again that failed."""
        for due, host in self._leaving[:]:
            if time.time() >= due:
                host.lose()
                self._leaving.remove((due, host))
        for number, host in list(self._hosts.items()):
            if host.process.poll() not in (None, 0):
                time.sleep(1.0)
                host.lose()
                self.relaunched += 1
                self._start(number, options)

    def _environment(self, number: int) -> dict[str, str]:
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            **self.settings,
            **self.contender.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "ELASTICITY_FOLDER": str(self.folder),
            "ELASTICITY_HOST": str(number),
            TOKEN: f"{self.folder.name}-{number}",
        }

    def _start(self, number: int, options: list[str]) -> None:
        environment = self._environment(number)
        environment[TOKEN] += f"-{time.time_ns()}"
        memory = Path("/dev/shm") / environment[TOKEN]
        command = self.contender.host(number, memory, options)
        with (self.folder / f"host-{number}.log").open("ab") as log:
            process = Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
                cwd=self.folder,
            )
        self._hosts[number] = Host(environment[TOKEN], process, memory)

    def _happen(self, fault: Fault, options: list[str]) -> None:
        if fault.what == "join":
            self._start(fault.host, options)
        elif fault.what == "lose":
            self._hosts.pop(fault.host).lose()
        elif fault.what == "leave":
            host = self._hosts.pop(fault.host)
            host.process.send_signal(signal.SIGTERM)
            self._leaving.append((time.time() + NOTICE, host))
        else:
            self._kill_worker(fault.host)
        self.happened.append((time.time(), fault))

    def _kill_worker(self, number: int) -> None:
        self._take_in()
        own = {line["pid"]: line["time"] for line in self.lines if line["host"] == number}
        for pid in sorted(own, key=lambda pid: -own[pid]):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
                return
        self.spared += 1

    def _take_in(self) -> None:
        """Reads what the ledgers say since the last time."""
        for path in (self.folder / "ledgers").glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            self.lines += [json.loads(line) for line in whole.splitlines()]
