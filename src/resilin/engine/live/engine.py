"""The engine of `resilin run --live`: survivors of a change keep their processes.

The launcher says who is in the job (`core/live.py`); this engine comes to the generations that it
announces (`forming`), and gives one up as soon as it is broken. Members change in two places. A
planned change takes effect where the next step begins, after a step in whose ballot all members
have seen it. A loss takes effect where it is noticed: in a step, which then fails and is issued
again, or in a question outside of steps, which is asked again of those that are left. The processes
of a copy of the model that is sharded notice it together (`copies`).
"""

from __future__ import annotations

import atexit
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import torch.distributed as dist

from resilin.core.forming import Left, all_have_seen, is_broken, sees_change
from resilin.core.live import Authority, Leave, NotLive
from resilin.core.membership import Membership
from resilin.core.recovery import Version
from resilin.engine import pulse
from resilin.engine.base import Engine
from resilin.engine.collectives import Begun, Collectives, Group
from resilin.engine.copies import CopyGroups, Place, all_agree
from resilin.engine.live.client import Client
from resilin.engine.live.closing import close
from resilin.engine.live.follower import Follower, Removed
from resilin.engine.live.forming import Generation, be_apart
from resilin.engine.lost import PeerLost
from resilin.engine.stop import BY_LAUNCHER, RESTART
from resilin.engine.watch import LastWords, Watch, abandon

logger = logging.getLogger("resilin")

T = TypeVar("T")

SIGN_OFF = 5.0
"""Seconds for which a member that leaves waits for the others to have left it."""
GRACE = 18.0
"""Seconds within which a process that was asked to stop has to end a step."""


class Training(Protocol):
    """The training of this process, as far as it follows changes of members."""

    def let_go(self) -> None:
        """Gives up all references to the groups of the present generation."""
        ...

    def heal(self) -> Version:
        """Gives all members of a generation that was just formed the newest state. Collective.

        Returns:
            That state.

        Raises:
            PeerLost: A member was lost meanwhile: it is called again in the next generation.
            NotLive: Nobody has it.
        """
        ...

    def hand_over(self, leaving: frozenset[int]) -> None:
        """Gives replicas that stay what those that leave have of their own. Collective."""
        ...

    def say_farewell(self) -> None:
        """Completes the reports of this process, which leaves."""
        ...


