"""Recovery: keeps the state of the job between steps, and restores it when the job starts.

Between any two steps the replicas keep a copy in memory, save a checkpoint when one is due, and
stop together when one of them was asked to. What is due is decided in the ballot of the step, so
all replicas do the same. When a job starts, it resumes the newest state that any replica can find:
a memory copy on any host, or else the newest checkpoint that is whole.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resilin.engine import environment
from resilin.engine.watch import PEER_GONE
from resilin.training.state import startup
from resilin.training.state.checkpoint_schedule import CheckpointSchedule
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.memory_schedule import MemorySchedule
from resilin.training.state.risk import RiskReport
from resilin.training.state.settings import StateSettings, memory_directory
from resilin.training.state.snapshot import Version

if TYPE_CHECKING:
    from resilin.training.job import Job

logger = logging.getLogger("resilin")

ATTEMPTS = 3
"""Attempts at the last checkpoint of a job, each of which may lose a member."""


class Recovery:
    """Keeps and restores the state of one job; a voter.

    Args:
        job: The job.
        settings: Where state is kept, and how often.
    """

    def __init__(self, job: Job, settings: StateSettings) -> None:
        self._job = job
        self._engine = engine = job.engine
        self._registry = registry = job.registry
        self._timeline = job.timeline
        events = job.events
        self._saves = CheckpointSchedule(settings, engine, registry, events)
        directory = memory_directory(engine, settings)
        memory = (
            None if directory is None else MemoryCopies(directory, holders=settings.memory_holders)
        )
        self._holders = settings.memory_holders
        self._copies = MemorySchedule(memory, settings.memory_every, engine, registry)
        self._risk = RiskReport(self._copies, events)
        self._start = startup.Start()
        self._seen: Version | None = None
        self._counted: tuple[float, ...] = ()
        self._listening = False
        self._finish_registered = False
        # A live job has a state that its members give each other, also if it keeps none.
        self.active = engine.live or memory is not None or self._saves.checkpoints is not None
        """Whether any replica can save state."""

    @property
    def resumed(self) -> Version | None:
        """The state that the job resumed from; None for a new job."""
        return self._start.resumed

    @property
    def resumed_from(self) -> str:
        """The same as text; empty for a new job."""
        version = self._start.resumed
        return "" if version is None else f"step {version.step} ({self._start.source})"

    # The start -----------------------------------------------------------------------------

    def start(self) -> None:
        """Restores the newest state that any replica can find. Collective."""
        engine = self._engine
        if engine.restartable:
            # A host without copies takes part too.
            self.active = any(engine.gather(self.active))
        if not self.active:
            if engine.restartable and engine.membership.is_first:
                logger.warning(
                    "neither memory copies nor checkpoints are made: a lost worker costs the whole "
                    "run"
                )
            return
        self._saves.prepare()
        self._start = start = startup.start(
            engine,
            self._registry,
            self._copies.memory,
            self._saves.checkpoints,
            steps=self._timeline.clock.steps,
        )
        self._seen = self._version()
        from_checkpoint = start.source == "checkpoint"
        self._saves.start(self._seen.step, start.resumed, from_checkpoint=from_checkpoint)
        self._copies.resumed = start.resumed
        self._copies.form(self._holders)
        if not from_checkpoint and not start.in_memory:
            # What is in the memory of all hosts, or on storage, is not written again.
            self._copies.keep(self._seen)
            # Before the first step: another job that writes to the same files is found out here.
            self._copies.wait()
        self.listen()
        self._copies.step_begins()

    @property
    def directory(self) -> Path | None:
        """Directory of this host's memory copies; None if there are none."""
        return None if self._copies.memory is None else self._copies.memory.directory

    @property
    def branch(self) -> int:
        """Random number of the start of the job, the same on all replicas."""
        return self._start.branch

    def let_go(self) -> None:
        """Gives up the groups of a generation that is over."""
        self._saves.let_go()

    def reformed(self, state: Version, branch: int, *, joins: bool) -> None:
        """Continues in a generation that was formed by members of which some kept running.

        Args:
            state: The state that all of them have.
            branch: That of the start of the job.
            joins: Whether this replica has just come, and has got that state.
        """
        if joins:
            self._start = startup.Start(branch=branch, resumed=state, source="peers")
            self._saves.start(state.step, state, from_checkpoint=False)
        self._saves.prepare()
        self._seen = self._version()
        self._copies.reformed(self._seen)
        self._copies.form(self._holders)
        self.listen()
        self._copies.step_begins()

    def end_early(self) -> None:
        """Ends what this process does for the job, which continues without it."""
        self._engine.unwatch()
        self._copies.wait()

    def listen(self) -> None:
        """Treat signals as requests to stop, and watch this replica. Collective."""
        if not self.active or self._listening:
            return
        self._listening = True
        # Ctrl-C under a launcher is the launcher's.
        self._engine.stop.listen(interrupts=not self._engine.restartable)
        self._engine.watch(self._last_words)

    # Between steps -------------------------------------------------------------------------

    def votes(self, ahead: int = 1) -> tuple[float, ...]:
        """This replica's part of a ballot: stop, save, copy, and whether its last copy failed.

        The ballot of a replica says that its last copy is complete, or has failed: it waits for
        the thread that writes it.

        Args:
            ahead: Steps that will be committed between this and when the votes are counted.
        """
        steps = self._timeline.clock.steps + ahead
        stop, save = float(self._engine.stop.asked), float(self._saves.is_due(steps))
        return stop, save, *self._copies.votes()

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes the sums of all replicas' votes in the step that ends now."""
        self._counted = votes

    def between_steps(self) -> None:
        """Copy, save or stop, as the replicas have agreed in the ballot of the last step."""
        version = self._version()
        if not self.active or version == self._seen:
            return
        votes, self._counted = self._counted, ()
        self._settle(version, votes)

    def between_epochs(self) -> None:
        """The same between two epochs, where there was no ballot: the replicas ask each other."""
        if not self.active:
            return
        everyone = self._engine.ask(lambda members: members.gather(self.votes(ahead=0)))
        self._settle(self._version(), tuple(map(sum, zip(*everyone, strict=True))))

    def _version(self) -> Version:
        now = self._timeline
        # That of now, also if an earlier one has committed the last step: the present one has
        # begun with it, and each generation has its own files.
        return Version(
            self._engine.membership.generation, now.clock.steps, now.epoch, self._start.branch
        )

    def _settle(self, version: Version, votes: tuple[float, ...]) -> None:
        self._engine.require_members()
        self._seen = version
        self._copies.step_ends()
        stop, save, copy, failed = votes or (0.0, 0.0, 0.0, 1.0)
        self._registry.warn_of_unclaimed()
        self._saves.report_ended()
        self._copies.counted(copy, failed)
        if self._engine.membership.is_first and not self._engine.live:
            # A live job continues with the state of its members.
            self._risk.update(self.at_risk)
        stops = self._engine.stops(stop)
        if self._copies.is_due(version.step, stopping=stops):
            self._copies.keep(version)
        if stops:
            self._stop(version)
        if save:
            self._saves.begin(version)
        self._copies.step_begins()

    @property
    def at_risk(self) -> int:
        """Largest number of completed steps that a lost worker can cost.

        With memory copies that is their interval minus one. Without, it is the steps since the last
        checkpoint. It holds while a host with a copy is alive; of tensors that are split, while
        each part of them is on one that is.
        """
        steps = self._copies.at_risk
        if steps is None:
            return self._timeline.clock.steps - self._saves.committed_step
        return steps

    # The end -------------------------------------------------------------------------------

    def _stop(self, version: Version) -> None:
        """Save and exit; all replicas are at the same step."""
        engine = self._engine
        reason = engine.stop.reason or "another replica was asked to stop"
        engine.unwatch()
        self._copies.wait()
        self._saves.save(version)
        if engine.membership.is_first and not (engine.pulse.shown and engine.stop.reported):
            # Otherwise the launcher reports it, with the signal that it got.
            logger.info("stopped at step %d (%s)", version.step, reason)
        if self._job.recorder is not None:
            self._job.recorder.close()
        engine.leave(asked=engine.stop.asked)

    def _last_words(self, reason: str, deadline_passed: bool) -> None:
        """Called by another thread before this process is ended: its main thread may be stuck."""
        # A copy that was begun is completed first.
        self._copies.lock.acquire(timeout=10)
        # The agent reports a worker that is gone; this one only follows it.
        reported = reason == PEER_GONE and self._engine.pulse.shown
        level = logging.DEBUG if reported else logging.WARNING
        logger.log(level, "replica %d exits: %s", self._engine.membership.replica, reason)
        memory = self._copies.memory
        try:
            if deadline_passed and self._engine.membership.is_first and memory is not None:
                self._saves.save_from_memory(memory)
        except Exception:
            logger.exception("the memory copy was not saved")
        if self._job.recorder is not None:
            self._job.recorder.flush()

    @property
    def listening(self) -> bool:
        """Whether there is state to keep, and the training is not over."""
        return self.active and self._listening

    def finish(self) -> None:
        """The job is done: its last state is saved, and memory is given back when it exits."""
        if not self.listening:
            return
        self._engine.require_members()
        self._copies.wait()
        self._save_last()
        self._end(forgets=True)

    def leave(self) -> bool:
        """All replicas have left the loop: the last state is saved, or kept in memory. Collective.

        Returns:
            Whether it is on storage.
        """
        self._engine.require_members()
        self._copies.wait()
        saved = self._save_last() and self._saves.checkpoints is not None
        if not saved:
            self._copies.keep(self._version())
            self._copies.wait()
        # Only the launcher can say where they are.
        self._end(forgets=saved or environment.MEMORY_DIR not in os.environ)
        return saved

    def _end(self, *, forgets: bool) -> None:
        self._engine.finish()
        self._engine.unwatch()
        self._engine.stop.release()
        self._listening = False
        memory = self._copies.memory if forgets else None
        if not self._engine.exits:
            # A process that is killed tidies up now or never; not before all replicas are done.
            self._engine.gather(None)
            if memory is not None:
                _forget(memory)
        elif memory is not None and not self._finish_registered:
            self._finish_registered = True
            atexit.register(_forget, memory)

    def _save_last(self) -> bool:
        """Saves the state with which the job ends, again if a member is lost in it."""
        for _ in range(ATTEMPTS):
            if self._saves.save(self._version()):
                return True
            if not self._engine.live:
                return False
            self._engine.ask(lambda members: members.gather(None))
        return False

    def close(self) -> None:
        """Gives signals their handlers back and ends the watch. Copies in memory stay."""
        self._listening = False
        # As the end of a process would.
        try:
            self._copies.close()
        finally:
            self._saves.end()
            self._engine.unwatch()
            self._engine.stop.close()


def _forget(memory: MemoryCopies) -> None:
    # A script that fails after its training is started again, and needs what is there.
    if getattr(sys, "last_value", None) is not None:
        return
    memory.withdraw()
    if environment.MEMORY_DIR not in os.environ:
        # Nobody else has made it. Other replicas of the host may still have files in it.
        with contextlib.suppress(OSError):
            memory.directory.rmdir()
            memory.directory.parent.rmdir()
