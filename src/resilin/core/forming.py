"""Decisions of one member of a live job: when it gives its group up, and whose state it takes.

Each member makes them on its own, from what the authority has announced (`core/live.py`) and from
numbers that all members of its generation have: so all of them decide the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from resilin.core.live import Authority, NotLive
from resilin.core.membership import Roster
from resilin.core.recovery import Version

# Which generation -------------------------------------------------------------------------------


def sees_change(newest: Authority, present: int) -> bool:
    """Whether a member says in its ballot that it knows of a newer generation.

    Args:
        newest: What it knows of.
        present: The newest generation that it has come to.
    """
    return newest.roster.generation > present


def all_have_seen(votes: int, members: int) -> bool:
    """Whether a planned change takes effect after this step: all members know of it.

    Each adds to its ballot whether it knows of a newer generation. Nobody waits for anybody, and
    no step is lost: until all have seen it, the old group continues.

    Args:
        votes: Members that have.
        members: All members of the generation.
    """
    return votes == members


def is_broken(group: Roster, newest: Authority) -> bool:
    """Whether a group cannot complete another step, and all of its members give it up at once.

    They break it off, whatever they wait for: a member that is frozen closes no connection.

    Args:
        group: The generation that the group is of.
        newest: What is known.
    """
    gone = {*group.names} - {*newest.roster.names} - newest.leaving
    return group.generation <= newest.broken or bool(gone)


Left = Literal["agreed", "broke", "forming"]
"""State of a member without a group: all left theirs after a step, it broke, or it is being formed.

The first time, a member has none: that is `forming`.
"""
Move = Literal["come", "wait", "renew", "out"]
"""Next move of such a member: come to the newest generation, wait for news, ask for a new one
(`Renew`), or end, because it has left or was removed."""


def next_move(
    name: str, newest: Authority, present: Roster | None, left: Left, *, joined: bool = False
) -> Move:
    """The next move of a member without a group, after each announcement.

    A member whose group broke does not come to a planned generation: it may have joiners, who come
    between steps alone. That holds for one that leaves, too: others may wait for it.

    Args:
        name: Name of the member.
        newest: What it knows of.
        present: The newest generation that it has come to, and to which it does not come again;
            None for a joiner.
        left: State of that one's group.
        joined: Whether any announcement has had it. Before that, a joiner is not gone: others may
            be announced before its `Join` is taken.
    """
    if name not in newest:
        return "out" if joined or present is not None else "wait"
    if present is None:
        return "come" if name in newest.roster.names else "wait"
    if left == "agreed" or is_broken(present, newest):
        newer = sees_change(newest, present.generation) and name in newest.roster.names
        return "come" if newer else "wait"
    return "renew" if left == "broke" else "wait"


def reports(replica: int) -> bool:
    """Whether a member tells the authority that its generation is formed, before all continue.

    One does, and nobody continues with the script before it has and was heard (`formed` is that
    generation then): so the authority knows of every generation that has made a step, and of the
    state that it began with. A joiner of one that was given up before has not run its script, and
    waits to be announced again.

    Args:
        replica: Number of the member.
    """
    return replica == 0


# Whose state -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """The transfer of the state to those that lack it, in a generation that was just formed."""

    state: Version
    """The state that all members have afterwards."""
    holders: tuple[int, ...]
    """Processes that have it, or their part of it, in order; each sends a share."""
    lacking: tuple[int, ...]
    """Processes that get it. They hold nothing until they have all of it: see `heal`."""


def heal(
    generation: int,
    held: Mapping[int, Version | None],
    least: Version | None,
    processes_per_copy: int = 1,
) -> Healing:
    """The healing of a generation, computed alike by all of its members.

    A member that begins to load a state loses its own. It holds nothing until it has all of it,
    however that ends: otherwise half a state could win after the next loss.

    If a copy of the model is sharded over several processes, each of them holds the part of its
    place, and a state can be had if every part of it is held by somebody.

    Args:
        generation: The generation.
        held: What each process holds, in the order of their numbers; None if it has just been made,
            or was interrupted while it loaded a state.
        least: The state that this generation needs, of the announcement that the member came with
            (`Authority.least`). None if no generation was formed before: then the job begins, with
            the objects of the first copy.
        processes_per_copy: Processes over which each copy of the model is sharded: 1 if it is not.

    Raises:
        NotLive: Nobody has that state or a newer one. An older one is no substitute: what was kept
            in memory or on storage may be newer.
    """
    places: dict[Version, set[int]] = {}
    for process, each in held.items():
        if each is not None:
            places.setdefault(each, set()).add(process % processes_per_copy)
    states = [state for state, parts in places.items() if len(parts) == processes_per_copy]
    if least is None and not places:
        state, holders = Version(generation, 0), sorted(held)[:processes_per_copy]
    elif not states or (least is not None and max(states) < least):
        raise NotLive(f"no member of generation {generation} has a whole state since {least}")
    else:
        state = max(states)
        holders = [process for process, each in held.items() if each == state]
    lacking = {*held} - {*holders}
    return Healing(state=state, holders=tuple(sorted(holders)), lacking=tuple(sorted(lacking)))
