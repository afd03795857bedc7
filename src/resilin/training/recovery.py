"""Nothing lost: keeps the state of the job between steps, and restores it when the job starts.

Between any two steps the replicas keep a copy in memory, save a checkpoint when one is due, and
stop together when one of them was asked to. What is due is decided in the ballot of the step, so
all replicas do the same. When a job starts, it goes on from the newest state that any replica can
find: a memory copy on any host, or else the newest checkpoint that is whole.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from resilin.core.events import CheckpointEvent, RiskEvent
from resilin.engine import environment
from resilin.engine.stop import RESTART
from resilin.engine.torchrun import Torchrun, process_start
from resilin.engine.watch import Peer, Watch
from resilin.training.checkpoint import CheckpointError, Checkpoints
from resilin.training.checkpoint.commit import Commit
from resilin.training.job import Job, Stamp
from resilin.training.keeper import MEMORY_BUDGET, Keeper
from resilin.training.memory import MemoryCopies, Writer, in_use
from resilin.training.protection import Protection, memory_directory
from resilin.training.registry import add_up, gathered, of_replica
from resilin.training.restore import newest_state
from resilin.training.snapshot import Snapshot, Version

logger = logging.getLogger("resilin")

LASTING = 1000
"""Steps in a row with half of the steps at risk, before the smaller number is reported."""
PATIENCE = 30.0
"""Seconds in which other processes that write to this job's memory have to be gone.

