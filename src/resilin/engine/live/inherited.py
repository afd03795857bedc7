"""Sockets of a generation: given up in forked children, and ended when the generation is over.

A connection ends for the other side when its last holder closes it. A child that keeps it would
hide the death of its parent from the other members, and a store that such a child still listens
for takes connections that nobody serves. So the child gives them up, and nothing else: they are
known by the addresses at which members listen, and each connection has such an address at one end.
Workers of a DataLoader are such children.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

Address = tuple[str, int]
"""Host and port."""
_DESCRIPTORS = "/dev/fd"


class _Found(NamedTuple):
    """A socket of this process."""

    descriptor: int
    identity: int
    """Number of the socket in the system; a descriptor may be used again, this is not."""
    local: Address
    peer: Address | None
    listens: bool


class Listeners:
    """Addresses at which members listen; their connections are closed in forked children.

    Args:
        groups: Addresses of the groups, to which this process is connected now.
        stores: Addresses of stores, which serve later generations as well.
    """

    def __init__(self, groups: Iterable[Address], stores: Iterable[Address] = ()) -> None:
        groups = frozenset(groups)
        self.addresses = groups.union(stores)
        # Not by address: the port of a member that is gone may be that of another one later.
        self._connections = frozenset(
            each.identity
            for each in _sockets()
            if each.peer is not None and not groups.isdisjoint((each.local, each.peer))
        )
        _known.add(self)

    def hang_up(self) -> None:
        """End the connections of the groups, so that nothing waits in them any longer.

        A member that is frozen or cut off sends no sign of its end, and a collective with it would
        keep its threads until the time limit.
        """
        for each in _sockets():
            if each.identity in self._connections:
                _hang_up(each)


def listening() -> dict[int, Address]:
    """Addresses at which this process listens, by the number of the socket in the system."""
    return {each.identity: each.local for each in _sockets() if each.listens}


def local_address(opened: socket.socket) -> Address:
    """The address of a socket."""
    return _plain(opened.getsockname())


def peer_address(connected: socket.socket) -> Address:
    """The address at the other end of a connection."""
    return _plain(connected.getpeername())


def _sockets() -> Iterator[_Found]:
    """The TCP sockets of this process."""
    for name in os.listdir(_DESCRIPTORS):
        # The listing has a descriptor of its own, and other threads close theirs.
        with suppress(OSError):
            descriptor = int(name)
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found = _look(descriptor, status.st_ino)
                if found is not None:
                    yield found


def _look(descriptor: int, identity: int) -> _Found | None:
    looked_at = socket.socket(fileno=descriptor)
    try:
        if looked_at.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        peer = None
        with suppress(OSError):  # it is not connected
            peer = peer_address(looked_at)
        listens = bool(looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return _Found(descriptor, identity, local_address(looked_at), peer, listens)
    finally:
        looked_at.detach()  # it belongs to somebody else


def _hang_up(found: _Found) -> None:
    # A descriptor of our own: another thread may close that one, and the system give it away.
    with suppress(OSError):
        own = socket.socket(fileno=os.dup(found.descriptor))
        with own:
            if os.fstat(own.fileno()).st_ino == found.identity:
                own.shutdown(socket.SHUT_RDWR)


def _plain(address: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return address[0].removeprefix("::ffff:"), address[1]


_known: weakref.WeakSet[Listeners] = weakref.WeakSet()


def _give_up_in_child() -> None:
    """Closes the sockets of all generations in a child that was just forked."""
    addresses = frozenset[Address]().union(*(each.addresses for each in list(_known)))
    ours = [each for each in _sockets() if not addresses.isdisjoint((each.local, each.peer))]
    if not ours:
        return
    # Objects of the parent still have these numbers: no other file may get them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in ours:
        os.dup2(nothing, each.descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_give_up_in_child)
