"""The schedule of checkpoints: when one is due, saving it, and reporting how that ended."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from resilin.core.events import CheckpointEvent
from resilin.engine.base import Engine
from resilin.engine.collectives import Group
from resilin.engine.lost import PeerLost
from resilin.training.events import Events, Stamp
from resilin.training.state.checkpoint import CheckpointError, Checkpoints
from resilin.training.state.checkpoint.commit import Commit
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.registry import Registry
from resilin.training.state.replica_parts import add_up, gathered
from resilin.training.state.settings import StateSettings
from resilin.training.state.snapshot import Snapshot, Version
from resilin.training.state.transfer import gather_parts

logger = logging.getLogger("resilin")


class CheckpointSchedule:
    """Saves the checkpoints of one job, one at a time.

    Args:
        settings: Where they go, how often, and how many stay.
        engine: Who is in the job.
        registry: What has state.
        events: Who hears of them.
    """

    def __init__(
        self, settings: StateSettings, engine: Engine, registry: Registry, events: Events
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._events = events
        self.checkpoints: Checkpoints | None = None
        """The checkpoints; None if none are saved."""
        if settings.checkpoint_dir is not None:
            self.checkpoints = Checkpoints(
                settings.checkpoint_dir, keep=settings.keep, keep_every=settings.keep_every
            )
        self.committed_step = 0
        """Step of the newest checkpoint that is whole, or of the state that the job resumed."""
        self._saved: Version | None = None
        self._begun_step = 0
        self._begun_time = time.monotonic()
        self._group: Group | None = None

    def prepare(self) -> None:
        """Makes the group of the saving thread. Collective.

        Called in the same order on all replicas; a thread must not be the first to ask for it.
        """
        self._group = self._engine.group("storage")

    def let_go(self) -> None:
        """Gives the group of a generation up that is over; `prepare` makes that of the next one."""
        self._group = None

    def start(self, step: int, resumed: Version | None, *, from_checkpoint: bool) -> None:
        """Counts from here.

        Args:
            step: Steps that the job has made.
            resumed: The state that it resumed, if any.
            from_checkpoint: Whether that was a checkpoint, which need not be saved again.
        """
        self._begun_step, self._begun_time = step, time.monotonic()
        if resumed is not None:
            self.committed_step = resumed.step
            if not from_checkpoint:
                self._begun_step = self._last_saved(step)
        if from_checkpoint:
            self._saved = resumed

    def _last_saved(self, step: int) -> int:
        """Step of the newest checkpoint, at most this one; 0 if there is none.

        A job that resumes from memory counts from there: if it counted from its own start, it would
        never save where it is interrupted more often than it saves.
        """
        if self.checkpoints is None or not self._engine.membership.is_first:
            return step
        saved = (commit.version.step for commit in self.checkpoints.commits())
        return max((each for each in saved if each <= step), default=0)

    def is_due(self, steps: int) -> bool:
        """Whether to begin a save at this step. Asked of replica 0 alone: clocks differ."""
        if (
            self.checkpoints is None
            or not self._engine.membership.is_first
            or self.checkpoints.saving
        ):
            return False
        every = self._settings.checkpoint_every
        if isinstance(every, timedelta):
            return time.monotonic() - self._begun_time >= every.total_seconds()
        return every is not None and steps - self._begun_step >= every

    def begin(self, version: Version) -> None:
        """Begins to save the present state, after the save in flight has ended. Collective."""
        assert self.checkpoints is not None
        self.end()
        try:
            self.checkpoints.begin_save(self._snapshot(version), self._group)
        except PeerLost as lost:
            # The members that are left begin one when it is due for them.
            logger.info("a checkpoint was given up: %s", lost)
            return
        self._saved = version
        self._begun_step, self._begun_time = version.step, time.monotonic()

    def report_ended(self) -> None:
        """Reports the save in flight if it has ended; does not wait for it."""
        if self.checkpoints is not None and self.checkpoints.is_done:
            self.end()

    def end(self) -> None:
        """Waits for the save in flight, if any, and reports how it ended."""
        if self.checkpoints is None:
            return
        try:
            commit = self.checkpoints.wait()
        except CheckpointError as error:
            self._report_failed("a checkpoint failed; training continues", error)
            self._saved = None
        else:
            self._report_saved(commit)

    def save(self, version: Version) -> bool:
        """Saves the present state, unless that was done, and returns when it is. Collective.

        Returns:
            Whether it is saved, or need not be.
        """
        if self.checkpoints is None:
            return True
        self.end()
        saved = self._saved
        if saved is not None and (saved.step, saved.epoch) == (version.step, version.epoch):
            return True
        try:
            commit = self.checkpoints.save(self._snapshot(version), self._group)
        except (CheckpointError, PeerLost) as error:
            self._report_failed("the last checkpoint failed", error)
            return False
        self._report_saved(commit)
        self._saved = version
        if self._engine.membership.is_first:
            logger.info("saved step %d in %s", commit.version.step, commit.path)
        return True

    def save_from_memory(self, memory: MemoryCopies) -> None:
        """Saves the newest copy of this host's memory, without any other replica.

        Raises:
            CheckpointError: That failed, or this host does not have all of the state.
        """
        directory = self._settings.checkpoint_dir
        scan = memory.scan()
        newest = scan.versions[:1]
        if directory is None or not newest or (self._saved and newest[0] <= self._saved):
            return
        snapshot = scan.read(newest[0])
        snapshot.tree.update(add_up(list(scan.sums(newest[0]).values())))
        own = gathered(scan.own(newest[0]))
        snapshot.tree.update(own.tree)
        snapshot.tensors.update(own.tensors)
        # Apart from a save in flight, whose thread may be stuck.
        commit = Checkpoints(directory, keep=self._settings.keep).save(snapshot)
        logger.warning("saved step %d in %s from memory", commit.version.step, commit.path)

    def _snapshot(self, version: Version) -> Snapshot:
        """The state with sums over all replicas, and what each has of its own. Collective."""
        snapshot = self._registry.take(version)
        gather_parts(self._engine, self._registry, snapshot)
        return snapshot

    def _report_saved(self, commit: Commit | None) -> None:
        if commit is None:
            return
        self.committed_step = commit.version.step
        if not self._engine.membership.is_first:
            return
        assert self.checkpoints is not None
        stamp: Stamp = {**self._events.stamp(), "step": commit.version.step}
        self._events.emit(
            CheckpointEvent(
                **stamp,
                action="saved",
                path=commit.path,
                num_bytes=sum(file.size for file in commit.files.values()),
                seconds=self.checkpoints.seconds,
            )
        )

    def _report_failed(self, what: str, error: Exception) -> None:
        # All replicas raise the same error: one tells it.
        if self._engine.membership.is_first:
            logger.error("%s: %s", what, error)
            place = self._settings.checkpoint_dir or ""
            stamp = self._events.stamp()
            self._events.emit(
                CheckpointEvent(**stamp, action="failed", path=place, detail=str(error))
            )
