"""The authority of a job over several machines, kept in etcd.

Each machine has a launcher, and each launcher one of these. Under `/resilin/<run>/` there are the
authority (`record`), and one key per member under the lease of its launcher (`members`). A member
that exits is removed by its own launcher at once. If a launcher is lost its lease expires, its keys
vanish, and the launchers that are left remove its members; several may try, and the first one does.

While no etcd answers, training continues and changes wait. A lease only says that somebody should
look: who is in the job is what the authority says. So a launcher whose lease has expired while it
was cut off keeps its members, if nobody has removed them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from resilin.cli.live.access import Access, given_secret
from resilin.cli.live.gateway import Answer, Away, Entry, Gateway, Rejected
from resilin.cli.live.members import Members
from resilin.cli.live.record import Record, State, decode
from resilin.cli.options import LEASE, SHORTEST_LEASE
from resilin.core.live import Authority, Event, Join, NotLive, Remove, apply
from resilin.core.membership import Member

PATIENCE = 10.0
"""Seconds to wait for an etcd that does not answer at the start."""
_RETRY = 0.2
"""Seconds between two attempts to reach an etcd that is away."""
_DEPUTY = (0.1, 0.3)
"""Seconds that launchers which are not the first wait before they remove somebody."""
_COLLIDED = (0.002, 0.02)
"""Seconds after which it is tried again, if another launcher has changed something else."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_T = TypeVar("_T")

logger = logging.getLogger("resilin")


