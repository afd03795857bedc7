"""A worker of a live job on Ray: the user's function in an actor, with the worker's environment."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from resilin.engine import environment
from resilin.telemetry.extras import load

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable of gloo: the network interface that it listens on."""
_SIOCGIFADDR = 0x8915

TrainFunction = Callable[..., Any]
"""The user's function; it takes the configuration, or nothing if that is None."""


class Place(NamedTuple):
    """Process and node of a worker."""

    pid: int
    """Its process id."""
    node: str
    """Id of its node."""


class Outcome(NamedTuple):
    """End of a function that has not raised an error."""

    code: int | None
    """Exit code with which it wanted to end its process; None if it has returned."""
    value: Any = None
    """Return value."""


class LiveWorker:
    """The actor of one worker. Ray runs its methods in the main thread of a process of its own."""

    def place(self) -> Place:
        """Process and node. The answer says that it runs."""
        ray: Any = load("ray", "ray", "run_live")
        return Place(os.getpid(), str(ray.get_runtime_context().get_node_id()))

    def run(self, settings: Mapping[str, str], train: TrainFunction, config: Any) -> Outcome:
        """Run the function as a member of the job.

        Args:
            settings: Environment variables of a worker.
            train: The function.
            config: Its argument; None for none.
        """
        os.environ.update(settings)
        if INTERFACE not in os.environ and (found := _interface()) is not None:
            os.environ[INTERFACE] = found
        environment.log_to_stderr()
        try:
            return Outcome(None, train() if config is None else train(config))
        except SystemExit as error:
            # Ray would report it as a crash: only the code tells a worker that has left.
            return Outcome(error.code if isinstance(error.code, int) else int(bool(error.code)))


def _interface() -> str | None:
    """The network interface with the address by which Ray knows this node; None if unknown.

    gloo asks the system for the address of the host's name, which on many machines is one of the
    loopback interface.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    ray: Any = load("ray", "ray", "run_live")
    wanted = socket.inet_aton(socket.gethostbyname(ray.util.get_node_ip_address()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == wanted:
                return name
    return None
