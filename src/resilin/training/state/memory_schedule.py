"""The schedule of memory copies: when one is due, retries where none fits, and the steps at risk.

The decisions are those of `core.recovery`. Training stands still while a state is staged; a thread
then writes it, and the next ballot waits for the thread. A copy that finds no room is tried again,
first without the copies of earlier generations, later at growing intervals: memory may have been
freed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from resilin.core.recovery import is_kept, may_forget, may_vote, seconds_between_copies
from resilin.engine.base import Engine
from resilin.training.state.buddy_copies import BuddyCopies, Incoming
from resilin.training.state.memory import MemoryCopies, Place, StagedCopy
from resilin.training.state.registry import Registry
from resilin.training.state.snapshot import Version

logger = logging.getLogger("resilin")

LONGEST_PAUSE = 1024
"""Largest number of steps between two attempts at a copy, after earlier ones found no room."""


class CopyInterval:
    """Time between two copies: a number of steps, or what their cost asks for.

    Args:
        every: The steps, `auto` to follow the cost, or None for no copies.
    """

    def __init__(self, every: int | Literal["auto"] | None) -> None:
        self.every = every
        """The setting."""
        self.copy_seconds = 0.0
        """Time for which training stands still for one copy: the shortest of the last ones."""
        self.trained_seconds = 0.0
        """Time of all steps, without what is done between steps and what copies take of it."""
        self.is_due = False
        """Whether the replicas have agreed that a copy is due, if they follow the cost."""
        self._last_seconds = 0.0
        self._steps = 0
        self._step_seconds = 0.0
        self._began = time.monotonic()
        self._times: deque[float] = deque(maxlen=3)

    def step_begins(self) -> None:
        """Starts to measure a step."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """Ends that."""
        self.trained_seconds += max(0.0, time.monotonic() - self._began)
        self._steps += 1

    def waited(self, seconds: float) -> None:
        """Takes the time for which a step stood still for a copy that was being written."""
        self._began += seconds

    def copied(self, seconds: float) -> None:
        """Takes the time of a copy: of its staging, and of what was waited for."""
        self._times.append(seconds)
        self.copy_seconds = min(self._times)

    @property
    def is_over(self) -> bool:
        """Whether a copy is due by the measurements of this replica."""
        return self.trained_seconds - self._last_seconds >= self._seconds

    def agree(self, *, is_due: bool) -> None:
        """Takes what the replicas have agreed on; the time to the next copy begins with this one.

        Also on a replica that has no room for it, or makes none: it need not ask for another.
        """
        self.is_due = is_due
        if not is_due:
            return
        if self._steps:
            self._step_seconds = (self.trained_seconds - self._last_seconds) / self._steps
        self._last_seconds, self._steps = self.trained_seconds, 0

    @property
    def is_measured(self) -> bool:
        """Whether the interval rests on a measurement, or needs none."""
        return bool(self._times) or self.every != "auto"

    @property
    def steps_at_risk(self) -> int | None:
        """Completed steps that are lost at most with the copy before the next; None without copies.

        An estimate if the interval follows the cost: by the mean time of a step between the last
        two copies.
        """
        if self.every is None:
            return None
        if isinstance(self.every, int):
            return self.every - 1
        if not self._step_seconds:
            return 0
        return max(1, math.ceil(self._seconds / self._step_seconds)) - 1

    @property
    def _seconds(self) -> float:
        return seconds_between_copies(self.copy_seconds, self.trained_seconds)


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

    def reformed(self, state: Version) -> None:
        """Begins anew in another generation of members that kept running.

        Args:
            state: The state that it continues with. The copies of earlier generations stay until
                the first one of this generation is complete everywhere.
        """
        self.wait()
        if self.memory is not None and self._kept is not None:
            # Members may change more often than copies are made: only the last copy stays.
            self.memory.forget(before=state.generation, but=self._kept)
        self.resumed = self._kept or state
        self._kept, self._num_kept, self._all_kept, self._forgot = None, 0, False, False

    def form(self, holders: int) -> None:
        """Finds out who keeps copies for whom in this generation. Collective.

        Args:
            holders: Processes that are to keep each part of a tensor.
        """
        if holders == 1:
            return
        found = BuddyCopies.form(self._engine, keeps=self.memory is not None)
        if self.memory is not None:
            self.memory.buddies = found

    # The vote ------------------------------------------------------------------------------

    def votes(self) -> tuple[float, float]:
        """1 if a copy is due by the measurements of this replica, and 1 if its last copy failed.

        Waits for the copy that is being written, and raises what `wait` raises.
        """
        if not may_vote(writing=self._writing is not None):
            self.wait()
        is_due = self.memory is not None and self.is_automatic and self._interval.is_over
        return float(is_due), float(self._failures > 0)

    def counted(self, due: float, failed: float) -> None:
        """Takes the sums of all replicas. One that asks for a copy is enough.

        Args:
            due: Replicas that ask for a copy.
            failed: Replicas that have not completed the last copy.
        """
        self._all_kept = not failed
        self._interval.agree(is_due=due > 0)

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
        return self._interval.steps_at_risk if holds else None

    @property
    def is_automatic(self) -> bool:
        """Whether the interval follows the cost of copies."""
        return self._interval.every == "auto"

    @property
    def is_measured(self) -> bool:
        """Whether the interval rests on a measurement, or needs none."""
        return self._interval.is_measured

    # Keeping -------------------------------------------------------------------------------

    def is_due(self, step: int, *, stopping: bool) -> bool:
        """Whether the state at this step is due for a copy."""
        interval = self._interval
        if self.memory is None or interval.every is None:
            return False
        if interval.every == "auto":
            return stopping or interval.is_due
        return is_kept(step, interval.every, stopping=stopping)

    def keep(self, version: Version) -> None:
        """Begin to copy the state, unless that was done before.

        All replicas of the host copy the same. Returns when the state is staged: it may change from
        then on, while a thread writes it. A copy that is being written is waited for.

        Raises:
            Exception: What the thread of the copy before has raised.
        """
        self.wait()
        memory = self.memory
        if memory is None or self._interval.every is None or version == self._kept:
            return
        paused = self._failures > 0 and version.step < self._retry_step
        buddies = memory.buddies
        if buddies is not None and buddies.are_there:
            # Others wait for this process, whether it has room or not.
            if buddies.last == version:
                return
        elif paused:
            return
        began = time.monotonic()
        self.lock.acquire()
        try:
            staged = None if paused else self._stage(memory, version)
            writing = self._thread.submit(self._write_out, memory, version, staged)
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

    def _write_out(self, memory: MemoryCopies, version: Version, staged: StagedCopy | None) -> bool:
        """Write a copy and, after it, those of other processes; whether there was room for it.

        Without a copy of its own this process only takes part in the exchange.
        """
        try:
            fits = staged is not None and self._write_own(memory, staged)
            if memory.buddies is not None and memory.buddies.are_there:
                found = memory.buddies.exchange(
                    version, None if staged is None else staged.outgoing
                )
                if staged is not None:
                    self._write_for_wards(memory, staged, found)
            return fits
        finally:
            self.lock.release()

    def _write_own(self, memory: MemoryCopies, staged: StagedCopy) -> bool:
        """Write a copy, with or without those of earlier generations; whether there was room."""
        self._forget_earlier(memory)
        try:
            self._write(memory, staged, again=False)
        except OSError:
            self._forget_unneeded(memory, staged)
            try:
                self._write(memory, staged, again=self._needs_resumed(memory))
            except OSError as error:
                self._failed(memory, staged.version, error)
                return False
        return True

    def _write_for_wards(
        self, memory: MemoryCopies, staged: StagedCopy, found: Sequence[Incoming]
    ) -> None:
        """Write what other processes have sent. Without room, they have it on their own hosts."""
        try:
            memory.write_for_wards(staged, found)
        except OSError:
            self._forget_unneeded(memory, staged)
            try:
                memory.write_for_wards(staged, found)
            except OSError as error:
                assert memory.buddies is not None
                memory.buddies.failed(memory.directory, staged.version, error)

    def _forget_unneeded(self, memory: MemoryCopies, staged: StagedCopy) -> None:
        # Not the state that this generation resumed from: until its first own copy is complete on
        # all replicas, that is the only one.
        memory.forget(before=staged.version.generation, but=self.resumed)

    def _write(self, memory: MemoryCopies, staged: StagedCopy, *, again: bool) -> None:
        previous = self.resumed if again else self._kept or self.resumed
        memory.write(staged, previous=previous, again=again)

    def _needs_resumed(self, memory: MemoryCopies) -> bool:
        """Whether the state that this generation resumed from is one of the two that must stay.

        There is then no room for a third one, and a replica that waited for it would wait forever:
        its first copy is overwritten.
        """
        return self._num_kept > 0 and not self._forgot and self.resumed in memory.scan().states

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
