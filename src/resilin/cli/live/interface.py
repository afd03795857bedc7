"""The network interface that has an address of this machine."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915
_NAME = struct.Struct("16s16x8x")


def interface_of(address: str) -> str | None:
    """The name of the interface with this address; None where the system does not say that.

    gloo listens on the address of this machine's name otherwise, which is a loopback address on
    many machines: no other machine reaches that one.

    Args:
        address: An address or a name of this machine.

    Raises:
        ValueError: This machine has no such address.
    """
    if sys.platform != "linux":
        return None
    try:
        family, *_, (found, *_) = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--address {address} is not known here: {error}") from None
    known = _of_version_6() if family == socket.AF_INET6 else _of_version_4()
    wanted = socket.inet_pton(family, str(found).partition("%")[0])
    if wanted not in known:
        has = ", ".join(sorted(socket.inet_ntop(family, each) for each in known))
        raise ValueError(f"--address {address} must be one of this machine's addresses: {has}")
    return known[wanted]


def _of_version_4() -> dict[bytes, str]:
    """The interfaces by their first addresses, which are those that gloo takes."""
    import fcntl

    found: dict[bytes, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, _NAME.pack(name.encode()))
                found.setdefault(answer[20:24], name)
    return found


def _of_version_6() -> dict[bytes, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}
