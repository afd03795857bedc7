"""Forming a generation: its members come together, connect, and prove that they belong to it.

The first member of the roster serves a store, in which the others meet. All of them wait for each
other there before anything of the old generation is given up, and each looks up for a newer
generation while it waits: nobody waits for a member that is gone. Groups are made in one order, so
that a member that has just come has the same ones as the others.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    HashStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from resilin.compat.torch_names import gloo_made_by, set_timeout_of
from resilin.core.membership import Membership, Roster
from resilin.engine.collectives import Begun, Collectives, Guarded
from resilin.engine.copies import STARTING, CopyGroups, Place, make_groups
from resilin.engine.live.closing import close
from resilin.engine.live.inherited import (
    Address,
    Listeners,
    listening,
    local_address,
    peer_address,
)
from resilin.engine.lost import PeerLost, lost_connection

_T = TypeVar("_T")
SLICE = timedelta(milliseconds=20)
"""Longest time for which a member waits without looking whether its generation is broken."""
POLL = 0.002
"""Seconds between two looks while members come together; later ten times as long."""
CONNECTING = timedelta(seconds=2)
"""Time limit for the connections of a group; gloo may take it five times. It is for a member that
is there and does not answer: one that is gone is given up at once."""
OPERATION = timedelta(minutes=10)
"""Time limit of one collective. Whoever is lost is given up long before; this ends what is left
of it in the background."""
PURPOSES = ("control", "storage")
"""Groups of a generation beside that of the gradients, in the order in which they are made."""


class Generation:
    """The groups of one generation, and whether its members can still complete anything in them.

    Args:
        roster: Its members.
        groups: Groups by purpose; empty for a member that is alone.
        copy: Those of a copy of the model that is sharded; None if it is not.
    """

    def __init__(
        self,
        roster: Roster,
        groups: Mapping[str, dist.ProcessGroup],
        copy: CopyGroups | None = None,
    ) -> None:
        self.roster = roster
        self.groups = groups
        self.copy = copy
        self.broken = ""
        """Reason why nothing more can be completed in it; empty while it can."""
        self.listeners: Listeners | None = None
        """Addresses of its members: forked children keep none of their connections."""
        self._ended = False

    def give_up(self, reason: str) -> None:
        """Ends all waiting in this generation, by any thread; the first reason counts."""
        self.broken = self.broken or reason

    def wait(self, work: Begun, never_formed: Callable[[], bool] = lambda: False) -> None:
        """Waits for a collective, with an eye on the generation.

        gloo may lose a waiter: of two collectives that a dead peer leaves behind, one fails and the
        other would wait until its time limit. So nothing waits for longer than a slice.

        Args:
            work: The collective.
            never_formed: For a generation that is being formed: whether it never will be.

        Raises:
            PeerLost: The collective failed, or the generation is broken and this has not ended.
        """
        while True:
            if never_formed():
                self.give_up("there was a newer one before it was formed")
            if self._ended or (self.broken and not work.is_completed()):
                self._ended = True
                raise PeerLost(self._text())
            done = work.is_completed()
            try:
                work.wait(SLICE)
            except RuntimeError as error:
                if not done:
                    continue  # the slice is over; a failure is raised again in the next round
                self.give_up(f"a collective failed ({_first_line(error)})")
                self._ended = True
                raise PeerLost(self._text()) from error
            return

    def refused(self, error: RuntimeError) -> RuntimeError:
        """The error to raise for a collective that its group did not begin.

        A group refuses what it cannot do, as well as everything once a connection is gone. In the
        first case all members would try the same step again, without end.
        """
        if isinstance(error, PeerLost):
            return error
        if not self.broken and lost_connection(error) is None:
            return RuntimeError(
                f"a collective was refused, though generation {self.roster.generation} has lost "
                f"no member: {_first_line(error)}"
            )
        self.give_up(f"a collective was refused ({_first_line(error)})")
        self._ended = True
        return PeerLost(self._text())

    def guarded(self, purpose: str) -> Guarded | None:
        """The group of one purpose; None for a member that is alone."""
        group = self.groups.get(purpose)
        return None if group is None else Guarded(group, self.wait)

    def _text(self) -> str:
        return f"generation {self.roster.generation} cannot continue: {self.broken}"


class Credentials(NamedTuple):
    """Knowledge that the members of a job have, and nobody else."""

    identity: str
    """Identity of the authority."""
    secret: bytes
    """Secret of the job."""

    def sign(self, *words: object) -> str:
        """The signature of words by somebody who knows the secret."""
        text = "\n".join(map(str, (self.identity, *words)))
        return hmac.new(self.secret, text.encode(), "sha256").hexdigest()


class Meeting(NamedTuple):
    """A store of this process, in which the members of a generation meet."""

    store: TCPStore
    """The store."""
    address: str
    """Its address, as other members are told."""
    listeners: Listeners
    """The same for forked children, which do not keep it open."""


def open_store(host: str) -> Meeting:
    """Opens a store of this process.

    Args:
        host: The address that it listens on. torch's own listener would listen on all of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        listeners = Listeners([local_address(listener)])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=CONNECTING,
        )
    return Meeting(store, f"{host}:{port}", listeners)


