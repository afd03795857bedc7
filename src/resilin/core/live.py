"""Live membership: who is in each generation, and whose state its members continue with.

Members come and go while others keep running. An `Authority` outside of them numbers the
generations: it alone says who is in the job. A generation is formed when all of its members have
come to it; a member never goes back to an earlier one. A step is committed where its ballot, with
all members of the generation in it, is complete. What follows from that:

- When a group breaks, some members may have committed its last step, and others not: they are at
  most one step apart. The next generation continues with the newest state of its members.
- A process that was taken for dead may have committed a step that the others have made again since.
  Of two states of the same step, that of the later generation wins: the generation of a `Version`
  is the one that committed its last step, not that of the member now.
- Every generation has a member of the last one that was formed. That member has left the older
  group, which can make no step without it: so two groups never both make steps.

Nothing here sends or waits: an engine does, and the simulator in `tests/protocol` tries histories.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from resilin.core.membership import Member, Roster, change
from resilin.core.recovery import Version


class NotLive(RuntimeError):
    """The job cannot continue with living processes: it must be restarted from what was kept."""


# The authority ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Knowledge of the authority of a job. A value: each event returns the next one.

    It must outlive its own process, as in etcd. Should it be lost, no rule makes up for it: of two
    groups that were formed at different times, each may be the only one that reports. So each has
    an identity, and the members of another do not continue with it (`check`).

    Names of members are never used twice: a process that was removed joins under a new one.
    """

    identity: str
    """Different for each authority that was ever started."""
    roster: Roster
    """The members of the newest generation."""
    leaving: frozenset[str] = frozenset()
    """Members that were asked to leave, and make steps until all members have seen that."""
    formed: Roster | None = None
    """The newest generation that was formed; None before the first one was."""
    state: Version | None = None
    """The state that it continued with. It is announced with each later generation."""

    @classmethod
    def start(cls, identity: str, members: Sequence[Member], *, above: int = -1) -> Authority:
        """The authority of a job that begins, or is restarted.

        Args:
            identity: A random text.
            members: The first members.
            above: Newest generation of any state that the job may resume from; -1 for none.
        """
        roster = Roster(generation=above + 1, members=tuple(members))
        return cls(identity=identity, roster=roster)

    def join(self, member: Member) -> Authority:
        """Announces a generation with one member more."""
        return self._next(change(self.roster, joining=[member]))

    def ask_to_leave(self, name: str) -> Authority:
        """Announces a generation without this member, which is there until it takes effect."""
        if name not in self.roster.names:
            return self
        return replace(self._without(name), leaving=self.leaving | {name})

    def remove(self, name: str) -> Authority:
        """Announces a generation without this member, which is gone, or was not heard of.

        Somebody who is unknown changes nothing: two may report the same loss. One who is leaving
        has not waited for the others, and they are told that, too.

        Raises:
            NotLive: Nobody is left who has formed the newest generation.
        """
        if name in self.leaving:
            return replace(self._next(change(self.roster)), leaving=self.leaving - {name})
        return self._without(name) if name in self.roster.names else self

    def renew(self, broken: int) -> Authority:
        """Announces the same members anew, for a group that broke though nobody is gone.

        Args:
            broken: The generation whose group broke. All of its members may ask, and the first is
                enough: then there is a newer one.
        """
        if broken != self.roster.generation:
            return self
        return self._next(change(self.roster))

    def form(self, roster: Roster, state: Version) -> Authority:
        """Takes the report that all members of a generation have come to it.

        Whoever reports makes a step only if `formed` is that generation then. It is not if a later
        one was formed, or if all members of it were removed: a later one may begin without them.

        Args:
            roster: The generation.
            state: The state that they continue with.
        """
        if self.formed is not None and roster.generation <= self.formed.generation:
            return self
        if not {*roster.names} & {*self.roster.names}:
            return self
        # Whoever left has left: there is no older group any more in which it could make a step.
        leaving = frozenset() if roster == self.roster else self.leaving
        return replace(self, formed=roster, state=state, leaving=leaving)

    def check(self, known: str) -> None:
        """Refuses to continue with a member that another authority has told who is in the job.

        Numbers alone would not do: this one may have given the same ones to others.

        Args:
            known: The identity of the authority that a member began with.

        Raises:
            NotLive: The authority was started again without what it knew.
        """
        if known != self.identity:
            raise NotLive(
                f"a member began with authority {known}, and this is {self.identity}: the former "
                "has lost its state"
            )

    def _without(self, name: str) -> Authority:
        if self.roster.names == (name,):
            raise NotLive(f"{name}, the last member of generation {self.roster.generation}, left")
        return self._next(change(self.roster, leaving=[name]))

    def _next(self, roster: Roster) -> Authority:
        if self.formed is not None and not {*roster.names} & {*self.formed.names}:
            raise NotLive(
                f"no member of generation {self.formed.generation} is left, and of those that have "
                f"joined since ({', '.join(roster.names)}) none has its state"
            )
        return replace(self, roster=roster)


