"""Contenders in processes of their own that take turns, and the processor time of each turn.

A contender is a generator that makes one step per `next`. It runs in as many processes as its job
has replicas, in the environment that `resilin run` makes. One contender runs at a time, for
a few steps, in an order that is drawn anew each time; noise of the machine that lasts longer than
that meets all of them.

- Clocks that are read through `time` stand still while the others run: whatever may take a share
  of the time (memory copies, measurements, reports) gets its share of its own job.
- The garbage collector is on. What exists after the first steps is frozen, so a collection looks at
  what steps have left since, at the cost of those who left it.
- Processes are forks of one, so that chance of where libraries lie in memory is the same for all.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ratios import Ratio, is_sharp, median_ratio

Contender = Callable[[], Iterator[None]]

WARM_STEPS = 24
WARM_SECONDS = 2.0
"""Processor time before the first turn: intervals of measurements and copies have settled by then.
Where steps are so short that a report is a part of one that counts, the 0.1 s of reports that are
free in each job are used up, too."""
VISIT_SECONDS = 0.06
"""Processor time of a contender before the next one runs, unless one step takes longer."""
TURN_STEPS = 20
"""Fewest steps of each contender in a turn: what is done every so many steps (a memory copy, a
decision on the batch size) is in every turn then, and not only in some that the median leaves out.
"""
LONG_TURN_SECONDS = 5.0
"""Processor time of one contender after which a turn ends with fewer steps than that."""
FEWEST_TURNS = 6
"""Turns that are made whatever the time: fewer have no interval."""
START_SECONDS = 120.0
"""Time that a contender has for its start, before it counts as one that cannot run."""


class Spent(NamedTuple):
    """Seconds of some steps: of the processor, per replica; and by the clock, of the slowest."""

    cpu: float
    wall: float


class _OwnClock:
    """The clocks of `time`, less the time in which this process had no turn."""

    def __init__(self) -> None:
        self._away = 0.0
        self._real = time.perf_counter
        perf_counter, monotonic = time.perf_counter, time.monotonic
        vars(time)["perf_counter"] = lambda: perf_counter() - self._away
        vars(time)["monotonic"] = lambda: monotonic() - self._away

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = self._real()
        yield
        self._away += self._real() - began

    def spent(self, steps: Iterator[None], num: int) -> Spent:
        cpu, wall = time.process_time(), self._real()
        for _ in range(num):
            next(steps)
        return Spent(time.process_time() - cpu, self._real() - wall)


def _replica(contender: Contender, environment: Mapping[str, str], orders: Connection) -> None:
    """One process of a contender: makes as many steps as it is told, and says what they took."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    parent, clock = os.getppid(), _OwnClock()
    try:
        steps = contender()
        for _ in range(WARM_STEPS):
            next(steps)
        gc.collect()
        gc.freeze()
        orders.send(clock.spent(steps, 2))
        while num := _next_order(orders, parent, clock):
            orders.send(clock.spent(steps, num))
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        orders.send(" ".join("".join(lines).split())[:300])
        os._exit(1)
    # At once: the end of a job is not measured, and there is nothing to tidy up after it.
    os._exit(0)


