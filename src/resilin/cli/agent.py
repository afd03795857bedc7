"""torchrun's agent, with one log line for each thing that happens.

The agent is torch's own class and keeps torch's decisions. This subclass adds log lines, the names
of the machines in a generation, and four decisions. A script that fails repeatedly without
completing a new step is not restarted forever. A worker that blocks the others is killed. Workers
that have just started are restarted when one of their agents is gone: they would otherwise wait
for a peer that never comes. And agents repeat the rendezvous when one of them disappears while
ranks are being assigned, where torch's agent would exit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resilin.cli.blame import Causes, Failure, causes, lines
from resilin.cli.errors import say
from resilin.cli.faults import count, host, record
from resilin.cli.hang import Local, Watchdog
from resilin.cli.stopping import StopSignals
from resilin.compat.torch_agent import WrappedAgent, rendezvous_members
from resilin.core.lives import Lives
from resilin.engine.processes import process_gone, process_start

STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a worker that was asked to stop, without and with its own signal handler."""
FORMING = 300.0
"""Seconds after the start of the workers within which a missing agent cannot simply have finished:
torch's agents wait that long for each other at the end."""
MAX_LINES = 8
"""Largest number of lines for one failure."""
ALONE = 30.0
"""Seconds before an early exit is reported: at the end of a job, workers do not exit at the same
moment."""


