"""The keys of members in etcd: those that this launcher answers for, and those that are missing.

One lease per launcher carries all of its keys: a machine with eight workers sends one sign of life,
not eight. A key is deleted explicitly when its member is gone.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
from collections.abc import Collection, Iterable

from resilin.cli.live.gateway import Gateway


class Members:
    """The members that this launcher answers for, and those that nobody seems to answer for.

    Args:
        gateway: The etcd.
        prefix: Prefix of the keys of the job.
        seconds: Length of the lease.
    """

    def __init__(self, gateway: Gateway, prefix: str, seconds: int) -> None:
        self.seconds = float(seconds)
        """Length of the lease, as etcd has granted it."""
        self._gateway = gateway
        self._prefix = f"{prefix}members/"
        launcher = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._launcher = f"{prefix}launchers/{launcher}"
        self._value = launcher.encode()
        self._lease = 0
        self._held: set[str] = set()
        self._unwritten: set[str] = set()
        self._released: set[str] = set()
        self._gone: set[str] = set()
        self._present: set[str] = set()
        self._due: dict[str, float] = {}
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """The key of a member."""
        return f"{self._prefix}{name}"

    def name(self, key: str) -> str | None:
        """The member that a key is of; None if it is another one."""
        return key.removeprefix(self._prefix) if key.startswith(self._prefix) else None

    def names(self, keys: Iterable[str]) -> set[str]:
        """The members that some of these keys are of."""
        return {name for key in keys if (name := self.name(key)) is not None}

    # Our own -----------------------------------------------------------------------------------

    @property
    def held(self) -> list[str]:
        """Members that this launcher answers for."""
        with self._lock:
            return sorted(self._held)

    def renew(self) -> None:
        """Keep the lease alive. If it has expired, or there was none, begin another one."""
        if self._lease and self._gateway.keep(self._lease):
            return
        self._lease, self.seconds = self._gateway.grant(round(self.seconds))
        # Also without members: whoever may not write is told at the start.
        self._gateway.claim(self._launcher, self._value, self._lease)
        with self._lock:
            self._unwritten |= self._held

    def hold(self, name: str) -> None:
        """Answer for a member, unless it is gone.

        Raises:
            ValueError: Another launcher does.
        """
        with self._lock:
            if name in self._held or name in self._gone:
                return
            self._held.add(name)
            self._unwritten.add(name)
        self._write(name)

    def write(self) -> None:
        """Write the keys that etcd does not have yet."""
        with self._lock:
            names = sorted(self._unwritten)
        for name in names:
            self._write(name)

    def release(self, name: str) -> None:
        """Answer for a member no longer: it is gone, and this launcher removes it."""
        with self._lock:
            self._held.discard(name)
            self._unwritten.discard(name)
            self._released.add(name)
            self._gone.add(name)
            self._due[name] = math.inf

    def is_gone(self, name: str) -> bool:
        """Whether a member of this launcher has ended."""
        with self._lock:
            return name in self._gone

    def delete(self, name: str) -> None:
        """Delete the key of a member that has not joined."""
        self._gateway.delete(self.key(name))

    def close(self) -> None:
        """Answer for nobody any more."""
        self._gateway.revoke(self._lease)

    def _write(self, name: str) -> None:
        ours = self._gateway.claim(self.key(name), self._value, self._lease)
        with self._lock:
            self._unwritten.discard(name)
            if ours or name not in self._held:
                return
            self._held.discard(name)
        raise ValueError(f"{name!r} must be a name that no other launcher has given to a member")

    # Those of all ------------------------------------------------------------------------------

    def appeared(self, name: str) -> None:
        """Somebody answers for a member."""
        with self._lock:
            self._present.add(name)
            if name not in self._released:
                self._due.pop(name, None)

    def vanished(self, name: str, due: float | None) -> None:
        """Nobody answers for a member.

        Args:
            name: The member.
            due: When to remove it, unless somebody answers until then; None if it was removed.
        """
        with self._lock:
            self._present.discard(name)
            if due is not None:
                self._due[name] = due

    def read(self, present: Collection[str]) -> None:
        """Take notice of all keys that there are."""
        with self._lock:
            self._present = {*present}

    def compare(self, names: Collection[str], due: float) -> None:
        """Note which members of the job are missing, and when to remove them."""
        with self._lock:
            for name in names:
                if name not in self._present:
                    self._due.setdefault(name, due)
                elif name not in self._released:
                    self._due.pop(name, None)

    def answered(self, names: Collection[str]) -> set[str]:
        """Those of these members that somebody answers for."""
        with self._lock:
            return self._present & {*names}

    def misses(self, name: str) -> bool:
        """Whether nobody seems to answer for a member."""
        with self._lock:
            return name in self._due

    def leads(self, names: Iterable[str]) -> bool:
        """Whether this launcher answers for the first that is here: it removes lost ones then."""
        first = next((name for name in names if not self.misses(name)), None)
        return first in self.held

    def due(self, now: float) -> list[str]:
        """The members that are to be removed now."""
        with self._lock:
            return sorted(name for name, due in self._due.items() if due <= now)

    def next_due(self) -> float:
        """When the next one is; infinity for never."""
        with self._lock:
            return min(self._due.values(), default=math.inf)

    def forget(self, name: str) -> None:
        """A member was removed."""
        with self._lock:
            self._due.pop(name, None)
            self._released.discard(name)