As long as an agent gives its workers to end. After it they are taken for those of another job.
"""


class Recovery:
    """What keeps and restores the state of one job."""

    def __init__(self, job: Job, protection: Protection) -> None:
        self._job = job
        self._engine = job.engine
        self._protection = protection
        self._checkpoints: Checkpoints | None = None
        if protection.checkpoint_dir is not None:
            self._checkpoints = Checkpoints(
                protection.checkpoint_dir, keep=protection.keep, keep_every=protection.keep_every
            )
        directory = memory_directory(self._engine, protection)
        self._memory = None if directory is None else MemoryCopies(directory)
        self._keeper = Keeper(self._memory, protection.memory_every, self._engine, job.registry)
        self._branch = 0
        self.resumed: Version | None = None
        """The state that the job went on from; None if it began anew."""
        self.resumed_from = ""
        """The same in words; empty if it began anew."""
        self._seen: Version | None = None
        self._saved: Version | None = None
        self._committed_step = 0
        self._told_risk: int | None = None
        self._lower_risk = 0
        self._save_step = 0
        self._save_time = time.monotonic()
        self._boundary_time = time.monotonic()
        self._step_seconds = 0.0
        self._counted: tuple[float, ...] = ()
        self._watch: Watch | None = None
        self._storage_group: dist.ProcessGroup | None = None
        self._listening = False
        self._finish_registered = False
        self.active = self._memory is not None or self._checkpoints is not None
        """Whether any replica has anything to keep state in."""

    # The start -----------------------------------------------------------------------------

    def start(self) -> None:
        """Restores the newest state that any replica can find."""
        engine = self._engine
        if engine.restartable:
            # One host may keep no copies; it takes part all the same.
            self.active = any(engine.gather(self.active))
        if not self.active:
            if engine.restartable and engine.replica == 0:
                logger.warning(
                    "neither memory copies nor checkpoints are made: a lost worker costs the whole "
                    "run"
                )
            return
        self._job.voters.append(self)
        began = time.monotonic()
        # Made here, in the same order on all replicas; a thread must not be the first to ask.
        self._storage_group = engine.group("storage")
        self._begin_branch()
        snapshot, source, generation = newest_state(engine, self._memory, self._checkpoints)
        # What the job does from here on is newer than whatever it has left before.
        engine.generation = max(engine.generation, generation)
        if snapshot is not None and snapshot.version.step < self._job.clock.steps:
            # The checkpoint of another framework has brought the job further already.
            snapshot = None
        if snapshot is not None:
            mine = of_replica(snapshot, engine.replica, engine.num_replicas)
            self._job.registry.restore(mine, first_replica=engine.replica == 0)
            self.resumed = snapshot.version
            self.resumed_from = f"step {snapshot.version.step} ({source})"
            self._keeper.resumed = snapshot.version
        self._seen = self._version()
        self._save_step, self._save_time = self._seen.step, time.monotonic()
        if snapshot is not None:
            self._committed_step = snapshot.version.step
        if snapshot is not None and source == "checkpoint":
            self._saved = snapshot.version
        elif snapshot is None or not self._on_all_hosts(snapshot.version):
            # What was read on this very host, or on storage, is not written again.
            self._keeper.keep(self._version())
        self.listen()
        if engine.replica == 0:
            many = engine.num_replicas > 1
            replicas = f"{engine.num_replicas} replica{'s' if many else ''}"
            if snapshot is None:
                step = self._job.clock.steps
                logger.info("%s begin%s at step %d", replicas, "" if many else "s", step)
            else:
                logger.info(
                    "%s %s on from step %d (%s), restored in %.2f s",
                    replicas,
                    "go" if many else "goes",
                    snapshot.version.step,
                    source,
                    time.monotonic() - began,
                )
        self._boundary_time = time.monotonic()

    def _begin_branch(self) -> None:
        """Draws this start's number, and refuses to mix with a job that is alive. Collective.

        Raises:
            RuntimeError: A process that is none of this job's writes to the same directory.
        """
        everyone = self._engine.gather((Writer.here(), secrets.randbits(62)))
        self._branch = everyone[0][1]
        if self._memory is None:
            return
        ours = {writer for writer, _ in everyone}
        deadline = time.monotonic() + PATIENCE
        while others := self._memory.writers() - ours:
            # Workers of this job that their agent has not ended yet, or that notice that it died.
            if time.monotonic() > deadline:
                raise RuntimeError(in_use(self._memory.directory, min(others)))
            time.sleep(0.1)

    def _on_all_hosts(self, version: Version) -> bool:
        """Whether every host has a complete copy of a state in its memory. Collective."""
        here = self._memory is None or version in self._memory.versions()
        return all(self._engine.gather(here))

    def listen(self) -> None:
        """Takes signals as requests to stop, and watches over this replica. Collective."""
        engine = self._engine
        if not self.active or self._listening:
            return
        self._listening = True
        engine.stop.listen()
        if not isinstance(engine, Torchrun) or not engine.restartable:
            return
        me = (engine.host, Peer(os.getpid(), process_start(os.getpid())))
        everyone = engine.gather(me)
        peers = [peer for host, peer in everyone if host == engine.host and peer != me[1]]
        self._watch = Watch(engine, peers, self._abandon)

    # Between steps -------------------------------------------------------------------------

    def votes(self, ahead: int = 1) -> tuple[float, ...]:
        """Stop, save, and what memory copies cost: what this replica says in a ballot.

        Args:
            ahead: Steps that will be committed between this and when the votes are counted.
        """
        steps = self._job.clock.steps + ahead
        stop, save = float(self._engine.stop.asked), float(self._save_is_due(steps))
        return stop, save, self._step_seconds, *self._keeper.votes()

    def counted(self, votes: tuple[float, ...]) -> None:
        """What all replicas have said in the ballot of the step that ends now."""
        self._counted = votes

    def _save_is_due(self, steps: int) -> bool:
        """Asked of replica 0 alone: others have other clocks."""
        if self._checkpoints is None or self._engine.replica or self._checkpoints.saving:
            return False
        every = self._protection.checkpoint_every
        if isinstance(every, timedelta):
            return time.monotonic() - self._save_time >= every.total_seconds()
        return every is not None and steps - self._save_step >= every

    def between_steps(self) -> None:
        """Keeps, saves or stops, as the replicas have agreed in the ballot of the last step."""
        version = self._version()
        if not self.active or version == self._seen:
            return
        votes, self._counted = self._counted, ()
        self._settle(version, votes)

    def between_epochs(self) -> None:
        """The same between two epochs, where there was no ballot: the replicas ask each other."""
        if not self.active:
            return
        everyone = self._engine.gather(self.votes(ahead=0))
        self._settle(self._version(), tuple(map(sum, zip(*everyone, strict=True))))

    def _version(self) -> Version:
        engine, job = self._engine, self._job
        return Version(engine.generation, job.clock.steps, job.epoch, self._branch)

    def _settle(self, version: Version, votes: tuple[float, ...]) -> None:
        self._seen = version
        now = time.monotonic()
        self._step_seconds = now - self._boundary_time
        stop, save, step_seconds, keep_seconds, failed = votes or (0.0, 0.0, 0.0, 0.0, 1.0)
        if not self._engine.all_committed():
            return
        self._job.registry.warn_of_unclaimed()
        if self._checkpoints is not None and self._checkpoints.is_done:
            self._end_save()
        self._keeper.counted(keep_seconds, step_seconds, failed)
        self._report_risk()
        if self._keeper.is_due(version.step, stopping=bool(stop)):
            self._keeper.keep(version)
        if stop:
            self._stop()
        if save:
            self._begin_save()
        self._boundary_time = time.monotonic()

    # What can be lost ----------------------------------------------------------------------

    @property
    def at_risk(self) -> int:
        """Completed steps that the sudden death of a worker would cost at most.

        With memory copies that is their interval less one. Without, it is what was done since the
        last checkpoint. It holds while a host with a copy lives.
        """
        steps = self._keeper.at_risk
        return self._job.clock.steps - self._committed_step if steps is None else steps

    def _report_risk(self) -> None:
        """Reports it when copies have been measured, when it doubles, and when it stays at half.

        Where steps are short it goes up and down with each measurement, and each checkpoint sets it
        back: a smaller number counts only if it lasts.
        """
        steps, told = self.at_risk, self._told_risk
        in_memory = self._keeper.at_risk is not None
        if self._engine.replica or (in_memory and not self._keeper.is_measured):
            return
        if told is not None and steps < max(1, 2 * told):
            self._lower_risk = self._lower_risk + 1 if told > 0 and 2 * steps <= told else 0
            if self._lower_risk < LASTING:
                return
        self._told_risk, self._lower_risk = steps, 0
        self._job.emit(RiskEvent(**self._job.stamp(), steps=steps))
        if not in_memory:
            # How far the last checkpoint is back is no news; that copies do not fit was a warning.
            return
        if steps == 0:
            logger.info("a lost worker costs no completed step: each is copied to memory")
        elif self._protection.memory_every == "auto":
            logger.info(
                "a lost worker costs at most %d completed step(s): a memory copy of each would "
                "take more than %g%% of the time (memory_every=1 does it all the same)",
                steps,
                100 * MEMORY_BUDGET,
            )
        else:
            logger.info("a lost worker costs at most %d completed step(s), by memory_every", steps)

    # Checkpoints ---------------------------------------------------------------------------

    def _whole_snapshot(self) -> Snapshot:
        """The state with sums over all replicas, and what each has of its own. Collective."""
        registry, version = self._job.registry, self._version()
        snapshot = registry.take(version)
        everyone = self._engine.gather((registry.take_sums(version.epoch), registry.take_own()))
        own = gathered({i: own for i, (_, own) in enumerate(everyone)})
        snapshot.tree.update(add_up([sums for sums, _ in everyone]))
        snapshot.tree.update(own.tree)
        snapshot.tensors.update(own.tensors)
        return snapshot

    def _end_save(self) -> None:
        """Waits for the save in flight, and says if it has failed."""
        assert self._checkpoints is not None
        try:
            self._tell_saved(self._checkpoints.wait())
        except CheckpointError as error:
            logger.error("a checkpoint failed; training goes on: %s", error)
            self._tell_failed(error)
            self._saved = None

    def _tell_saved(self, commit: Commit | None) -> None:
        if commit is not None:
            self._committed_step = commit.version.step
        if commit is None or self._engine.replica:
            return
        assert self._checkpoints is not None
        stamp: Stamp = {**self._job.stamp(), "step": commit.version.step}
        self._job.emit(
            CheckpointEvent(
                **stamp,
                action="saved",
                path=commit.path,
                num_bytes=sum(file.size for file in commit.files.values()),
                seconds=self._checkpoints.seconds,
            )
        )

    def _tell_failed(self, error: CheckpointError) -> None:
        if self._engine.replica == 0:
            place = self._protection.checkpoint_dir or ""
            self._job.emit(
                CheckpointEvent(**self._job.stamp(), action="failed", path=place, detail=str(error))
            )

    def _begin_save(self) -> None:
        assert self._checkpoints is not None
        self._end_save()
        snapshot = self._whole_snapshot()
        self._checkpoints.begin_save(snapshot, self._storage_group)
        self._saved = snapshot.version
        self._save_step, self._save_time = snapshot.version.step, time.monotonic()

    def _save_now(self) -> None:
        if self._checkpoints is None:
            return
        self._end_save()
        now, saved = self._version(), self._saved
        if saved is not None and (saved.step, saved.epoch) == (now.step, now.epoch):
            return
        try:
            commit = self._checkpoints.save(self._whole_snapshot(), self._storage_group)
        except CheckpointError as error:
            logger.error("the last checkpoint failed: %s", error)
            self._tell_failed(error)
            return
        self._tell_saved(commit)
        self._saved = now
        if self._engine.replica == 0:
            logger.info("saved step %d in %s", commit.version.step, commit.path)

    # The end -------------------------------------------------------------------------------

    def _stop(self) -> None:
        """All replicas are at the same step, and end there."""
        reason = self._engine.stop.reason or "another replica was asked to stop"
        self._close_watch()
        self._save_now()
        if self._engine.replica == 0:
            logger.info("stopped at step %d (%s)", self._version().step, reason)
        if self._job.recorder is not None:
            self._job.recorder.close()
        self._engine.leave(asked=self._engine.stop.asked)

    def _abandon(self, reason: str, late: bool) -> None:
        """Ends this process from the watching thread: its main thread is stuck, or unsupervised."""
        # Whoever copies into memory right now completes it first.
        self._keeper.lock.acquire(timeout=10)
        logger.warning("replica %d ends: %s", self._engine.replica, reason)
        try:
            if late and self._engine.replica == 0:
                self._save_memory()
        except Exception:
            logger.exception("the memory copy was not saved")
        finally:
            # Whatever failed: nobody else ends a process whose main thread is stuck.
            if self._job.recorder is not None:
                self._job.recorder.flush()
            logging.shutdown()
            sys.stdout.flush()
            os._exit(self._engine.stop.exit_code if self._engine.stop.asked else RESTART)

    def _save_memory(self) -> None:
        """Makes the newest memory copy a checkpoint, without any other replica."""
        directory = self._protection.checkpoint_dir
        if directory is None or self._memory is None:
            return
        newest = self._memory.versions()[:1]
        if not newest or (self._saved is not None and newest[0] <= self._saved):
            return
        snapshot = self._memory.read(newest[0])
        snapshot.tree.update(add_up(list(self._memory.sums(newest[0]).values())))
        own = gathered(self._memory.own(newest[0]))
        snapshot.tree.update(own.tree)
        snapshot.tensors.update(own.tensors)
        commit = Checkpoints(directory, keep=self._protection.keep).save(snapshot)
        logger.warning("saved step %d in %s from memory", commit.version.step, commit.path)

    def finish(self) -> None:
        """The job is done: its last state is saved, and memory is given back when it exits."""
        if not self.active or not self._listening:
            return
        self._save_now()
        self._close_watch()
        self._engine.stop.release()
        self._listening = False
        if self._memory is not None and not self._engine.exits:
            # A process that is killed tidies up now or never; not before all replicas are done.
            self._engine.gather(None)
            _forget(self._memory)
        elif self._memory is not None and not self._finish_registered:
            self._finish_registered = True
            atexit.register(_forget, self._memory)

    def close(self) -> None:
        """Gives signals their handlers back and ends the watch. Copies in memory stay."""
        if self._checkpoints is not None:
            # As the end of a process would.
            self._end_save()
        self._close_watch()
        self._engine.stop.close()
        if self._memory is not None:
            self._memory.close()

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _forget(memory: MemoryCopies) -> None:
    # A script that fails behind its training is started again, and needs what is there.
    if getattr(sys, "last_value", None) is not None:
        return
    memory.withdraw()
    if environment.MEMORY_DIR not in os.environ:
        # Nobody else has made it. Other replicas of the host may still have files in it.
        with contextlib.suppress(OSError):
            memory.directory.rmdir()
            memory.directory.parent.rmdir()