class ReportingAgent(WrappedAgent):
    """The agent of one machine, which reports on standard error.

    Args:
        spec: The workers.
        watchdog: Watches the workers.
        stop: Signals that stop the job.
        bound_fruitless: Whether to give up on a script that keeps failing without a new step
            before its restarts are used up.
        farewell: Seconds for which a closed job keeps answering. The agent that hosts the
            rendezvous needs it: its store tells the other agents that the job is over.
        args: Other arguments of torch's agent.
        kwargs: Other keyword arguments of torch's agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *args: Any,
        watchdog: Watchdog,
        stop: StopSignals,
        bound_fruitless: bool,
        farewell: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, *args, **kwargs)
        self._farewell = farewell
        self._watchdog = watchdog
        self._stop = stop
        self._bound_fruitless = bound_fruitless
        self._lives = Lives()
        self._last_failure = ""
        self._asked = False
        self._causes = Causes()
        self._machines: dict[str, int] = {}
        self._changes: list[str] = []
        self._composition: tuple[int, int, list[int]] | None = None
        self._started = 0.0
        self._starts: dict[int, str | None] = {}
        self._left: dict[int, _Left] = {}

    def run(self, *args: Any, **kwargs: Any) -> RunResult:
        """Run until the job is over, and report how it ended."""
        spec = self.spec
        say(
            f"agent {os.getpid()} on {host()} starts {count(spec.local_world_size, 'worker')} "
            f"of job {spec.rdzv_handler.get_run_id()}"
        )
        result: RunResult | None = super().run(*args, **kwargs)
        if result is None:
            # A spare machine ends this way when the job is over. torch's launcher does not expect
            # None.
            say("the job ended without needing this machine")
            return RunResult(state=WorkerState.SUCCEEDED)
        self._report_end(result)
        if self._farewell:
            spec.rdzv_handler.shutdown()
            time.sleep(self._farewell)
        return result

    def _report_end(self, result: RunResult) -> None:
        max_restarts = self.spec.max_restarts
        restarts = max_restarts - self.remaining_restarts
        if not result.is_failed():
            after = f" after {count(restarts, 'restart')}" * bool(restarts)
            say(self._watchdog.ending() + after)
        elif self._bound_fruitless and self._lives.hopeless:
            best = self._lives.best
            made = "a step" if best is None else f"a new step after step {best}"
            self._give_up(
                f"the workers failed {self._lives.fruitless} times in a row without making {made}; "
                f"the last error: {self._last_failure} (--max-restarts N would restart them N "
                "times)",
                ": ",
            )
        else:
            self._give_up(f"after {count(restarts, 'restart')} (--max-restarts {max_restarts})")

    def _give_up(self, reason: str, mark: str = " ") -> None:
        say(f"gave up{mark}{reason}")
        record("gave_up", reason)

    def around_rendezvous(self, stock: Callable[..., None], group: WorkerGroup) -> None:
        """Run the rendezvous, and repeat it if an agent leaves before it is complete."""
        try:
            stock(group)
        except DistStoreError as error:
            say(f"an agent left before ranks were assigned: repeating the rendezvous ({error})")
            # Each rendezvous has its own time limit, so this recursion ends.
            self.around_rendezvous(stock, group)

    def around_ranks(
        self, stock: Callable[..., list[Worker]], store: Any, rank: int, size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign ranks, and report machines that have joined or left."""
        # No agent gets its ranks before all have reached the store, so everything written before
        # this point is visible to all of them afterwards.
        store.set(f"resilin/machine/{rank}", host())
        workers = stock(store, rank, size, spec)
        self._causes = Causes(store, rank, size)
        keys = [f"resilin/machine/{other}" for other in range(size)]
        # Agents of a plain torchrun write no name.
        if store.check(keys):
            names = [name.decode() for name in store.multi_get(keys)]
            self._compare_machines(names, records=rank == 0)
        return workers

    def _compare_machines(self, names: list[str], *, records: bool) -> None:
        now = {name: names.count(name) for name in names}
        if before := self._machines:
            for name in sorted(now | before):
                change = now.get(name, 0) - before.get(name, 0)
                if change:
                    # Two agents on one machine share its name.
                    self._changes.append(f"{name} {'joined' if change > 0 else 'left'}")
                if change < 0 and records:  # all agents see it, one records it
                    record("machine_left", f"{name} left")
        self._machines = now

    def around_start(
        self, stock: Callable[..., dict[int, Any]], group: WorkerGroup
    ) -> dict[int, Any]:
        """Starts the workers, and watches over them."""
        self._watchdog.forget()
        pids = stock(group)
        self._stop.install()  # over the handlers that torch has just installed
        self._started = time.monotonic()
        self._left = {}
        self._starts = {pid: process_start(pid) for pid in pids.values()}
        workers = [
            Local(worker.local_rank, worker.global_rank, pids[worker.local_rank])
            for worker in group.workers
        ]
        self._watchdog.begin(workers, group.workers[0].world_size)
        self._stop.kill = partial(self._watchdog.kill, workers)
        self._report_composition(group)
        return pids

    def _report_composition(self, group: WorkerGroup) -> None:
        """Report the number of workers and agents, if it is not that of the last start."""
        ranks = [worker.global_rank for worker in group.workers]
        num_workers, num_agents = group.workers[0].world_size, group.group_world_size or 1
        before, self._composition = self._composition, (num_workers, num_agents, ranks)
        changes, self._changes = self._changes, []
        # The first line of the agent has told the number of workers of a single one.
        if before == self._composition or (before is None and num_agents == 1):
            return
        here = f"worker {ranks[0]} runs" if len(ranks) == 1 else _range(ranks) + " run"
        text = f"{count(num_workers, 'worker')} on {count(num_agents, 'agent')}; {here} here"
        say(f"{', '.join(changes)}: {text}" if changes else text)

    def around_monitor(self, stock: Callable[..., RunResult], group: WorkerGroup) -> RunResult:
        """Check the workers, report failures, and kill workers that hang."""
        # Checked before torch does: it stops the others as soon as one has failed.
        self._note_leavers(group)
        result = stock(group)
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED}:
            self._report_failure(result)
        elif result.state == WorkerState.HEALTHY:
            self._report_leavers(after=ALONE)
            if self._misses_an_agent(group):
                say("an agent is gone: restarting the workers")
                self.restart_workers(group)
            else:
                self._end_those_that_hang()
        return result

    def _report_failure(self, result: RunResult) -> None:
        lifetime = time.monotonic() - self._started
        life = self._watchdog.life(lifetime)
        named = _by_time(result.failures)
        failures = [self._failure(rank, each.pid, each.exitcode) for rank, each in named]
        failures += self._unnamed(result.failures)
        early = self._report_leavers()
        if not failures:  # workers stuck in the kernel are alive, and cannot be killed
            self._last_failure = f"workers stopped responding after {lifetime:.1f} s"
            say(self._last_failure)
        elif all(each.follows for each in failures):
            # Another one has caused it: one that has left early, or one of another agent.
            self._last_failure = early or self._cause_elsewhere(failures, lifetime)
        else:
            own = causes(failures)
            for line in lines(own, lifetime, MAX_LINES):
                say(line)
            self._last_failure = own[0].told()
            # The other agents read it before they restart their workers.
            self._causes.publish(own[0].told(host(), lifetime))
            for place, each in enumerate(own[:MAX_LINES]):
                if not each.asked:
                    without_step = place == 0 and life.without_step
                    record("worker_lost", each.told(), each.rank, without_step=without_step)
        self._asked = any(each.asked for each in failures)
        if not self._asked:
            self._lives = self._lives.after(life)
        if self._bound_fruitless and self._lives.hopeless:
            self.remaining_restarts = 0

    def _unnamed(self, named: Container[int]) -> list[Failure]:
        """Workers that failed before torch looked: of several warm ones it names one, any one."""
        found = []
        for rank, left in sorted(self._left.items()):
            code = self.exit_code(left.local_rank)
            if rank not in named and code and code not in STOPPED:
                found.append(self._failure(rank, left.pid, code))
        return found

    def _failure(self, rank: int, pid: int, code: int) -> Failure:
        return Failure(
            rank=rank,
            pid=pid,
            code=code,
            error=self._watchdog.error(rank),
            follows=self._watchdog.lost_a_peer(rank),
        )

    def _cause_elsewhere(self, failures: list[Failure], lifetime: float) -> str:
        """Report the loss of a worker of another agent; returns the report."""
        text = self._causes.of_others()
        if text is None:
            ranks = sorted(each.rank for each in failures)
            which = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {_list(ranks)}"
            text = f"{which} lost the connection to another worker after {lifetime:.1f} s"
        say(text)
        return text

    def _end_those_that_hang(self) -> None:
        """Kill the workers that block the others; torch then sees them fail and restarts all."""
        held_up = self._watchdog.look()
        if held_up is None:
            return
        found, workers = held_up
        for worker in workers:
            detail = f"worker {worker.rank} made no progress for {found.quiet:.0f} s"
            record("worker_hung", detail, worker.rank)
        ranks = ", ".join(str(worker.rank) for worker in workers)
        which = f"worker {ranks}" if len(workers) == 1 else f"workers {ranks}"
        say(f"killing {which} to restart all workers")
        self._watchdog.kill(workers)

    def _note_leavers(self, group: WorkerGroup) -> None:
        """Note workers that have exited while others have not, as far as can be known."""
        now = time.monotonic()
        told = {worker.rank for worker in self._watchdog.left()}
        for worker in group.workers:
            rank, pid = worker.global_rank, worker.id
            gone = rank in told or process_gone(pid, self._starts.get(pid))
            if gone and rank not in self._left:
                self._left[rank] = _Left(pid, worker.local_rank, now)

    def _report_leavers(self, *, after: float = 0.0) -> str:
        """Report workers that exited with 0 before the others, at least `after` seconds ago.

        Returns:
            The first of all reports of this generation; empty without one.
        """
        now = time.monotonic()
        for rank, left in sorted(self._left.items()):
            too_early = now - left.when < after
            if left.said is not None or too_early or self.exit_code(left.local_rank) != 0:
                continue
            when = left.when - self._started
            text = f"worker {rank} (process {left.pid}) exited with code 0 after {when:.1f} s"
            left.said = (
                f"{text}, while other workers were still running: the script ended early on "
                f"rank {rank}"
            )
            say(left.said)
            record("worker_left", text, rank)
        return next((left.said for left in self._left.values() if left.said is not None), "")

    def _misses_an_agent(self, group: WorkerGroup) -> bool:
        """Whether an agent left this generation while it was forming, and none waits to join.

        Later the workers notice it themselves, or a waiting agent triggers the restart.
        """
        members = rendezvous_members(group.spec.rdzv_handler)
        if members is None or time.monotonic() - self._started > FORMING:
            return False
        present, waiting = members
        return present < (group.group_world_size or 1) and not waiting

    def around_restart(self, stock: Callable[..., None], group: WorkerGroup) -> None:
        """Restart the workers, and report the reason."""
        if group.state == WorkerState.HEALTHY:
            # An agent whose workers have failed waits for the others, as one that joins does.
            cause = self._causes.of_others(0) or "another agent is waiting to join"
            say(f"{cause}: restarting the workers")
        else:
            spec = group.spec
            number = spec.max_restarts - self.remaining_restarts
            asked = " as they asked" * self._asked
            say(f"restarting the workers{asked} (restart {number} of {spec.max_restarts})")
        stock(group)


@dataclass
class _Left:
    """A worker that has exited before the others."""

    pid: int
    """Its process id."""
    local_rank: int
    """Its number among the workers of this agent."""
    when: float
    """Time at which it was noticed, on the monotonic clock."""
    said: str | None = None
    """The report of it; None before that."""


def _range(ranks: list[int]) -> str:
    return f"workers {ranks[0]}-{ranks[-1]}"


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_LINES]))
    return shown + (", ..." if len(ranks) > MAX_LINES else "")


def _by_time(failures: dict[int, ProcessFailure]) -> list[tuple[int, ProcessFailure]]:
    """The failures in order of time, without workers that the agent itself stopped."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    return [item for item in by_time if item[1].exitcode not in STOPPED] or by_time