def form(
    roster: Roster,
    me: Membership,
    own_store: TCPStore,
    credentials: Credentials,
    superseded: Callable[[], bool],
    never_formed: Callable[[], bool],
    patience: timedelta = CONNECTING,
    processes_per_copy: int = 1,
) -> Generation:
    """Brings the members of a generation together. All of them call it.

    The groups of the generation before are left alone until all have come. Then torch's default
    group is replaced; who keeps the old ones alive decides when they close.

    Args:
        roster: The generation.
        me: The place of this process in it.
        own_store: The store of this process.
        credentials: Known to all members.
        superseded: Whether there is a newer generation, so that this one never comes together.
        never_formed: Whether there was a newer one before this one was formed. Once all have come
            together, somebody may have it formed while others still prove that they belong to it.
        patience: Time limit for connections.
        processes_per_copy: Processes over which each copy of the model is sharded: 1 if it is not.

    Raises:
        PeerLost: It is, or a member was lost on the way, or does not belong to the job.
    """
    number = roster.generation
    if me.num_processes == 1:
        be_alone()
        return Generation(roster, {})
    before = listening()
    try:
        store, first = own_store, None
        if me.process > 0:
            store, first = _connect(roster.members[0].address, superseded, patience)
        # Nobody else can guess the names of its keys.
        meeting = PrefixStore(credentials.sign("meeting", number), store)
        _come_together(meeting, me, superseded, number)
        with gloo_made_by(partial(_unless, never_formed, f"generation {number} is over")):
            groups = _make_groups(PrefixStore("groups", meeting), me, patience)
            copy = None
            if processes_per_copy > 1:
                counts = me.process, me.num_processes, processes_per_copy
                copy = make_groups(*counts, patience)
                groups |= dict(zip(copy._fields, copy, strict=True))
            for group in groups.values():
                set_timeout_of(group, OPERATION)
    except (DistStoreError, DistNetworkError, RuntimeError) as error:
        if isinstance(error, PeerLost):
            raise
        raise PeerLost(f"generation {number} was not formed: {_first_line(error)}") from error
    formed = Generation(roster, groups, copy)
    ours = [address for number, address in listening().items() if number not in before]
    try:
        theirs = _prove(formed, me, credentials, ours, never_formed)
    except PeerLost:
        close(formed.groups.values())
        raise
    formed.listeners = Listeners(theirs, [] if first is None else [first])
    return formed


def be_alone() -> None:
    """Makes this process the only one of torch's default group."""
    _replace_default(HashStore(), 0, 1, CONNECTING)


def be_apart(place: Place) -> None:
    """Makes torch's default group of this process alone, or of those that hold its copy.

    Their scripts shard their model over it, before they join the others.
    """
    if place.size == 1:
        be_alone()
        return
    _replace_default(place.meeting(), place.part, place.size, STARTING)