# One member ------------------------------------------------------------------------------------


def moves_on(newest: int, present: int) -> bool:
    """Whether a member whose group cannot continue comes to this generation; never to an older one.

    Args:
        newest: The newest generation that it knows of.
        present: The newest one that it has come to.
    """
    return newest > present


def reports(replica: int) -> bool:
    """Whether a member tells the authority that its generation is formed, before it continues.

    One does, and no step is made without it: so the authority knows of every generation that has
    made a step, and of the state that it began with.

    Args:
        replica: Number of the member.
    """
    return replica == 0


def is_broken(group: Roster, newest: Roster, leaving: Collection[str]) -> bool:
    """Whether a group cannot complete another step: a member is gone, and is not just leaving.

    Others have to break it off then: a member that is frozen closes no connection.

    Args:
        group: The generation that the group is of.
        newest: The newest generation.
        leaving: Who makes steps in older ones until all have seen that it leaves.
    """
    return bool({*group.names} - {*newest.names} - {*leaving})


def all_have_seen(votes: int, members: int) -> bool:
    """Whether a planned change takes effect after this step: all members know of it.

    Each adds to its ballot whether it knows of a newer generation. Nobody waits for anybody, and
    no step is lost: until all have seen it, the old group continues.

    Args:
        votes: Members that have.
        members: All members of the generation.
    """
    return votes == members


# Whose state -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """The transfer of the state to those that lack it, in a generation that was just formed."""

    state: Version
    """The state that all members have afterwards."""
    holders: tuple[int, ...]
    """Replicas that have it, in order; each sends a share."""
    lacking: tuple[int, ...]
    """Replicas that get it. They hold nothing until they have all of it: see `heal`."""


def heal(generation: int, held: Mapping[int, Version | None], least: Version | None) -> Healing:
    """The healing of a generation, computed alike by all of its members.

    A member that begins to load a state loses its own. It holds nothing until it has all of it,
    however that ends: otherwise half a state could win after the next loss.

    Args:
        generation: The generation.
        held: What each replica holds; None if it has just been made, or was interrupted while it
            loaded a state.
        least: The state that the last generation that was formed has continued with, as announced
            with this one. None if there was none: then the job begins, with the objects of the
            first replica.

    Raises:
        NotLive: Nobody has that state or a newer one. An older one is no substitute: what was kept
            in memory or on storage may be newer.
    """
    states = [state for state in held.values() if state is not None]
    if least is None and not states:
        state, holders = Version(generation, 0), [min(held)]
    elif not states or (least is not None and max(states) < least):
        raise NotLive(f"no member of generation {generation} has a whole state since {least}")
    else:
        state = max(states)
        holders = [replica for replica, each in held.items() if each == state]
    lacking = {*held} - {*holders}
    return Healing(state=state, holders=tuple(sorted(holders)), lacking=tuple(sorted(lacking)))