class Live(Engine):
    """A member of a job whose members change while it runs.

    Args:
        client: The connection to the launcher.
        place: The place of this process in a copy of the model.
    """

    def __init__(self, client: Client, place: Place) -> None:
        super().__init__()
        self.pulse = pulse.of_this_process()
        self.place = 0
        """Questions outside of steps that were answered since the last step was committed."""
        self.answer: object = None
        """The last answer, for a member that was lost to the others while it was given."""
        self.outside = False
        """Whether one is being asked after the script has left its last step behind."""
        self._client = client
        self._place = place
        self._follower = Follower(client, place)
        self._now: Generation | None = None
        self._agreed = False
        self._lost = False
        self._training: Training | None = None
        self._watch: Watch | None = None
        atexit.register(self._exit)
        client.on_change = self._hear
        client.on_stop = partial(self.stop.request, BY_LAUNCHER)

    # Who we are ----------------------------------------------------------------------------

    @property
    def changes(self) -> Live:
        """They are known to this engine."""
        return self

    @property
    def restartable(self) -> bool:
        """The launcher replaces this process when it dies."""
        return True

    @property
    def membership(self) -> Membership:
        """The generation that this process has come to.

        Before the first one it is alone, or among those that hold its copy of the model.
        """
        if self._membership is None:
            found = Membership()
            if self._now is not None:
                found = self._follower.membership(self._now.roster)
            elif self._place.size > 1 and dist.is_initialized():
                found = self.find_membership()
            self._membership = replace(found, generation=found.generation + self._generation)
        return self._membership

    def raise_generation(self, at_least: int) -> None:
        """Number all generations from here on above that of any earlier state."""
        missing = at_least - self.membership.generation
        if missing > 0:
            # The numbers of the authority begin at 0 in each life of the job.
            self._generation, self._membership = self._generation + missing, None

    @property
    def least(self) -> Version | None:
        """The state that the present generation needs; None if none was formed before it."""
        came = self._follower.came
        return None if came is None else came.least

    @property
    def name(self) -> str:
        """Name of this process among those of the members."""
        return self._place.name

    @property
    def log_name(self) -> str:
        """That of the member: numbers of replicas change while their processes run."""
        return f"member-{self.name}"

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the processes of the present generation, in the order of their numbers."""
        return () if self._now is None else self._place.names(self._now.roster.names)

    @property
    def processes_per_copy(self) -> int:
        """Processes that come and go together, because a copy of the model is sharded over them."""
        return self._place.size

    def copy_groups(self) -> CopyGroups | None:
        """Groups of the copies of a sharded model; None before this process has joined."""
        return None if self._now is None else self._now.copy

    @property
    def is_joining(self) -> bool:
        """Whether the job runs without this process, which has to be given its state."""
        return self._now is None

    # Coming and going ----------------------------------------------------------------------

    def come(self) -> None:
        """Come to the first generation of a job; into one that runs, later, with `join`.

        A process that comes later is alone until then: its script may build its model in peace.
        """
        if self._now is not None or dist.is_initialized():
            return
        newest = self._client.newest
        if newest is None:
            self._follower.joins()
        # One that speaks for this copy may have joined before this process has come.
        if (newest is None or self._place.member in newest) and self._follower.founds():
            self._reform()
            return
        be_apart(self._place)
        self._membership = None

    def begin(self, training: Training) -> None:
        """Take part in the job: what was built is complete. Members are healed from here on."""
        self._training = training
        if self._now is None:
            if self._place.size > 1:
                # The others wait for a member that has joined: all of its processes must be ready.
                dist.barrier()
            self._follower.joins()
            self._recover()

    def begin_step(self) -> Membership:
        """Comes to the next generation, if there is one to come to."""
        # Processes of a copy see that it is broken at different times: they wait for the next step
        # to fail, for all of them.
        broken = self._now is not None and self._now.broken and self._now.copy is None
        if self._agreed or self._lost or broken:
            self._recover()
        if self.stop.asked and self._num_members > 1:
            self._client.tell(Leave(self._place.member))
        return self.membership

    def all_took_part(self, here: bool) -> bool:
        """Whether the step under way is complete for all processes of this copy of the model."""
        complete = self._agree(here)
        self._lost = not complete
        return complete

    def _agree(self, done: bool) -> bool:
        """Whether all processes of this copy have done what others may have failed."""
        if self._now is None or self._now.copy is None:
            return done
        try:
            return all_agree(self._now.copy.shards, done)
        except PeerLost as lost:
            self._now.give_up(str(lost))
            return False

    @property
    def _num_members(self) -> int:
        return 1 if self._now is None else len(self._now.roster.members)

    @property
    def sees_change(self) -> bool:
        """Whether a newer generation than the present one is announced."""
        newest, came = self._client.newest, self._follower.came
        if newest is None or came is None:
            return False
        return sees_change(newest, came.roster.generation)

    def agree(self, votes: int) -> None:
        """Takes how many members have seen a newer generation, by the ballot of a step."""
        self._agreed = all_have_seen(votes, self.membership.num_replicas)

    def committed(self) -> None:
        """A step was committed: questions are counted from here."""
        self.place = 0

    def stops(self, votes: float) -> bool:
        """Whether the whole job stops: all members were asked to. Else those who were leave."""
        if self._num_members == 1:
            return votes > 0
        return votes == self.membership.num_replicas

    def formed(self, state: Version) -> None:
        """Waits until the authority has heard that the generation is formed, and with which state.

        Raises:
            PeerLost: There is a newer one.
        """
        assert self._now is not None
        self._follower.report(self._now.roster, self.membership.replica, state)

    def ask(self, question: Callable[[Collectives], T], *, between_steps: bool = False) -> T:
        """Asks a question outside of steps, and again of those that are left if one is lost.

        Members that lose another one in a question may have its answer, or not: whoever has it
        gives it to the others in `Training.heal`.

        Args:
            question: Asks all members; its answer is JSON.
            between_steps: Whether the script has done nothing since the last step: a member that
                has lost that one can be healed.
        """
        if self._now is None:
            # Not refused: a script may well evaluate its model before it trains.
            logger.warning(
                "%s asks all replicas something before its first batch, with which it joins them: "
                "it is alone until then, and the answer is its own",
                self.name,
            )
        place = self.place
        while self.place == place:
            lost = self._try_to_ask(question)
            if lost is not None:
                if self._training is None:
                    self.restart(f"a member was lost while the job started ({lost})")
                # Nobody joins here: a joiner would not ask this question.
                self._agreed, self.outside = False, not between_steps
                self._recover()
                self.outside = False
        return self.answer  # type: ignore[return-value]

    def _try_to_ask(self, question: Callable[[Collectives], T]) -> PeerLost | None:
        answer, failed = self.answer, None
        try:
            answer = question(self.collectives())
        except PeerLost as lost:
            failed = lost
        if not self._agree(failed is None):
            return failed or PeerLost("another process of this copy has lost the answer")
        self.answer = answer
        self.place += 1
        return None

    def _recover(self) -> None:
        assert self._training is not None
        self._say_goodbye()
        if self._now is not None and self._now.broken:
            logger.debug("generation %d ends: %s", self.membership.generation, self._now.broken)
        formed = False
        while not formed:
            self._training.let_go()
            self._reform()
            try:
                self.formed(self._training.heal())
                formed = True
            except PeerLost as lost:
                logger.debug("healing ends: %s", lost)
            except NotLive as error:
                self.restart(str(error))
            formed = self._agree(formed)

    def _say_goodbye(self) -> None:
        """Gives up the present generation after a planned change: nothing of it is lost."""
        newest, now = self._client.newest, self._now
        if not self._agreed or now is None or newest is None or now.broken:
            return
        assert self._training is not None
        names = [name for name in now.roster.names for _ in range(self._place.size)]
        gone = {i for i, name in enumerate(names) if name not in newest.roster.names}
        leaving = frozenset(gone) if newest.roster.generation > now.roster.generation else None
        if not leaving:
            return
        try:
            self._training.hand_over(leaving)
        except PeerLost:
            return
        if self.membership.replica in leaving:
            self._leave()

    def _leave(self) -> NoReturn:
        assert self._training is not None
        self._training.say_farewell()
        # Connections stay open until the others have left them. Should one of those be lost, this
        # is a member again, and gone: the others continue without its state, which they have.
        name = self._place.member
        self._client.wait(lambda a: name not in a or name in a.roster.names, SIGN_OFF)
        reason = self.stop.reason or "another process of its copy was asked to"
        logger.info("%s left the job (%s)", self.name, reason)
        self._sign_off()
        raise SystemExit(self.stop.exit_code if self.stop.asked else 128 + signal.SIGTERM)

    def _reform(self) -> None:
        """Comes to the newest generation, or to a later one if that is never formed."""
        left: Left = "agreed" if self._agreed else "forming" if self._now is None else "broke"
        self._agreed = self._lost = False
        try:
            formed = self._follower.come(left)
        except NotLive as error:
            self.restart(str(error))
        except Removed as error:
            self.be_replaced(str(error))
        old, self._now, self._membership = self._now, formed, None
        if old is not None:
            close(old.groups.values(), old.listeners)
        del old
        newest = self._client.newest
        assert newest is not None
        self._hear(newest)

    def _hear(self, newest: Authority) -> None:
        """Called by the thread of the connection when something is announced."""
        now = self._now
        if now is not None and is_broken(now.roster, newest):
            gone = {*now.roster.names} - {*newest.roster.names} - newest.leaving
            now.give_up(f"{', '.join(sorted(gone)) or 'a connection'} is gone")

    def restart(self, reason: str) -> NoReturn:
        """Ends this process, and has all others ended: the job is restarted from what was kept."""
        self.unwatch()
        self._client.restart(reason)
        self._client.close()
        logger.warning("the job cannot continue live, and is restarted: %s", reason)
        raise SystemExit(RESTART)

    # Groups --------------------------------------------------------------------------------

    def wait(self, work: Begun) -> None:
        """Waits for a collective of the gradients, until the generation is broken."""
        assert self._now is not None
        try:
            self._now.wait(work)
        except PeerLost as lost:
            if self._training is None:
                # Scripts are still being set up: no state is there that could be continued.
                self.restart(f"a member was lost while the job started ({lost})")
            raise

    def refused(self, error: RuntimeError) -> RuntimeError:
        """The error to raise for a collective that was not begun: `PeerLost` if one is gone."""
        return error if self._now is None else self._now.refused(error)

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The group of the gradients; None for a replica that is alone."""
        if not dist.is_initialized():
            raise RuntimeError(
                "in a live job, resilin.init_process_group() must come before the model is "
                "wrapped: members begin with the same parameters"
            )
        return None if self._now is None else self._now.groups.get("gradients")

    def host_group(self) -> dist.ProcessGroup | None:
        """The same: it takes tensors on the host."""
        return self.gradient_group()

    def group(self, purpose: str) -> Group | None:
        """The group of one purpose, made when the generation was formed."""
        return None if self._now is None else self._now.guarded(purpose)

    # Supervision and the end ---------------------------------------------------------------

    @property
    def grace(self) -> float:
        """Seconds from a request to stop until this process must have exited."""
        return GRACE

    def orphaned(self) -> bool:
        """Whether the launcher is gone."""
        return self._client.lost

    def watch(self, last_words: LastWords) -> None:
        """Watch the launcher. Other members are the authority's concern."""
        if self._watch is None:
            self._watch = Watch(self, [], partial(abandon, self.stop, last_words))

    def unwatch(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def finish(self) -> None:
        """Wait until no member needs another one any more. Collective.

        The launcher is told when the script ends: it may train again.
        """
        self.ask(lambda members: members.gather(None))

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this process after all members have agreed to stop."""
        self._sign_off()
        raise SystemExit(self.stop.exit_code)

    def _exit(self) -> None:
        """Tells the launcher that the script has ended, also where no loop of resilin's has.

        After an error nobody is told; neither if this process was to be replaced or restarted.
        """
        if getattr(sys, "last_value", None) is None and self._training is not None:
            self.unwatch()  # which would take the connection that is closed for one that is lost
            self._client.finished()
            self._client.close()

    def be_replaced(self, reason: str) -> NoReturn:
        """Ends this process; the launcher starts another one, which joins."""
        self.unwatch()
        self._client.close()
        logger.warning("%s is replaced by a new process: %s", self.name, reason)
        raise SystemExit(RESTART)

    def _sign_off(self) -> None:
        """Ends the connection; the exit code tells the launcher that this process has left."""
        self.unwatch()
        self._client.close()