def _connect(
    address: str, superseded: Callable[[], bool], patience: timedelta
) -> tuple[TCPStore, Address]:
    """The store of another member, and its address as the system has it."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience.total_seconds()
    # torch would write a page to the terminal for a store that is not there.
    while (found := _answers(host, int(port))) is None:
        if superseded():
            raise PeerLost(f"nobody waits at {address} any more: there is a newer generation")
        if time.monotonic() > deadline:
            raise PeerLost(f"nobody answers at {address}, within {patience.seconds} s")
        time.sleep(10 * POLL)
    # torch tries three times, each within the time limit, though there be nobody.
    opening = partial(TCPStore, host, int(port), is_master=False, timeout=patience)
    return _unless(superseded, f"{address} does not answer", opening), found


def _unless(superseded: Callable[[], bool], reason: str, connect: Callable[[], _T]) -> _T:
    """Connects in a thread, which is left behind once there is a newer generation.

    Args:
        superseded: Whether there is.
        reason: What to say of it.
        connect: Makes connections, and ends on its own at some time.

    Raises:
        PeerLost: There was one first.
    """
    connected: Future[_T] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except Exception as error:
            connected.set_exception(error)

    threading.Thread(target=run, name="resilin-connecting", daemon=True).start()
    while not wait([connected], 10 * POLL).done:
        if superseded():
            raise PeerLost(f"{reason}, and there is a newer generation")
    return connected.result()


def _answers(host: str, port: int) -> Address | None:
    try:
        with socket.create_connection((host, port), timeout=0.5) as connected:
            return peer_address(connected)
    except OSError:
        return None


def _come_together(
    meeting: PrefixStore, me: Membership, superseded: Callable[[], bool], number: int
) -> None:
    if meeting.add("came", 1) == me.num_processes:
        meeting.set("all", "1")
        return
    began = time.monotonic()
    # Not `wait`: torch writes two lines to the terminal for each time limit that passes.
    while not meeting.check(["all"]):
        if superseded():
            raise PeerLost(f"generation {number} is over before it was formed")
        time.sleep(POLL if time.monotonic() - began < 1 else 10 * POLL)


def _make_groups(store: Store, me: Membership, patience: timedelta) -> dict[str, dist.ProcessGroup]:
    _replace_default(store, me.process, me.num_processes, patience)
    assert dist.group.WORLD is not None
    groups: dict[str, dist.ProcessGroup] = {"gradients": dist.group.WORLD}
    for purpose in PURPOSES:
        groups[purpose] = dist.new_group(backend="gloo", timeout=patience)
    return groups


def _replace_default(store: Store, process: int, num_processes: int, patience: timedelta) -> None:
    """Makes torch's default group anew. Whoever holds the old one keeps its connections open."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Each time, torch puts a hook around the one before, and all of them would be called.
    hook = sys.excepthook
    try:
        dist.init_process_group(
            "gloo", store=store, rank=process, world_size=num_processes, timeout=patience
        )
    finally:
        sys.excepthook = hook


def _prove(
    formed: Generation,
    me: Membership,
    credentials: Credentials,
    listeners: list[Address],
    never_formed: Callable[[], bool],
) -> list[Address]:
    """Has each member show that it knows the secret, of numbers that were never used before.

    Args:
        formed: The generation.
        me: The place of this process in it.
        credentials: Known to all members.
        listeners: Addresses at which this process listens for others.
        never_formed: Whether there was a newer generation before. A member that is cut off now
            closes no connection.

    Returns:
        Those of all members.

    Raises:
        PeerLost: One does not.
    """
    patiently = partial(formed.wait, never_formed=never_formed)
    control = Collectives(Guarded(formed.groups["control"], patiently))
    number = formed.roster.generation
    said = control.gather([secrets.token_hex(16), listeners])
    nonces = [nonce for nonce, _ in said]
    signatures = control.gather(credentials.sign("member", number, me.process, *nonces))
    for process, signature in enumerate(signatures):
        expected = credentials.sign("member", number, process, *nonces)
        if not hmac.compare_digest(str(signature), expected):
            formed.give_up(f"process {process} does not know the secret of the job")
            raise PeerLost(formed.broken)
    return [(str(host), int(port)) for _, addresses in said for host, port in addresses]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
