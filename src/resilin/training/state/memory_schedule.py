"""The schedule of memory copies: when one is due, retries where none fits, and the steps at risk.

The decisions are those of `core.recovery`. Training stands still while a state is staged; a thread
then writes it, and the next ballot waits for the thread. A copy that finds no room is tried again,
first without the copies of earlier generations, later at growing intervals: memory may have been
freed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from resilin.core.recovery import is_kept, keep_interval, may_forget, may_vote, steps_at_risk
from resilin.engine.base import Engine
from resilin.training.state.memory import MemoryCopies, Place, StagedCopy
from resilin.training.state.registry import Registry
from resilin.training.state.snapshot import Version

logger = logging.getLogger("resilin")

MEMORY_BUDGET = 0.05
"""Fraction of the training time that memory copies may take when their interval is `auto`."""
LONGEST_PAUSE = 1024
"""Largest number of steps between two attempts at a copy, after earlier ones found no room."""


class CopyInterval:
    """Steps between two copies, and what steps and copies cost on this replica.

    Args:
        every: The steps, `auto` to follow the cost, or None for no copies.
    """

    def __init__(self, every: int | Literal["auto"] | None) -> None:
        self.is_automatic = every == "auto"
        """Whether the interval follows the cost of copies."""
        self.steps = every if isinstance(every, int) else int(self.is_automatic)
        """The interval now; 0 if there are no copies."""
        self.copy_seconds = 0.0
        """Time for which training stands still for one copy: the shortest of the last ones."""
        self.step_seconds = 0.0
        """Time of the last step, without what is done between steps and what copies take of it."""
        self._began = time.monotonic()
        self._times: deque[float] = deque(maxlen=3)

    def step_begins(self) -> None:
        """Starts to measure a step."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """Ends that."""
        self.step_seconds = max(0.0, time.monotonic() - self._began)

    def waited(self, seconds: float) -> None:
        """Takes the time for which a step stood still for a copy that was being written."""
        self._began += seconds

    def copied(self, seconds: float) -> None:
        """Takes the time of a copy: of its staging, and of what was waited for."""
        self._times.append(seconds)
        self.copy_seconds = min(self._times)

    def counted(self, step_seconds: float, copy_seconds: float) -> None:
        """Takes the sums over all replicas, and follows them."""
        if self.is_automatic and step_seconds > 0:
            self.steps = keep_interval(copy_seconds, step_seconds, MEMORY_BUDGET)

    @property
    def is_measured(self) -> bool:
        """Whether the interval rests on a measurement, or needs none."""
        return bool(self._times) or not self.is_automatic


class MemorySchedule:
    """Copies the states of one replica to the memory of its host, when they are due.

    Args:
        memory: The copies of this host; None if it keeps none.
        every: Steps between two copies, `auto`, or None for none.
        engine: Who is in the job.
        registry: What has state.
    """

    def __init__(
        self,
        memory: MemoryCopies | None,
        every: int | Literal["auto"] | None,
        engine: Engine,
        registry: Registry,
    ) -> None:
        self.memory = memory
        """The copies of this host; None if it keeps none."""
        self.lock = threading.Lock()
        """Held from when a state is staged until its copy is written."""
        self.resumed: Version | None = None
        """The state that this generation resumed from, if any."""
        self._engine = engine
        self._registry = registry
        self._interval = CopyInterval(every)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilin-memory")
        self._writing: tuple[Version, Future[bool], float] | None = None
        self._kept: Version | None = None
        self._num_kept = 0
        self._all_kept = False
        self._forgot = False
        self._failures = 0
        self._retry_step = 0
        self._warned = False

    # The vote ------------------------------------------------------------------------------

    def votes(self) -> tuple[float, float, float]:
        """Seconds of a step and of a copy, and 1 if the last copy of this replica failed.

        Waits for the copy that is being written, and raises what `wait` raises.
        """
        if not may_vote(writing=self._writing is not None):
            self.wait()
        interval = self._interval
        return interval.step_seconds, interval.copy_seconds, float(self._failures > 0)

    def counted(self, step_seconds: float, copy_seconds: float, failed: float) -> None:
        """Takes the sums of all replicas: the interval follows them.

        Args:
            step_seconds: Time of one step.
            copy_seconds: Time of one copy.
            failed: Replicas that have not completed the last copy.
        """
        self._all_kept = not failed
        self._interval.counted(step_seconds, copy_seconds)

    def step_begins(self) -> None:
        """Called when everything between two steps is done."""
        self._interval.step_begins()

    def step_ends(self) -> None:
        """Called when a step is over, before anything else is done."""
        self._interval.step_ends()

    @property
    def at_risk(self) -> int | None:
        """Completed steps that a lost worker can cost; None if only checkpoints limit it.

        A step is complete when its copy is: a worker that dies in the middle of a copy repeats that
        step.
        """
        holds = self._num_kept > 0 and self._all_kept and not self._failures
        return steps_at_risk(self._interval.steps) if holds else None

    @property
    def is_automatic(self) -> bool:
        """Whether the interval follows the cost of copies."""
        return self._interval.is_automatic

    @property
    def is_measured(self) -> bool:
        """Whether the interval rests on a measurement, or needs none."""
        return self._interval.is_measured

    # Keeping -------------------------------------------------------------------------------

    def is_due(self, step: int, *, stopping: bool) -> bool:
        """Whether the state at this step is due for a copy."""
        return self.memory is not None and is_kept(step, self._interval.steps, stopping=stopping)

    def keep(self, version: Version) -> None:
        """Begin to copy the state, unless that was done before.

        All replicas of the host copy the same. Returns when the state is staged: it may change from
        then on, while a thread writes it. A copy that is being written is waited for.

        Raises:
            Exception: What the thread of the copy before has raised.
        """
        self.wait()
        memory = self.memory
        if memory is None or not self._interval.steps or version == self._kept:
            return
        if self._failures and version.step < self._retry_step:
            return
        began = time.monotonic()
        self.lock.acquire()
        try:
            staged = self._stage(memory, version)
            writing = self._thread.submit(self._write_out, memory, staged)
        except BaseException:
            self.lock.release()
            raise
        self._writing = version, writing, time.monotonic() - began

    def wait(self) -> None:
        """Wait until the copy that is being written is complete, or has failed for lack of room.

        Raises:
            Exception: What the thread has raised.
        """
        if self._writing is None:
            return
        version, writing, seconds = self._writing
        began = time.monotonic()
        error = writing.exception()
        waited = time.monotonic() - began
        self._interval.waited(waited)
        # Not before: whoever is interrupted while it waits may wait again.
        self._writing = None
        if error is not None:
            raise error
        if not writing.result():
            return
        if self._failures:
            logger.info("memory copies fit again, from step %d on", version.step)
        elif self._num_kept:
            # Not the first one, which allocates its memory, and not one that was delayed.
            self._interval.copied(seconds + waited)
        self._failures = 0
        self._kept = version
        self._num_kept += 1

    def close(self) -> None:
        """End the thread, after the copy that it writes; files stay.

        Raises:
            Exception: What the thread has raised.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self.memory is not None:
                self.memory.close()

    def _stage(self, memory: MemoryCopies, version: Version) -> StagedCopy:
        me, registry = self._engine.membership, self._registry
        return memory.stage(
            registry.take(version),
            registry.begin_sums(version.epoch),
            Place(
                host=me.host,
                local_process=me.local_process,
                num_local_processes=me.num_local_processes,
                process=me.process,
            ),
            registry.take_own(),
        )

    # In the thread -------------------------------------------------------------------------

    def _write_out(self, memory: MemoryCopies, staged: StagedCopy) -> bool:
        """Write a copy, with or without those of earlier generations; whether there was room."""
        try:
            self._forget_earlier(memory)
            try:
                self._write(memory, staged, again=False)
            except OSError:
                # Not the state that this generation resumed from: until its first own copy is
                # complete on all replicas, that is the only one.
                memory.forget(before=staged.version.generation, but=self.resumed)
                try:
                    self._write(memory, staged, again=self._needs_resumed(memory))
                except OSError as error:
                    self._failed(memory, staged.version, error)
                    return False
            return True
        finally:
            self.lock.release()

    def _write(self, memory: MemoryCopies, staged: StagedCopy, *, again: bool) -> None:
        previous = self.resumed if again else self._kept or self.resumed
        memory.write(staged, previous=previous, again=again)

    def _needs_resumed(self, memory: MemoryCopies) -> bool:
        """Whether the state that this generation resumed from is one of the two that must stay.

        There is then no room for a third one, and a replica that waited for it would wait forever:
        its first copy is overwritten.
        """
        return self._num_kept > 0 and not self._forgot and self.resumed in memory.versions()

    def _forget_earlier(self, memory: MemoryCopies) -> None:
        """Removes earlier generations once the first copy of this one is complete everywhere.

        Before the next copy, not after it: there may be room for only one generation. Each replica
        does it, because none may wait for another.
        """
        if self._forgot or not (may_forget(self._num_kept + 1) and self._all_kept):
            return
        memory.forget(before=self._engine.membership.generation)
        self._forgot = True

    def _failed(self, memory: MemoryCopies, version: Version, error: OSError) -> None:
        """Log the failure; training continues, with the last complete copy and the checkpoints."""
        self._failures += 1
        self._retry_step = version.step + min(2**self._failures, LONGEST_PAUSE)
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "no room for a memory copy of step %d in %s: %s. It will be tried again; until one "
            "fits, a lost worker costs all steps since the last copy or checkpoint",
            version.step,
            memory.directory,
            error,
        )
