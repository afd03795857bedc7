"""The state of a replica while members come and go: healed, rolled back, handed over.

The engine calls this when a generation was formed. All members say which state they hold; those
that lack the newest one get it from those that have it. Members differ by one step at most. A
member that lost a step which others have committed keeps the side effects of its body: its samples
are in the model. If nobody has committed it, all take them back, and it is issued again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from resilin.core.forming import Healing, heal
from resilin.core.recovery import Version
from resilin.engine.lost import PeerLost
from resilin.training.state.body import Body
from resilin.training.state.member_sums import MemberSums
from resilin.training.state.recovery import Recovery
from resilin.training.state.shards import Held, Sharded
from resilin.training.state.snapshot import Json, Snapshot
from resilin.training.state.transfer import transfer

if TYPE_CHECKING:
    from resilin.engine.live.engine import Live
    from resilin.training.job import Job

logger = logging.getLogger("resilin")


class LiveState:
    """Keeps the state of this replica that of the job; a voter.

    Args:
        job: The job.
        changes: The engine, which knows the changes of its members.
    """

    def __init__(self, job: Job, changes: Live) -> None:
        self._job = job
        self._engine, self._registry, self._timeline = job.engine, job.registry, job.timeline
        self._body = Body(job)
        self._changes = changes
        self._recovery: Recovery | None = None
        self._sums: MemberSums | None = None
        self._members: tuple[str, ...] = ()
        self._whole = False
        self._lost = False
        self._since = 0.0

    def start(self, recovery: Recovery) -> None:
        """Starts a member: with the others of a new job, or healed by those of a running one.

        Args:
            recovery: Keeps and restores the state of the job.
        """
        changes, timeline = self._changes, self._timeline
        self._recovery = recovery
        self._sums = MemberSums(
            self._engine, self._registry, timeline, recovery.directory, changes.name
        )

        if changes.is_joining:
            changes.begin(self)
            return
        try:
            recovery.start()
        except PeerLost as lost:
            changes.restart(f"a member was lost while the job started ({lost})")
        timeline.committed_in = self._engine.membership.generation
        self._whole = True
        self._members = self._sums.members = changes.members
        changes.begin(self)
        # If there is a newer generation already, the first step comes to it.
        with contextlib.suppress(PeerLost):
            changes.formed(Version(timeline.committed_in, timeline.clock.steps))

    def say_farewell(self) -> None:
        """Completes the reports of this process, which leaves."""
        if self._recovery is not None:
            self._recovery.end_early()
        if self._job.recorder is not None:
            self._job.recorder.close()

    # In steps ------------------------------------------------------------------------------

    def votes(self) -> tuple[float, ...]:
        """Whether this member knows of a newer generation."""
        return (float(self._changes.sees_change),)

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes how many do."""
        self._changes.agree(round(votes[0]))

    def step_begins(self) -> None:
        """The body of a step begins."""
        assert self._sums is not None
        self._lost = False
        self._sums.step_begins()
        self._body.begins()

    def sums_read(self) -> None:
        """The sums of an Accumulator were read on all replicas."""
        if self._sums is not None:
            self._sums.read()

    def sums_changed(self) -> None:
        """A sum of this replica was added to."""
        if self._sums is not None:
            self._sums.changed()

    def step_lost(self) -> None:
        """The step under way is lost here; others may have committed it."""
        self._lost = True

    # Changes of members --------------------------------------------------------------------

    def let_go(self) -> None:
        """Gives up the groups of the present generation."""
        self._since = time.monotonic()
        if (trained := self._job.trained) is not None:
            trained.let_go()
        if self._recovery is not None:
            self._recovery.let_go()

    def hand_over(self, leaving: frozenset[int]) -> None:
        """Gives those that stay the sums of those that leave. Collective."""
        assert self._sums is not None
        self._sums.hand_over(leaving)

    def heal(self) -> Version:
        """Gives all members of a generation the newest state. Collective."""
        engine, changes, recovery, sums = self._engine, self._changes, self._recovery, self._sums
        assert recovery is not None
        assert sums is not None
        if (trained := self._job.trained) is not None:
            # Before any state is taken: which part of it a process holds depends on them.
            trained.follow_copies()
        held = self._held()
        said = [held and held.to_json(), changes.place, changes.outside]
        everyone = engine.gather([*said, engine.membership.generation, recovery.branch])
        engine.raise_generation(max(each[3] for each in everyone))
        me = engine.membership
        versions = {i: each[0] and Version.from_json(each[0]) for i, each in enumerate(everyone)}
        healing = heal(me.generation, versions, changes.least, engine.processes_per_copy)
        holders = [everyone[replica] for replica in healing.holders]
        left_behind = any(outside for _, _, outside, *_ in holders)
        if me.replica in healing.lacking and held is not None and left_behind:
            # What their scripts have done since, as a step of a scheduler, is in their state, and
            # this script would do it again.
            changes.be_replaced(
                f"it lost step {held.step + 1}, and others have left the loop since"
            )
        if self._lost and held is not None and held.step == healing.state.step:
            self._body.take_back()
        self._lost = False
        if healing.lacking:
            self._transfer(healing, joins=held is None)
        self._give_answer([place for _, place, *_ in holders], healing.holders)
        sums.take_over(
            changes.members, healing.state.step, outside=any(each[2] for each in everyone)
        )
        self._timeline.committed_in = healing.state.generation
        recovery.reformed(healing.state, holders[0][4], joins=held is None)
        self._tell(healing)
        return healing.state

    def _held(self) -> Version | None:
        """The state of this replica, by the generation that committed it; None for none."""
        if not self._whole:
            return None
        # Without the epoch: members of one step are in the same one, or only count it.
        return Version(self._timeline.committed_in, self._timeline.clock.steps)

    def _transfer(self, healing: Healing, *, joins: bool) -> None:
        registry, timeline, state = self._registry, self._timeline, healing.state
        mine: Snapshot | None = None
        if self._engine.membership.replica in healing.holders:
            taken = registry.take(state)
            tensors = {name: _sendable(held) for name, held in taken.tensors.items()}
            mine = replace(taken, tensors=tensors)
        else:
            # Half a state must never win over a whole one.
            self._whole = False
        # A process that holds its part needs nothing of the others.
        wanted = registry.wanted if mine is None else lambda stored: dict.fromkeys(stored, ())
        snapshot = transfer(self._engine, mine, state, wanted)
        if mine is not None:
            return
        assert snapshot is not None
        epoch = timeline.epoch
        if not joins:
            own = registry.take_own()
            snapshot.tree.update(own.tree)
            snapshot.tensors.update(own.tensors)
            snapshot.tree.update(registry.take_sums(epoch))
        registry.restore(snapshot, first_replica=not joins)
        if not joins:
            timeline.epoch = epoch
        self._whole = True

    def _give_answer(self, places: Sequence[int], holders: Sequence[int]) -> None:
        """Gives the answer of a question to those that were lost to the others in it."""
        changes, place = self._changes, max(places)
        if min(places) < place:
            answer: Json = self._engine.broadcast(changes.answer, holders[places.index(place)])
            if self._engine.membership.replica in holders:
                changes.answer = answer
        changes.place = place

    def _tell(self, healing: Healing) -> None:
        seconds = time.monotonic() - self._since
        # Not those of the sums: who leaves has handed its own over, and is no member to them.
        before, self._members = self._members, self._changes.members
        text = _in_words(before, self._members, healing)
        me = self._engine.membership
        if me.is_first:
            # Who left and who joined is told by the launcher, with the numbers of the workers.
            healed = _healed(before, self._members, healing)
            logger.info(
                "%s%d replica%s continue%s from step %d after %.2f s",
                f"{healed}; " if healed else "",
                me.num_replicas,
                "s" * (me.num_replicas > 1),
                "s" * (me.num_replicas == 1),
                healing.state.step,
                seconds,
            )
        if self._job.recorder is not None:
            self._job.recorder.reformed(len(before), text, seconds)


def _sendable(held: Held) -> Held:
    return held if isinstance(held, Sharded) else held.detach().cpu().contiguous()


def _in_words(before: Sequence[str], now: Sequence[str], healing: Healing) -> str:
    """The change of the members, in words."""
    changes = (
        (sorted(set(before) - set(now)), "left"),
        (sorted(set(now) - set(before)), "joined"),
    )
    said = [f"{', '.join(names)} {what}" for names, what in changes if names]
    healed = _healed(before, now, healing)
    return "; ".join([*said, healed] if healed else said) or "the same members again"


def _healed(before: Sequence[str], now: Sequence[str], healing: Healing) -> str:
    """Names of former members that were given the state of the others; empty for none."""
    names = [now[replica] for replica in healing.lacking if now[replica] in before]
    return f"{', '.join(names)} had lost a step" if names else ""
