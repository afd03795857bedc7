"""Machines on one machine: network namespaces, joined by a bridge whose ports can be moved.

Each machine is a namespace with one interface and one address. All interfaces end in one more
namespace, at a bridge; a second bridge there takes those that are cut off together. Nothing is
closed or refused by a cut: packets vanish, as with a cable that was pulled. It needs root, and
leaves the network of the machine itself alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence

BRIDGES = ("whole", "apart")
_NOWHERE = "02:00:00:00:00:99"
"""An address on the link that nobody has."""


class Network:
    """Namespaces, and the links between them.

    Args:
        num: Number of machines.

    Raises:
        OSError: This process must not make namespaces, or there is no `ip`.
    """

    def __init__(self, num: int) -> None:
        self._prefix = f"chaos-{os.getpid()}"
        self._middle = f"{self._prefix}-middle"
        self._names = [f"{self._prefix}-{number}" for number in range(num)]
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for name in (self._middle, *self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for bridge in BRIDGES:
            _ip("-n", self._middle, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._middle, "link", "set", bridge, "up")
        for number, name in enumerate(self._names):
            port = ("peer", "name", f"port{number}", "netns", self._middle)
            _ip("-n", name, "link", "add", "net0", "type", "veth", *port)
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "net0")
            _ip("-n", name, "link", "set", "net0", "up")
            _ip("-n", self._middle, "link", "set", f"port{number}", "up", "master", BRIDGES[0])

    @staticmethod
    def address(number: int) -> str:
        """The address of a machine."""
        return f"10.231.77.{number + 1}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """A command, so that it runs on a machine. Its process has the same id as without."""
        return ["ip", "netns", "exec", self._names[number], *command]

    def cut(self, numbers: Collection[int]) -> None:
        """Cuts some machines off from the others; they reach each other."""
        for number in numbers:
            self._move(number, BRIDGES[1])

    def block(self, number: int, others: Collection[int]) -> None:
        """Lets nothing that one machine sends reach some others, and nothing else vanish."""
        for other in others:
            change = ("lladdr", _NOWHERE, "dev", "net0", "nud", "permanent")
            _ip("-n", self._names[number], "neigh", "replace", self.address(other), *change)

    def mend(self) -> None:
        """Makes everything as it was."""
        for number, name in enumerate(self._names):
            self._move(number, BRIDGES[0])
            _ip("-n", name, "neigh", "flush", "dev", "net0", "nud", "permanent")

    def _move(self, number: int, bridge: str) -> None:
        _ip("-n", self._middle, "link", "set", f"port{number}", "master", bridge)

    def close(self) -> None:
        """Removes all of it."""
        for name in (self._middle, *self._names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
