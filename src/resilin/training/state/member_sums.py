"""Sums of members that leave or die: those that stay take them over.

Each replica has a part of an Accumulator, and the sum over all of them must not shrink with the
members. A member that leaves hands its part over; that of one that dies is read from the memory of
its host (`sums_file`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from resilin.engine.base import Engine
from resilin.training.state.registry import Registry
from resilin.training.state.replica_parts import add_up
from resilin.training.state.snapshot import Json, join
from resilin.training.state.sums_file import SumsFile, forget, read
from resilin.training.timeline import Timeline

logger = logging.getLogger("resilin")


class MemberSums:
    """The sums of this member, and of those whose sums it takes over.

    Args:
        engine: Who is in the job.
        registry: Has the sums.
        timeline: The clock of the job.
        directory: A directory in the memory of the host; None if there is none.
        member: Name of this member.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        timeline: Timeline,
        directory: Path | None,
        member: str,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._timeline = timeline
        self._directory = directory
        self._file = SumsFile(directory, member)
        self._begun = timeline.clock.steps
        self._read = False
        self.members: tuple[str, ...] = ()
        """Members whose sums are known to be their own, by replica."""

    def step_begins(self) -> None:
        """Keeps the sums as they are before a step."""
        self._begun, self._read = self._timeline.clock.steps, False
        self._file.step_begins(self._begun, self._registry.take_sums)

    def read(self) -> None:
        """All members have read some sums, which a script may clear now: each in its own time."""
        self._read = True

    def changed(self) -> None:
        """Keeps the sums as they are now."""
        self._file.changed(self._begun + 1, self._registry.take_sums)

    def hand_over(self, leaving: frozenset[int]) -> None:
        """Gives the first replica that stays the sums of those that leave. Collective."""
        me = self._engine.membership
        mine = self._take() if me.replica in leaving else {}
        everyone = self._engine.gather(mine)
        first = min(set(range(me.num_replicas)) - leaving)
        if me.replica == first:
            self._add([everyone[replica] for replica in sorted(leaving)])
        stay = (name for replica, name in enumerate(self.members) if replica not in leaving)
        self.members = tuple(stay)

    def take_over(self, members: tuple[str, ...], steps: int, *, outside: bool) -> None:
        """Takes over the sums of members that died, where somebody can read them. Collective.

        Args:
            members: The members now.
            steps: Steps committed by the state that all of them have.
            outside: Whether they died outside of steps.
        """
        me, directory = self._engine.membership, self._directory
        gone = [name for name in self.members if name not in members]
        mine = {} if directory is None else _find(gone, directory, steps)
        said = [gone if self.members else None, sorted(mine), self._read]
        everyone = self._engine.gather(said)
        self.members = members
        # Whether one that died would have cleared them by now, nobody knows.
        unclear = any(read for *_, read in everyone)
        # Whoever does not miss one any more has seen its sums taken over, before another loss.
        known = [set(each) for each, *_ in everyone if each is not None]
        for name in sorted(set.intersection(*known)) if known else ():
            finders = [replica for replica, (_, found, _) in enumerate(everyone) if name in found]
            finders, whole = ([] if unclear else finders), True
            if directory is not None and finders[:1] == [me.replica]:
                self._add([mine[name].sums])
                self._file.step_begins(steps, self._registry.take_sums)
                forget(directory, name)
                whole = mine[name].whole or not mine[name].sums
            lacking = me.is_first and (outside or not finders) and bool(self._take())
            if lacking or not whole:
                logger.warning(
                    "Accumulators continue without what %s added %s",
                    name,
                    "in its last step" if finders else "since the last synchronized()",
                )

    def _take(self) -> dict[str, Json]:
        return self._registry.take_sums(self._timeline.epoch)

    def _add(self, sums: Sequence[dict[str, Json]]) -> None:
        for name, tree in add_up([self._take(), *sums]).items():
            summed = self._registry.summed.get(name)
            if summed is not None:
                summed.load_state_dict({"sums": join(tree, {})})


class _Found(NamedTuple):
    """The sums of a member that is gone."""

    sums: dict[str, Json]
    """By name."""
    whole: bool
    """Whether those of its last step are in them: not if it died in it."""


def _find(gone: Sequence[str], directory: Path, steps: int) -> dict[str, _Found]:
    """The sums that this host has of members that are gone, by their names."""
    found: dict[str, _Found] = {}
    for name in gone:
        sums, last = read(directory, name, steps), read(directory, name, steps - 1)
        if sums is not None:
            found[name] = _Found(sums, whole=True)
        elif last is not None:
            found[name] = _Found(last, whole=False)
    return found
