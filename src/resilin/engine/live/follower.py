"""A member that follows the authority: it comes to the generations that are announced.

What it does next is decided in `core/forming.py`; here it is done, and waited for.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import replace
from functools import partial

from resilin.core.forming import Left, next_move, reports
from resilin.core.live import Authority, Form, Join, NotLive, Renew
from resilin.core.membership import Member, Membership, Roster
from resilin.core.recovery import Version
from resilin.engine.copies import Place
from resilin.engine.live.client import Client
from resilin.engine.live.forming import CONNECTING, Credentials, Generation, form, open_store
from resilin.engine.lost import PeerLost
from resilin.engine.stop import RESTART

logger = logging.getLogger("resilin")

ANNOUNCED = 4.0
"""Seconds in which a loss is announced. Later, a group that broke is taken for one of which nobody
is gone, and its members ask to be announced anew."""
ATTEMPTS = 4
"""Generations that are not formed though nobody is gone, after which the job is restarted."""


class Removed(RuntimeError):
    """This member has no place in the job any more."""


class Follower:
    """Comes to one generation after another.

    Args:
        client: The connection to the launcher.
        place: The place of this process in a copy of the model.
    """

    def __init__(self, client: Client, place: Place) -> None:
        self._client = client
        self._place = place
        self._meeting = open_store(client.address)
        host = f"{socket.gethostname()}/{os.getppid()}"
        self.member = Member(
            name=place.member, hosts=(host,) * place.size, address=self._meeting.address
        )
        """This process, or the copy that it speaks for, as a member."""
        self.came: Authority | None = None
        """The announcement of the newest generation that it has come to."""

    def founds(self) -> bool:
        """Whether this member, which has joined, is one of those with whom the job begins.

        Another launcher may have begun it meanwhile. Its members expect of a joiner that its script
        is built.
        """
        newest: Authority | None = None
        while newest is None:
            newest = self._client.wait(lambda authority: True, ANNOUNCED)
            self._check_launcher()
        # Nothing can be formed without one of the first members.
        return newest.formed is None and self._place.member in newest.roster.names

    def joins(self) -> None:
        """Tells the authority that this member is ready to join; one process of it does."""
        if self._place.leads:
            self._client.tell(Join(self.member))

    def membership(self, roster: Roster) -> Membership:
        """The place of this process in a generation. Each process of a copy is one replica."""
        place = roster.membership(self._place.member, self._place.part)
        process, num_processes = place.process, place.num_processes
        return replace(place, replica=process, num_replicas=num_processes)

    def come(self, left: Left) -> Generation:
        """Comes to the newest generation, or to a later one if that is never formed.

        Args:
            left: State of the group that the member had.

        Raises:
            NotLive: Generations are not formed, though nobody is gone.
            Removed: This member was removed from the job.
            SystemExit: The launcher is gone.
        """
        failures = 0
        while True:
            newest = self._next(left)
            self.came, left = newest, "forming"
            roster = newest.roster
            credentials = Credentials(newest.identity, self._client.secret)
            superseded = partial(self._is_superseded, roster.generation)
            never_formed = partial(self._is_never_formed, roster.generation)
            place, store = self.membership(roster), self._meeting.store
            try:
                # A busy machine needs longer; one that is gone costs the others as much.
                patience = CONNECTING * 2**failures
                looks = (superseded, never_formed)
                return form(roster, place, store, credentials, *looks, patience, self._place.size)
            except PeerLost as lost:
                if superseded():
                    logger.debug("%s", lost)
                    continue
                logger.warning("%s", lost)
                failures += 1
                if failures == ATTEMPTS:
                    raise NotLive(str(lost)) from lost
                left = "broke"
                self._client.tell(Renew(roster.generation))

    def report(self, roster: Roster, replica: int, state: Version) -> None:
        """Waits until the authority has heard that a generation is formed, and with which state.

        Raises:
            PeerLost: There is a newer one.
        """
        number = roster.generation
        if reports(replica):
            self._client.tell(Form(number, roster.names, state))

        def is_decided(authority: Authority) -> bool:
            heard = authority.formed is not None and authority.formed.generation >= number
            return heard or authority.roster.generation > number

        newest: Authority | None = None
        while newest is None:
            newest = self._client.wait(is_decided, ANNOUNCED)
            self._check_launcher()
        if newest.formed is None or newest.formed.generation < number:
            raise PeerLost(f"generation {number} was not formed: there is a newer one")

    def _is_superseded(self, generation: int) -> bool:
        self._check_launcher()
        newest = self._client.newest
        return newest is not None and newest.roster.generation > generation

    def _is_never_formed(self, generation: int) -> bool:
        self._check_launcher()
        newest = self._client.newest
        if newest is None or newest.roster.generation <= generation:
            return False
        return newest.formed is None or newest.formed.generation < generation

    def _next(self, left: Left) -> Authority:
        """Waits for the generation to come to; asks for one if nobody announces it."""
        name, came = self._place.member, None if self.came is None else self.came.roster
        deadline = time.monotonic() + ANNOUNCED

        def is_decided(authority: Authority) -> bool:
            move = next_move(name, authority, came, left, joined=self._client.joined)
            return move in {"come", "out"}

        newest: Authority | None = None
        while newest is None:
            newest = self._client.wait(is_decided, max(0.01, deadline - time.monotonic()))
            self._check_launcher()
            if newest is None:
                deadline += ANNOUNCED
                # It is announced in time if somebody is gone. Otherwise nobody knows that it broke.
                if came is not None and left == "broke":
                    self._client.tell(Renew(came.generation))
        if name not in newest:
            raise Removed(f"it was removed from the job in generation {newest.roster.generation}")
        return newest

    def _check_launcher(self) -> None:
        """Ends this process if nobody can tell it who is in the job any more."""
        if self._client.lost:
            logger.warning("the launcher is gone: %s exits", self._client.name)
            raise SystemExit(RESTART)
