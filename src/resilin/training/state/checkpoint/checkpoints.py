"""`Checkpoints`: saving, listing and loading the snapshots of one job."""

from __future__ import annotations

import logging
import os
import threading
import time

import torch
from torch import Tensor

from resilin.core.placement import Asked, wanted_of
from resilin.engine.collectives import Group, Wire
from resilin.training.state.checkpoint import saver
from resilin.training.state.checkpoint.catalogue import clear, scan
from resilin.training.state.checkpoint.commit import COMMIT, Commit
from resilin.training.state.checkpoint.errors import CorruptCheckpoint
from resilin.training.state.checkpoint.peers import Peers
from resilin.training.state.checkpoint.reader import read
from resilin.training.state.checkpoint.storage import open_storage
from resilin.training.state.snapshot import Snapshot, Version
from resilin.training.state.stage import Stage

logger = logging.getLogger("resilin.checkpoint")


class Checkpoints:
    """The checkpoints of one job.

    Args:
        url: A directory, or any URL of fsspec. One that all replicas see, and one per job: what
            earlier attempts have left in it is cleared away.
        keep: How many of the newest stay.
        keep_every: Also the first checkpoint at or after each multiple of so many steps stays.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, keep: int = 3, keep_every: int | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep ({keep}) must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every ({keep_every}) must be at least 1, or None")
        self._storage = open_storage(url)
        self._keep = keep
        self._keep_every = keep_every
        self._stage = Stage()
        self._thread: threading.Thread | None = None
        self._outcome: Commit | Exception | None = None
        self.seconds = 0.0
        """Seconds that the last save took, from its beginning to its commit."""

    def save(self, snapshot: Snapshot, group: Group | None = None) -> Commit:
        """Saves a snapshot, on all replicas together; returns when it is committed.

        Raises:
            CheckpointError: It failed on some replica, or an earlier save in flight did.
            ValueError: The snapshot holds what cannot be saved.
        """
        self.begin_save(snapshot, group)
        commit = self.wait()
        assert commit is not None
        return commit

    def begin_save(self, snapshot: Snapshot, group: Group | None = None) -> None:
        """Begins to save a snapshot, on all replicas together.

        Waits for the save in flight, copies this replica's share of the tensors aside and returns;
        a thread writes it. The tensors may change from then on.

        Call `wait` before the process ends. On a local directory a save in flight is written to
        its end without it, but most object stores cannot be reached while Python shuts down.

        Args:
            snapshot: The same on all replicas, but for the pieces of split tensors: of these each
                process has its own, and together they must be the whole.
            group: The replicas, as a gloo group with a timeout. Until the save has ended nothing
                else may use it. None for a job of one process.

        Raises:
            CheckpointError: The save in flight failed. This one was not begun then.
            ValueError: The snapshot holds what cannot be saved.
        """
        self.wait()
        for name, tensor in snapshot.tensors.items():
            if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
                raise ValueError(
                    f"{name} has the layout {tensor.layout}; only {torch.strided} can be saved"
                )
        peers = Peers(group)
        task = saver.Task.of(snapshot, self._stage, peers)
        # Not a daemon: Python waits for it before it ends.
        self._thread = threading.Thread(
            target=self._run, args=(task, peers), name="resilin-checkpoint"
        )
        self._thread.start()

    def _run(self, task: saver.Task, peers: Peers) -> None:
        began = time.monotonic()
        try:
            commit = saver.save(self._storage, task, peers)
            if peers.process == 0:
                clear(self._storage, commit, keep=self._keep, keep_every=self._keep_every)
            self._outcome = commit
        except Exception as error:
            # Whoever waits tells it. Nobody does once the script has ended.
            told = peers.process != 0 or threading.main_thread().is_alive()
            logger.log(logging.DEBUG if told else logging.WARNING, "%s", error)
            self._outcome = error
        self.seconds = time.monotonic() - began

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_done(self) -> bool:
        """Whether a save has ended and nobody has waited for it yet."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> Commit | None:
        """Waits for the save in flight; None if none was begun since the last call.

        Raises:
            CheckpointError: The save failed. What was committed before is untouched.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def commits(self) -> list[Commit]:
        """The checkpoints there are, newest first; asks storage, and no other replica.

        Those with a damaged `COMMIT.json` are left out, with a warning.

        Raises:
            ValueError: One has a format that only a newer resilin can read.
        """
        return self._readable()[0]

    def _readable(self) -> tuple[list[Commit], list[str]]:
        found = scan(self._storage)
        if found.too_new:
            # Resuming from an older one would undo what a newer resilin has trained.
            raise found.too_new[0]
        for reason in found.damaged:
            logger.warning("a checkpoint is skipped: %s", reason)
        return found.commits, found.damaged

    def load(
        self,
        commit: Commit,
        group: Group | None = None,
        *,
        wanted: Asked | None = None,
    ) -> Snapshot:
        """Loads a checkpoint, on all replicas together; each gets what it needs, on the CPU.

        Each piece is read and checked by one replica, and sent to those that need it.

        Args:
            commit: Which one.
            group: The replicas; None for a job of one process.
            wanted: Placements that this process needs of some tensors, which it gets as `Sharded`;
                it gets the others whole. It does not matter how they were split when saved. All
                replicas need placements of the same tensors.

        Raises:
            CorruptCheckpoint: It is not what was saved.
            CheckpointError: Storage or a replica failed, or replicas load different ones.
        """
        needed = wanted_of(wanted, commit.stored)
        tensors = read(self._storage, commit, Peers(group), needed)
        return Snapshot(commit.version, commit.tree, tensors)

    def newest(
        self,
        group: Group | None = None,
        *,
        at_least: Version | None = None,
        wanted: Asked | None = None,
    ) -> Snapshot | None:
        """Loads the newest checkpoint that is whole, on all replicas together.

        One that is corrupt is skipped, with a warning.

        Args:
            group: The replicas; None for a job of one process.
            at_least: A state that can be had elsewhere: checkpoints of older ones are left alone.
            wanted: As in `load`.

        Returns:
            The snapshot, or None if there is no such checkpoint.

        Raises:
            CorruptCheckpoint: There are checkpoints, and none of them is whole: to begin from
                nothing would throw away what may still be saved by hand.
            CheckpointError: Storage or a replica failed.
            ValueError: One has a format that only a newer resilin can read.
        """
        commits, problems = Peers(group).lead(self._readable, _READABLE)
        for commit in commits:
            if at_least is not None and commit.version < at_least:
                break
            try:
                return self.load(commit, group, wanted=wanted)
            except CorruptCheckpoint as error:
                problems.append(str(error))
                logger.warning("a checkpoint is skipped: %s", error)
        if problems and at_least is None:
            raise CorruptCheckpoint(f"no checkpoint is whole: {'; '.join(problems)}")
        return None


_READABLE: Wire[tuple[list[Commit], list[str]]] = Wire(
    lambda found: [[COMMIT.to_json(each) for each in found[0]], found[1]],
    lambda state: ([COMMIT.from_json(each) for each in state[0]], state[1]),
)
