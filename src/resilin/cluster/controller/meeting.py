"""The rendezvous store of the cluster: a process that outlives the controller and all jobs.

It is `resilin store`, started like a part of the local backend. Its port is written down before it
is started and stays the same: if it dies, another one takes its place. Jobs that were running have
to be started again then, from their checkpoints.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from resilin.cluster.backends.base import BackendError, Part, PartState
from resilin.cluster.backends.local import LocalBackend
from resilin.cluster.controller.records import Met
from resilin.cluster.controller.state import Meeting
from resilin.cluster.node import Node

READY_LIMIT = 120.0
"""Seconds within which the store must answer: it loads torch."""

READY = "serving the rendezvous"
"""Words of `resilin store` when it serves."""


class Meetings(Protocol):
    """Provides the rendezvous store."""

    def ensure(self, known: Meeting | None, announce: Callable[[Met], None]) -> None:
        """Make sure that there is a store.

        Args:
            known: The one that was announced last.
            announce: Called before another one is started.

        Raises:
            BackendError: There is none.
        """


class OutsideStore:
    """A store that the operator runs, on a machine that stays up.

    Args:
        endpoint: `HOST:PORT`.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"rendezvous ({endpoint!r}) must be HOST:PORT")
        self._endpoint = endpoint

    def ensure(self, known: Meeting | None, announce: Callable[[Met], None]) -> None:
        """Announce its address, if that is new."""
        if known is None or known.endpoint != self._endpoint:
            number = 1 if known is None else known.number + 1
            announce(Met(time=time.time(), endpoint=self._endpoint, number=number))


class StoreProcess:
    """A store on this machine.

    Args:
        directory: For its files.
        address: Name or address of this machine, as nodes reach it.
        listen: Address to listen on.
    """

    def __init__(self, directory: Path, address: str, listen: str) -> None:
        self._directory = directory
        self._address = address
        self._listen = listen
        here = Node(name="here", accelerators=1, kind="cpu")
        self._processes = LocalBackend(directory, "store", (here,))

    def ensure(self, known: Meeting | None, announce: Callable[[Met], None]) -> None:
        """Start the store if it does not run, at the same port as before."""
        if known is not None and self._state(known.number) is PartState.RUNNING:
            return
        if known is not None and self._state(known.number) is None:
            self._start(known.number, known.endpoint)  # it was announced, and not started
            return
        endpoint = f"{self._address}:{_free_port(self._listen)}"
        met = Met(
            time=time.time(),
            endpoint=endpoint if known is None else known.endpoint,
            number=1 if known is None else known.number + 1,
        )
        announce(met)
        self._start(met.number, met.endpoint)

    def stop(self, known: Meeting) -> None:
        """End the store; no job can meet from then on."""
        self._processes.stop(f"store-{known.number}", 0)

    def _state(self, number: int) -> PartState | None:
        name = f"store-{number}"
        return next((each.state for each in self._processes.list() if each.name == name), None)

    def _start(self, number: int, endpoint: str) -> None:
        port = endpoint.rpartition(":")[2]
        name = f"store-{number}"
        log = self._directory / f"{name}.log"
        command = [sys.executable, "-m", "resilin.cli", "store"]
        part = Part(
            name=name,
            job="store",
            node="here",
            accelerators=1,
            command=[*command, "--host", self._listen, "--port", port],
            directory=str(self._directory),
            log=str(log),
        )
        self._processes.start(part)
        deadline = time.monotonic() + READY_LIMIT
        while time.monotonic() < deadline:
            # Its own word: another process may answer at the port.
            if log.exists() and READY in log.read_text(errors="replace"):
                return
            if self._state(number) is not PartState.RUNNING:
                raise BackendError(f"the rendezvous store on port {port} has ended: see {log}")
            time.sleep(0.1)
        raise BackendError(f"the rendezvous store on port {port} did not answer: see {log}")


def _free_port(listen: str) -> int:
    with socket.create_server((listen, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