def _next_order(orders: Connection, parent: int, clock: _OwnClock) -> int:
    with clock.stopped():
        while not orders.poll(1.0):
            # The pipe does not tell: processes that were forked later hold its other end, too.
            if os.getppid() != parent:
                return 0
        return int(orders.recv())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class _Job:
    """The processes of one contender."""

    def __init__(self, name: str, contender: Contender, world: int, folder: Path) -> None:
        self._name = name
        context = multiprocessing.get_context("fork")
        common = {
            "WORLD_SIZE": f"{world}",
            "LOCAL_WORLD_SIZE": f"{world}",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{free_port()}",
            "TORCHELASTIC_RUN_ID": "overhead",
        }
        for name in ("RUN", "MEMORY", "PULSE"):
            place = folder / name.lower()
            place.mkdir(parents=True)
            common[f"RESILIN_{name}_DIR"] = str(place)
        self._orders: list[Connection] = []
        self._processes: list[Any] = []
        self.error = ""
        """Why it cannot run; empty if it can."""
        for rank in range(world):
            ours, theirs = context.Pipe()
            own = {**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            process = context.Process(target=_replica, args=(contender, own, theirs), daemon=True)
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    def started(self) -> Spent | None:
        """Time of two steps after the first ones; None if it cannot run."""
        deadline = time.monotonic() + START_SECONDS
        said: list[Any] = []
        for orders in self._orders:
            if not orders.poll(max(0.0, deadline - time.monotonic())):
                said.append(f"made no {WARM_STEPS} steps within {START_SECONDS:g} s")
                continue
            try:
                said.append(orders.recv())
            except EOFError:
                said.append("ended before its first steps")
        self.error = next((each for each in said if isinstance(each, str)), "")
        if self.error:
            self.end()
            return None
        return self._joined(said)

    def run(self, num: int) -> Spent:
        """Makes some steps.

        Raises:
            RuntimeError: One of its processes has failed; the message says why.
        """
        for orders in self._orders:
            orders.send(num)
        said: list[Any] = []
        for orders in self._orders:
            said.append(orders.recv())
            if isinstance(said[-1], str):
                self.error = said[-1]
                raise RuntimeError(f"{self._name} has failed: {self.error}")
        return self._joined(said)

    def end(self) -> None:
        for process, orders in zip(self._processes, self._orders, strict=True):
            if self.error:
                process.kill()
            elif process.is_alive():
                orders.send(0)
        for process in self._processes:
            process.join()

    @staticmethod
    def _joined(parts: list[Spent]) -> Spent:
        return Spent(statistics.fmean(part.cpu for part in parts), max(part.wall for part in parts))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contest has shown."""

    equal: tuple[str, str]
    """Two contenders that did the same."""
    turns: list[dict[str, Spent]]
    """Time of a step of each contender that could run, turn by turn."""
    errors: dict[str, str]
    """The others, and why they could not."""

    def ratio(self, name: str, *over: str, clock: Literal["cpu", "wall"] = "cpu") -> Ratio:
        """Time of a contender over the mean of some others, in the median turn."""
        times = [{key: getattr(spent, clock) for key, spent in t.items()} for t in self.turns]
        return median_ratio([t[name] / statistics.fmean(t[key] for key in over) for t in times])

    def milliseconds(self, name: str) -> float:
        """Processor time of a step of one replica, in the median turn."""
        return 1e3 * statistics.median(turn[name].cpu for turn in self.turns)

    @property
    def control(self) -> Ratio:
        """Processor time of the second of the equal ones over the first."""
        return self.ratio(self.equal[1], self.equal[0])


def contest(
    contenders: Mapping[str, Contender], equal: tuple[str, str], world: int, seconds: float
) -> Outcome:
    """Lets contenders take turns until the control is sharp or the time is up.

    Args:
        contenders: Their names and generators; called in processes of their own.
        equal: Two of them that do the same: the base of all ratios, and the control.
        world: Replicas of each.
        seconds: Time after which no turn begins, once there are enough of them for an interval.

    Raises:
        RuntimeError: One of the equal ones could not run.
    """
    # One that is told to end takes its contenders with it, and what they have in memory.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    deadline, rng = time.monotonic() + seconds, random.Random(0)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="overhead-") as folder:
        jobs: dict[str, _Job] = {}
        errors: dict[str, str] = {}
        step = 0.0
        try:
            # One after the other: they would only be in each other's way.
            for name, contender in contenders.items():
                job = _Job(name, contender, world, Path(folder) / name)
                spent = job.started()
                if spent is None:
                    errors[name] = job.error
                    continue
                jobs[name] = job
                warm = max(1, round(2 * WARM_SECONDS / spent.cpu))
                spent = job.run(warm)
                if name in equal:
                    step = spent.cpu / warm
            if lacking := set(equal) - set(jobs):
                raise RuntimeError(f"cannot run: {[errors[name] for name in lacking]}")
            visit = max(1, round(VISIT_SECONDS / step))
            length = min(TURN_STEPS, max(1, round(LONG_TURN_SECONDS / step)))
            visits = -(-length // visit)
            outcome = Outcome(equal, [], errors)
            while True:
                outcome.turns.append(_turn(jobs, visit, visits, rng))
                enough = is_sharp(outcome.control) or time.monotonic() >= deadline
                if enough and len(outcome.turns) >= FEWEST_TURNS:
                    return outcome
        finally:
            for job in jobs.values():
                job.end()


def _turn(
    jobs: Mapping[str, _Job], visit: int, visits: int, rng: random.Random
) -> dict[str, Spent]:
    """Each contender makes `visits` times `visit` steps, in an order that chance chooses."""
    spent: dict[str, list[Spent]] = {name: [] for name in jobs}
    for _ in range(visits):
        for name in rng.sample(list(jobs), len(jobs)):
            spent[name].append(jobs[name].run(visit))
    num = visit * visits
    return {
        name: Spent(sum(s.cpu for s in all_of_it) / num, sum(s.wall for s in all_of_it) / num)
        for name, all_of_it in spent.items()
    }
