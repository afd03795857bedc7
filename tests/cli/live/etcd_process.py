"""A real etcd, and a network to it that can be cut, for tests."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilin.cli.live.access import Access

PROXY = Path(__file__).with_name("proxy.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def until(
    condition: Callable[[], object], what: str | Callable[[], str], seconds: float = 200.0
) -> None:
    """Wait for something that must happen; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.005)


class EtcdProcess:
    """An etcd on a port of its own. It can be killed, started again, and lose its data."""

    def __init__(
        self, directory: Path, *more: str, scheme: str = "http", wait: bool = True
    ) -> None:
        path = shutil.which("etcd")
        assert path is not None, "tests of membership need an etcd: apt-get install etcd-server"
        self.path = path
        # In memory: a disk that is slow to sync would make the time limits of clients pass.
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else directory
        self.data = Path(tempfile.mkdtemp(prefix="resilin-test-etcd-", dir=memory))
        weakref.finalize(self, shutil.rmtree, self.data, ignore_errors=True)
        self.log = directory / "etcd.log"
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.more = more
        self.process: subprocess.Popen[bytes] | None = None
        self.start(wait=wait)

    @property
    def access(self) -> Access:
        return Access(endpoints=(("127.0.0.1", self.port),))

    def start(self, *, wait: bool = True) -> None:
        arguments = [
            f"--data-dir={self.data}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            "--listen-peer-urls=http://127.0.0.1:0",
            "--logger=zap",
            "--log-level=warn",
            *self.more,
        ]
        with self.log.open("a") as log:
            self.process = subprocess.Popen([self.path, *arguments], stdout=log, stderr=log)
        if wait:
            self.wait()

    def wait(self) -> None:
        until(self.answers, f"an etcd on {self.url}: {self.log.read_text()}")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            if self.url.startswith("https"):
                connection.connect()
                return True
            connection.request("GET", "/health")
            return b"true" in connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()

    def leases(self) -> list[int]:
        """Lengths of all leases, in seconds, the shortest first."""
        found = [each["ID"] for each in self.post("lease/leases", {}).get("leases", ())]
        granted = [self.post("lease/timetolive", {"ID": each})["grantedTTL"] for each in found]
        return sorted(map(int, granted))

    def post(self, name: str, body: dict[str, str]) -> Any:
        """A call of etcd's JSON gateway."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("POST", f"/v3/{name}", json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=20)

    def wipe(self) -> None:
        """Start it again without what it knew."""
        self.kill()
        shutil.rmtree(self.data)
        self.start()


def cluster(directory: Path, size: int) -> list[EtcdProcess]:
    """Servers that are one etcd."""
    peers = {f"n{number}": f"http://127.0.0.1:{free_port()}" for number in range(size)}
    members = ",".join(f"{name}={url}" for name, url in peers.items())
    processes = []
    for name, url in peers.items():
        (directory / name).mkdir()
        more = [
            f"--name={name}",
            f"--listen-peer-urls={url}",
            f"--initial-advertise-peer-urls={url}",
            f"--initial-cluster={members}",
        ]
        processes.append(EtcdProcess(directory / name, *more, wait=False))
    for each in processes:
        each.wait()
    return processes


class Network:
    """A process between a launcher and etcd. Cut, it loses every packet, and says nothing."""

    def __init__(self, etcd: EtcdProcess) -> None:
        command = [sys.executable, str(PROXY), f"127.0.0.1:{etcd.port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def access(self) -> Access:
        return Access(endpoints=(("127.0.0.1", self.port),))

    def cut(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def mend(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