class EtcdKeeper:
    """The authority of one job, as a launcher of it sees and changes it.

    It is a `Keeper`. Two threads of its own keep it up to date.

    Args:
        access: Where the etcd is.
        run: Name of the job, the same on all machines.
        lease: Seconds without a sign of this launcher after which its members are removed.
        above: Newest generation of any state that the job may resume from; -1 for none.
        patience: Seconds to wait for an etcd that does not answer yet.

    Raises:
        OSError: No etcd answers, or it does not let this launcher in.
    """

    def __init__(
        self,
        access: Access,
        run: str,
        *,
        lease: float = LEASE,
        above: int = -1,
        patience: float = PATIENCE,
    ) -> None:
        if not _NAME.fullmatch(run):
            raise ValueError(
                f"name of the run ({run!r}) must have 1 to 200 letters, digits, '.', '_' and '-'"
            )
        if lease < SHORTEST_LEASE:
            raise ValueError(f"lease ({lease:g}) must be at least {SHORTEST_LEASE:g} seconds")
        self.on_change: Callable[[Authority], None] = lambda authority: None
        """Called with each new authority, whoever has changed it, by any thread."""
        self.on_over: Callable[[str], None] = lambda reason: None
        """Called with the reason, by any thread, if the job cannot continue with this authority and
        no call raises `NotLive` because of that."""
        self._prefix = f"/resilin/{run}/"
        self._above = above
        self._gateway = Gateway(access, timeout=lease / 2)
        self._record = Record(
            self._gateway,
            self._prefix,
            on_change=lambda authority: self.on_change(authority),
            on_over=self._be_over,
        )
        self._members = Members(self._gateway, self._prefix, math.ceil(lease))
        self._end = End(self._gateway, self._prefix)
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._outage = Outage()
        revision = _begin(self._members.renew, self._synchronize, patience)
        self._threads = [
            _thread("etcd-watch", lambda: self._follow(revision), self._fail),
            _thread("etcd-lease", self._pulse, self._fail),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def newest(self) -> Authority | None:
        """The authority as last seen; None before the job begins.

        That of a job whose members are all gone is none: `start` replaces it.
        """
        return self._record.newest

    def secret(self) -> bytes:
        """The secret of the job: that of the file, or a random one that etcd keeps for all."""
        given = given_secret()
        return _secret(self._gateway, f"{self._prefix}secret") if given is None else given

    def start(self, members: Sequence[Member]) -> Authority:
        """Begin the job with these members, or let them join the one that is there.

        If there is an authority, but no launcher of any of its members, it waits for one lease:
        they may only be cut off.

        Raises:
            NotLive: The job cannot continue with this authority.
        """
        for each in members:
            self.hold(each.name)
        deadline = math.inf
        while True:
            answer = self._patiently(self._read)
            entry, present = self._parts(answer)
            if self.newest is None and _lives(entry, present):
                self._record.read(entry, None)
            if self.newest is not None:
                return self._change([Join(each) for each in members])
            state = State(None, "", -1) if entry is None else decode(entry)
            if state.known is not None and time.monotonic() < deadline:
                deadline = min(deadline, time.monotonic() + self._members.seconds)
                self._pause()
                continue
            above = max(self._above, state.generation)
            new = Authority.start(secrets.token_hex(8), members, above=above)
            if self._patiently(partial(self._record.start, entry, new)):
                return new

    def apply(self, event: Event) -> Authority:
        """Change the authority. While no etcd answers, it waits.

        Returns:
            The authority after the event.

        Raises:
            NotLive: The job cannot continue with living processes.
            ValueError: The event cannot be one of this job.
            OSError: This keeper was closed meanwhile, or etcd does not allow it.
        """
        after = self._change([event])
        if isinstance(event, Join) and self._members.is_gone(event.member.name):
            # It was sent before the process ended, and taken afterwards.
            after = self._change([Remove(event.member.name)])
        return after

    def hold(self, name: str) -> None:
        """Answer for a member from now on; nothing if this launcher does already.

        Raises:
            ValueError: Another launcher has a member of this name.
        """
        try:
            self._members.hold(name)
        except (Away, Rejected):
            # The lease may have expired just now: its thread finds out, and writes all names.
            self._wake.set()

    def drop(self, name: str) -> None:
        """Remove a member that is gone. While no etcd answers, that is done later.

        Raises:
            NotLive: The job cannot continue with living processes.
        """
        self._members.release(name)
        try:
            if self.newest is None or self._record.over is not None:
                self._members.delete(name)
            else:
                key = self._members.key(name)
                self._record.update(lambda before: apply(before, Remove(name)), delete=[key])
            self._members.forget(name)
        except (Away, Rejected, TimeoutError):
            self._members.vanished(name, 0.0)
            self._wake.set()

    @property
    def finished(self) -> bool:
        """Whether a launcher has said that the training is over, and no member is left."""
        newest = self.newest
        if newest is None or newest.formed is None or not self._end.is_of(newest):
            return False
        return not self._members.answered(newest.formed.names)

    def finish(self) -> None:
        """Say with `close` that the training is over, to all launchers."""
        if self.newest is not None:
            self._end.due = self.newest.identity

    def close(self) -> None:
        """Remove the members of this launcher, and let the authority go."""
        held = self._members.held
        with contextlib.suppress(OSError):
            self._end.write()  # before the members are gone: others would take them for lost
        self._closing.set()
        self._wake.set()
        self._gateway.end_watch()
        if self.newest is not None:
            with contextlib.suppress(OSError, NotLive):
                self._record.update(lambda before: _without(before, held))
        with contextlib.suppress(OSError):
            self._members.close()
        self._gateway.close()
        for thread in self._threads:
            thread.join()

    # Calls -------------------------------------------------------------------------------------

    def _change(self, events: Sequence[Event]) -> Authority:
        return self._patiently(lambda: self._record.update(lambda now: _after(now, events)))

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """The result of a call, as soon as an etcd answers it."""
        while True:
            try:
                return call()
            except Away:  # noqa: PERF203
                self._pause()

    def _be_over(self, reason: str) -> None:
        """The job cannot continue with this authority, unless its training is over."""
        newest = self.newest
        if newest is None or not self._end.is_of(newest):
            self.on_over(reason)

    def _fail(self, reason: str) -> None:
        self.on_over(reason)

    def _pause(self) -> None:
        if self._closing.wait(_RETRY):
            raise Away("closed meanwhile")

    def _read(self) -> Answer:
        return self._gateway.read(self._prefix, prefix=True)

    def _parts(self, answer: Answer) -> tuple[Entry | None, set[str]]:
        """The authority, and the names of the members that a launcher answers for."""
        entries = {each.key: each for each in answer.entries}
        return entries.get(self._record.key), self._members.names(entries)

    # Changes of others -------------------------------------------------------------------------

    def _follow(self, revision: int) -> None:
        """The thread that hears of changes."""
        while not self._closing.is_set():
            with contextlib.suppress(Away, Rejected):
                for entry in self._gateway.watch(self._prefix, revision + 1):
                    self._see(entry)
            problem: Exception | None = Away()
            while problem is not None and not self._closing.is_set():
                try:
                    revision, problem = self._synchronize(), None
                except (Away, Rejected) as error:
                    problem = error
                if not self._closing.is_set():
                    self._outage.note("watch", problem)
                if problem is not None:
                    self._closing.wait(_RETRY)

    def _synchronize(self) -> int:
        """Read everything; the revision that it is of."""
        known = self._record.known
        answer = self._read()
        entry, present = self._parts(answer)
        for each in answer.entries:
            self._end.see(each)  # first: then nobody is lost
        if known is not None or _lives(entry, present):
            self._record.read(entry, known)
        self._members.read(present)
        self._compare()
        return answer.revision

    def _compare(self) -> None:
        """Look for members that nobody answers for, though no key has vanished.

        Launchers that were all cut off come back one after the other: each has a lease's time.
        """
        if self.newest is not None:
            self._members.compare(_names(self.newest), time.monotonic() + self._members.seconds)
        self._wake.set()

    def _see(self, entry: Entry) -> None:
        if entry.key == self._record.key:
            self._record.see(entry)
            self._compare()
        elif self._end.see(entry) or (name := self._members.name(entry.key)) is None:
            return
        elif not entry.deleted:
            self._members.appeared(name)
        elif self.newest is None or name not in self.newest:
            self._members.vanished(name, None)
        else:
            leads = self._members.leads(self.newest.roster.names)
            delay = 0.0 if leads else random.uniform(*_DEPUTY)
            self._members.vanished(name, time.monotonic() + delay)
            self._wake.set()

    # The lease ---------------------------------------------------------------------------------

    def _pulse(self) -> None:
        """The thread that keeps the lease alive, and removes members that are lost."""
        renewal = time.monotonic() + self._members.seconds / 3
        failures = 0
        while True:
            self._wake.wait(max(0.0, min(renewal, self._members.next_due()) - time.monotonic()))
            self._wake.clear()
            if self._closing.is_set():
                return
            try:
                now = time.monotonic()
                if now >= renewal:
                    self._members.renew()
                    renewal = now + self._members.seconds / 3
                self._write_members()
                self._reap(self._members.due(now))
            except (Away, Rejected) as error:
                failures += 1
                # One key may be refused because the lease has just expired.
                if isinstance(error, Away) or failures > 1:
                    self._outage.note("lease", error)
                renewal = 0.0
                self._closing.wait(_RETRY)
            else:
                failures = 0
                self._outage.note("lease", None)

    def _write_members(self) -> None:
        """Write the members that etcd does not have; one that is another launcher's is not ours."""
        try:
            self._members.write()
        except ValueError as error:
            self._be_over(str(error))

    def _reap(self, names: Sequence[str]) -> None:
        """Remove members that nobody answers for."""
        if not names:
            return
        before = self.newest
        if before is not None and self._record.over is None:
            keys = [self._members.key(name) for name in names]
            try:
                after = self._record.attempt(lambda now: _without(now, names), delete=keys)
            except NotLive as error:
                self._be_over(str(error))
            else:
                if after is None:
                    for name in names:
                        later = time.monotonic() + random.uniform(*_COLLIDED)
                        self._members.vanished(name, later)
                    return
        for name in names:
            self._members.forget(name)


class End:
    """The key that says that the training of a job is over: launchers wait for nothing then.

    Args:
        gateway: The etcd.
        prefix: Prefix of the keys of the job.
    """

    def __init__(self, gateway: Gateway, prefix: str) -> None:
        self.of = ""
        """Identity of the authority whose job is over, as last seen."""
        self.due = ""
        """Identity of the authority whose job this launcher has seen to its end."""
        self._gateway = gateway
        self._key = f"{prefix}finished"

    def is_of(self, authority: Authority) -> bool:
        """Whether it is the end of this job."""
        return self.of == authority.identity

    def see(self, entry: Entry) -> bool:
        """Take notice of a key; whether it is this one."""
        if entry.key != self._key:
            return False
        self.of = "" if entry.deleted else entry.value.decode(errors="replace")
        return True

    def write(self) -> None:
        """Write it, if that is due."""
        if self.due and self.due != self.of:
            self._gateway.put(self._key, self.due.encode())
            self.of = self.due


class Outage:
    """Says once that etcd does not answer one of the threads, and once that it answers all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: set[str] = set()

    def note(self, thread: str, problem: Exception | None) -> None:
        """Take notice of a failure of a thread, or of a success."""
        with self._lock:
            before = bool(self._problems)
            if problem is None:
                self._problems.discard(thread)
            else:
                self._problems.add(thread)
            now = bool(self._problems)
        if now and not before:
            logger.warning(
                "etcd does not answer (%s): training continues, changes of membership wait", problem
            )
        elif before and not now:
            logger.warning("etcd answers again")


def _secret(gateway: Gateway, key: str) -> bytes:
    """The value of a key, which has a random one from now on."""
    new = secrets.token_hex(32).encode()
    answer = gateway.swap(key, 0, new)
    return new if answer.done else answer.entries[0].value


def _begin(renew: Callable[[], None], read: Callable[[], int], patience: float) -> int:
    """The revision that was read with a lease, once an etcd answers."""
    deadline = time.monotonic() + patience
    while True:
        try:
            renew()
            return read()
        except Away:  # noqa: PERF203
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


def _thread(
    name: str, target: Callable[[], None], on_failure: Callable[[str], None]
) -> threading.Thread:
    def run() -> None:
        try:
            target()
        except Exception as error:
            # A launcher that hears of nothing must not continue as if nothing happened.
            on_failure(f"{type(error).__name__} in the thread {name}: {error}")
            raise

    return threading.Thread(target=run, name=name, daemon=True)


def _names(authority: Authority) -> set[str]:
    """Everybody who has a place in the job."""
    waiting = (each.name for each in authority.waiting)
    return {*authority.roster.names, *authority.leaving, *waiting}


def _after(authority: Authority, events: Iterable[Event]) -> Authority:
    for event in events:
        authority = apply(authority, event)
    return authority


def _without(authority: Authority, names: Iterable[str]) -> Authority:
    return _after(authority, map(Remove, names))


def _lives(entry: Entry | None, present: set[str]) -> bool:
    """Whether a value is the authority of a job that the members which are there can continue."""
    known = None if entry is None else decode(entry).known
    if known is None:
        return False
    authority = known.authority
    try:
        _without(authority, sorted(_names(authority) - present))
    except NotLive:
        return False
    return True
