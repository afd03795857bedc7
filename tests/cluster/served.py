"""A controller as a process of its own, for tests: `resilin sched serve`, and all that it starts.

with Served(tmp_path, "--option", "nodes=a=1,b=1") as served:
    job = served.client.submit(sharing_launch(folder, "job", epochs=3, seed=1))
    served.wait(lambda: served.phase(job) == "finished")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilin.cli.sched import access
from resilin.cluster.backends.base import PartState
from resilin.cluster.backends.local import LocalBackend
from resilin.cluster.controller.client import Client

LIMIT = 240.0
"""Seconds after which a test gives up waiting; a machine may be very busy."""


class Served:
    """One controller, which can be killed and started again.

    Args:
        state: Its directory.
        options: Further options of `resilin sched serve`.
    """

    def __init__(self, state: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.state = state
        self.command = [sys.executable, "-m", "resilin.cli", "sched", "serve"]
        self.command += ["--state", str(state), "--poll", "0.2", *options]
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Client

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.end_parts()

    def start(self, **env: str) -> None:
        """Start it, and wait until it answers."""
        self.state.mkdir(exist_ok=True)
        address = self.state / access.ADDRESS
        before = address.read_text() if address.exists() else None
        with (self.state / "serve.log").open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env={**self.env, **env}
            )
        if env:
            return  # it is about to be killed
        self.wait(lambda: self.ended or (address.exists() and address.read_text() != before))
        assert not self.ended, self.said()
        self.connect()

    def connect(self) -> None:
        """Find the address of a controller that has been started."""
        url = json.loads((self.state / access.ADDRESS).read_text())["url"]
        self.client = Client(url, (self.state / access.TOKEN).read_text().strip())

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def said(self) -> str:
        """All that it has printed."""
        return (self.state / "serve.log").read_text()

    def kill(self) -> None:
        """End it at once; what it has started runs on."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def wait(self, until: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for something; an error, with the output of all, if it does not happen."""
        deadline = time.monotonic() + limit
        while not until():
            if time.monotonic() > deadline:
                logs = [self.state / "serve.log", *sorted((self.state / "logs").glob("*.log"))]
                text = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in logs]
                raise TimeoutError("\n".join([f"not within {limit} s", *text]))
            time.sleep(0.1)

    def job(self, name: str) -> dict[str, Any]:
        """A job, as the controller shows it."""
        return self.client.job(name)

    def phase(self, name: str) -> str:
        """The phase of a job."""
        return str(self.job(name)["phase"])

    def local(self) -> LocalBackend:
        """The local backend that it uses."""
        directory = self.state / "local"
        cluster = next(p.name for p in directory.iterdir() if p.is_dir() and p.name != "down")
        return LocalBackend(directory, cluster, ())

    def end_parts(self) -> None:
        """End everything on this machine that it has started."""
        for directory in (self.state / "local", self.state / "meeting"):
            for place in directory.iterdir() if directory.exists() else ():
                if not place.is_dir() or place.name == "down":
                    continue
                local = LocalBackend(directory, place.name, ())
                deadline = time.monotonic() + 60
                while running := [e.name for e in local.list() if e.state is not PartState.ENDED]:
                    for name in running:
                        local.stop(name, 0)
                    assert time.monotonic() < deadline, f"{running} cannot be ended"
                    time.sleep(0.05)
