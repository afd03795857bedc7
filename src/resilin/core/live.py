"""Live membership: who is in each generation, and whose state its members continue with.

Members come and go while others keep running. An `Authority` outside of them numbers the
generations: it alone says who is in the job. A generation is formed when all of its members have
come to it, and only the newest one can be; a member never goes back to an earlier one. A step is
committed where its ballot, with all members of the generation in it, is complete. So:

- When a group breaks, some members may have committed its last step, and others not: they are at
  most one step apart. The next generation continues with the newest state of its members.
- A process that was taken for dead may have committed a step that the others have made again since.
  Of two states of the same step, that of the later generation wins: the generation of a `Version`
  is the one that committed its last step, not that of the member now.
- Every generation has a member of the last one that was formed. That member has left the older
  group, which can make no step without it: so two groups never both make steps.

Changes are of two kinds:

- A planned one (somebody joins, or is asked to leave) is announced on top of a generation that is
  formed, and takes effect after a step in whose ballot all members said that they know of it.
- After a loss, or when a group broke, members give their group up wherever they are, even in a
  collective outside of steps that a joiner would not make. So the next generation has nobody whom
  the last formed one has not. A planned change that was announced and not formed is taken back:
  joiners wait again, and whoever leaves stays a member, until it is announced anew on top.

This is the side of the authority; `core/forming.py` has that of a member. Nothing here sends or
waits: an engine does, and the simulator in `tests/protocol` tries histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resilin.core import _validate
from resilin.core.membership import Member, Roster
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
    waiting: tuple[Member, ...] = ()
    """Processes that have joined, and come with the next planned change."""
    leaving: frozenset[str] = frozenset()
    """Members that were asked to leave. They are until a generation without them is formed."""
    formed: Roster | None = None
    """The newest generation that was formed; None before the first one was."""
    state: Version | None = None
    """The state that it continued with."""
    least: Version | None = None
    """The state that the newest generation needs: `state` at the time of its announcement."""
    broken: int = -1
    """Newest generation that was given up because of a loss, or because its group broke."""
    revision: int = 0
    """Number of changes so far: of two announcements, the later one has the greater number."""

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

    def __contains__(self, name: str) -> bool:
        """Whether a process has a place in the job. If not, it has left or was removed."""
        waiting = (each.name for each in self.waiting)
        return name in self.roster.names or name in self.leaving or name in waiting

    @property
    def ends(self) -> bool:
        """Whether all members were asked to leave and nobody takes over: then the job stops."""
        return {*self.roster.names} <= self.leaving and not self.waiting

    # Events --------------------------------------------------------------------------------

    def join(self, member: Member) -> Authority:
        """Takes a process that is ready to join; a second call changes nothing.

        Raises:
            ValueError: It has another number of processes than the members have.
        """
        if member.name in self:
            return self
        sizes = len(member.hosts), len(self.roster.members[0].hosts)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{member.name} has {sizes[0]} processes, and must have {sizes[1]} as the members"
            )
        return replace(self, waiting=(*self.waiting, member))._plan()

    def leave(self, name: str) -> Authority:
        """Asks a member to leave: it makes steps until all members have seen that.

        If nobody would stay, nothing is announced until somebody joins: see `ends`.
        """
        if name in (each.name for each in self.waiting):
            return self.remove(name)
        if name not in self.roster.names:
            return self
        return replace(self, leaving=self.leaving | {name})._plan()

    def remove(self, name: str) -> Authority:
        """Announces a generation without this member, which is gone, or was not heard of.

        Somebody who is unknown changes nothing: two may report the same loss. One who is leaving
        has not waited until a generation without it is formed: that is a loss, too.

        Raises:
            NotLive: Nobody is left who has formed the newest generation.
        """
        if name not in self:
            return self
        waiting = tuple(each for each in self.waiting if each.name != name)
        rest = replace(self, waiting=waiting, leaving=self.leaving - {name})
        if name in (each.name for each in self._staying()):
            return rest._give_up(name)
        return rest._announce(rest._planned(name)) if name in self.roster.names else rest

    def renew(self, generation: int) -> Authority:
        """Announces the members of the last formed generation anew, for a group that broke.

        Nobody need be gone: one connection that was reset is enough.

        Args:
            generation: The generation whose group broke. All of its members may ask; the first one
                is heard.

        Raises:
            ValueError: There is no such generation yet.
        """
        newest = self.roster.generation
        if generation > newest:
            raise ValueError(f"generation ({generation}) must be at most the newest, {newest}")
        known = {newest} if self.formed is None else {newest, self.formed.generation}
        if generation <= self.broken or generation not in known:
            return self
        return self._give_up()

    def form(self, generation: int, names: Sequence[str], state: Version) -> Authority:
        """Takes the report that all members of the newest generation have come to it.

        Whoever reports makes a step only if `formed` is that generation then: it is not if there
        is a newer one.

        Args:
            generation: The generation.
            names: Its members.
            state: The state that they continue with.
        """
        if (generation, tuple(names)) != (self.roster.generation, self.roster.names):
            return self
        if self.formed == self.roster:
            return self
        # Whoever left has left: there is no older group any more in which it could make a step.
        leaving = self.leaving & {*names}
        return replace(self, formed=self.roster, state=state, leaving=leaving)._plan()

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

    # JSON ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The authority as JSON. Each member is in it once."""
        table: dict[Member, int] = {}
        for each in (*self.roster.members, *(self.formed or self.roster).members, *self.waiting):
            table.setdefault(each, len(table))

        def numbers(roster: Roster | None) -> list[Any] | None:
            if roster is None:
                return None
            return [roster.generation, roster.reformed, [table[each] for each in roster.members]]

        return {
            "identity": self.identity,
            "members": [_member_to_json(each) for each in table],
            "roster": numbers(self.roster),
            "waiting": [table[each] for each in self.waiting],
            "leaving": sorted(self.leaving),
            "formed": numbers(self.formed),
            "state": self.state and self.state.to_json(),
            "least": self.least and self.least.to_json(),
            "broken": self.broken,
            "revision": self.revision,
        }

    @classmethod
    def from_json(cls, state: Any) -> Authority:
        """The reverse of `to_json`.

        Raises:
            ValueError: It is something else.
        """
        try:
            members = [_member_from_json(each) for each in state["members"]]

            def roster(numbers: list[Any]) -> Roster:
                generation, reformed, places = numbers
                return Roster(
                    generation=_validate.whole("generation", generation, at_least=0),
                    members=tuple(members[place] for place in places),
                    reformed=bool(reformed),
                )

            return cls(
                identity=_validate.text("identity", state["identity"]),
                roster=roster(state["roster"]),
                waiting=tuple(members[place] for place in state["waiting"]),
                leaving=frozenset(_validate.texts("leaving", state["leaving"])),
                formed=state["formed"] and roster(state["formed"]),
                state=state["state"] and _version(state["state"]),
                least=state["least"] and _version(state["least"]),
                broken=_validate.whole("broken", state["broken"], at_least=-1),
                revision=_validate.whole("revision", state["revision"], at_least=0),
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not an authority as JSON: {error!r}") from None

    # Generations ---------------------------------------------------------------------------

    def _staying(self) -> list[Member]:
        """Members of the last formed generation that are not gone."""
        last = self.formed or self.roster
        here = {*self.roster.names, *self.leaving}
        return [each for each in last.members if each.name in here]

    def _joining(self) -> list[Member]:
        """Members that are announced, and that the last formed generation has not."""
        known = {*(self.formed or self.roster).names}
        return [each for each in self.roster.members if each.name not in known]

    def _plan(self) -> Authority:
        """Announces those who wait or leave, if the newest generation is formed."""
        if self.formed != self.roster:
            return self
        members = self._planned()
        return self if members == [*self.roster.members] else self._announce(members)

    def _planned(self, gone: str = "") -> list[Member]:
        joining = [each for each in (*self._joining(), *self.waiting) if each.name != gone]
        remaining = [each for each in self._staying() if each.name not in self.leaving]
        # If nobody would remain, those who leave hand over to the joiners first.
        return [*(remaining or self._staying()), *joining]

    def _give_up(self, gone: str = "") -> Authority:
        """Announces the last formed generation without those who are gone."""
        staying = [each for each in self._staying() if each.name != gone]
        joining = [*self._joining(), *self.waiting]
        if not staying:
            if self.formed is None or not joining:
                raise NotLive(
                    f"{gone}, the last member of generation {self.roster.generation}, left"
                )
            raise NotLive(
                f"no member of generation {self.formed.generation} is left, and of those that have "
                f"joined since ({', '.join(each.name for each in joining)}) none has its state"
            )
        given_up = replace(self, broken=self.roster.generation)._announce(staying)
        return replace(given_up, waiting=tuple(joining))

    def _announce(self, members: Iterable[Member]) -> Authority:
        roster = Roster(
            generation=self.roster.generation + 1, members=tuple(members), reformed=True
        )
        return replace(self, roster=roster, waiting=(), least=self.state)


# Events as data --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A process is ready to join."""

    member: Member
    """The process, as a member."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A member was asked to leave, and takes part until that takes effect."""

    name: str
    """Name of the member."""


@dataclass(frozen=True, slots=True)
class Remove:
    """A member is gone."""

    name: str
    """Name of the member."""


@dataclass(frozen=True, slots=True)
class Renew:
    """A group broke, though nobody need be gone."""

    generation: int
    """The generation of the group."""


@dataclass(frozen=True, slots=True)
class Form:
    """All members of a generation have come to it. Replica 0 reports that before its first step."""

    generation: int
    """The generation."""
    names: tuple[str, ...]
    """Its members."""
    state: Version
    """The state that they continue with."""


Event = Join | Leave | Remove | Renew | Form
"""Any of these."""


def apply(authority: Authority, event: Event) -> Authority:
    """The authority after an event; the same one if that changes nothing.

    Raises:
        NotLive: Nobody is left who has the state of the job.
        ValueError: The event cannot be one of this job.
    """
    after = _apply(authority, event)
    # A value that is the same, but not the one that there was, is no change.
    return authority if after == authority else replace(after, revision=authority.revision + 1)


def _apply(authority: Authority, event: Event) -> Authority:
    match event:
        case Join(member):
            return authority.join(member)
        case Leave(name):
            return authority.leave(name)
        case Remove(name):
            return authority.remove(name)
        case Renew(generation):
            return authority.renew(generation)
        case Form(generation, names, state):
            return authority.form(generation, names, state)


def event_to_json(event: Event) -> dict[str, Any]:
    """An event as JSON: its kind, and what it is about."""
    match event:
        case Join(member):
            return {"join": _member_to_json(member)}
        case Leave(name):
            return {"leave": name}
        case Remove(name):
            return {"remove": name}
        case Renew(generation):
            return {"renew": generation}
        case Form(generation, names, state):
            return {"form": [generation, list(names), state.to_json()]}


def event_from_json(state: Any) -> Event:
    """The reverse of `event_to_json`.

    Raises:
        ValueError: It is something else.
    """
    match state:
        case {"join": member, **rest} if not rest:
            return Join(_member_from_json(member))
        case {"leave": name, **rest} if not rest:
            return Leave(_validate.text("leave", name))
        case {"remove": name, **rest} if not rest:
            return Remove(_validate.text("remove", name))
        case {"renew": generation, **rest} if not rest:
            return Renew(_validate.whole("renew", generation, at_least=0))
        case {"form": [generation, names, version], **rest} if not rest:
            generation = _validate.whole("form", generation, at_least=0)
            return Form(generation, _validate.texts("form", names), _version(version))
        case _:
            raise ValueError(f"{state!r:.200} must be an event as JSON")


def _member_to_json(member: Member) -> list[Any]:
    return [member.name, member.address, list(member.hosts)]


def _member_from_json(state: Any) -> Member:
    if not isinstance(state, list) or len(state) != 3:
        raise ValueError(f"{state!r:.200} must be a member: its name, address and hosts")
    name, address, hosts = state
    return Member(
        name=_validate.text("name", name),
        address=_validate.text("address", address),
        hosts=_validate.texts("hosts", hosts),
    )


def _version(state: Any) -> Version:
    if not isinstance(state, list) or len(state) != 4:
        raise ValueError(f"{state!r:.200} must be a version: 4 whole numbers")
    return Version.from_json([_validate.whole("version", each, at_least=0) for each in state])
