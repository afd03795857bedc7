"""Supervision of a live job's workers on one machine: those that are lost are replaced.

Nobody is restarted because another one is lost: the launcher tells the others, and starts one new
process. It decides nothing about the training. What a worker's exit means, and how
often one is replaced, is in `verdict`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

from resilin.cli.agent import ALONE
from resilin.cli.errors import GaveUp, ScriptNotLive, say
from resilin.cli.faults import count, ending, record
from resilin.cli.hang import Local, Watchdog
from resilin.cli.live.guard import TICK, Guard, Heartbeats, local
from resilin.cli.live.session import Roll, Session
from resilin.cli.live.signs import Inbox
from resilin.cli.live.verdict import JOB, STOPPED, Budget, Verdict, judge
from resilin.cli.live.workers import Starter, Worker
from resilin.core.live import NotLive
from resilin.engine.live.refusal import NOT_LIVE
from resilin.engine.stop import RESTART

SETTLE = 0.5
"""Seconds for the last message of a worker that has exited with code 0 to arrive."""
UNMISSED = 1.0
"""Seconds after the end of a worker's script in which those of all others end, as a rule."""
REPLACE_AFTER = 0.25
"""Seconds from a loss to its replacement: if all workers fail together, none is replaced."""
RESTART_GRACE = 5.0
"""Seconds that workers have to end before the job is started again."""
_GONE = (Verdict.LEFT, Verdict.EARLY)
"""Ends of a worker that is not replaced."""
REAPED = 5.0
"""Seconds for killed processes to end."""


class Launcher:
    """The workers of one machine, until the job is over.

    Everything that can end a worker or the job arrives here, and is handled in one order.

    Args:
        num_workers: Number of workers.
        starter: Starts a worker.
        open_session: Starts an authority; called again whenever the job is started again.
        inbox: What the main thread waits for.
        watchdog: Finds workers whose main thread hangs.
        heartbeats: Finds workers that are frozen.
        budget: Bounds replacements and restarts.
        grace: Seconds that workers have to save after a signal to the launcher.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        starter: Starter,
        open_session: Callable[[Launcher], Session],
        inbox: Inbox,
        watchdog: Watchdog,
        heartbeats: Heartbeats,
        budget: Budget,
        grace: float,
    ) -> None:
        self._slots = range(num_workers)
        self._starter = starter
        self._open_session = open_session
        self._inbox = inbox
        self._watchdog = watchdog
        self._guard = Guard(watchdog, heartbeats)
        self._budget = budget
        self._grace = grace
        self._all: list[Worker] = []
        self._due: list[tuple[float, Worker]] = []
        self._roll = Roll()
        self._trouble: str | None = None
        self._failure = ""
        self._session = open_session(self)  # which asks for the number of the newest generation

    @property
    def _workers(self) -> list[Worker]:
        """Workers whose end was not handled yet."""
        return [worker for worker in self._all if worker.verdict is None]

    @property
    def _is_over(self) -> bool:
        """Whether the training is over: a member has said so, and has not failed since."""
        ended = (Verdict.FINISHED, None)
        formed = self._roll.formed
        # Those that the others have continued without were alone with that.
        members = [each for each in self._all if formed is None or each.member in formed.names]
        finished = any(each.finished and each.verdict in ended for each in members)
        return finished or self._is_over_elsewhere

    @property
    def _is_over_elsewhere(self) -> bool:
        """Whether the training has ended on other machines, without any worker of this one."""
        return self._session.keeper.finished and self._roll.is_without(self._all)

    def run(self) -> None:
        """Run until the job is over.

        Raises:
            GaveUp: The job failed.
            ScriptNotLive: The script cannot be live.
            SignalException: A signal stopped it.
        """
        try:
            self._begin()
            while self._workers or self._due:
                for number in self._wait():
                    self._stop(number)
                self._turn()
            if self._is_over:
                self._session.keeper.finish()
        finally:
            self._kill_all()
            self._session.close()
        say(f"{self._watchdog.ending()}{self._budget.used_up}")

    # Of the session, for the main thread ---------------------------------------------------

    def finished(self, name: str) -> None:
        """A worker's training is over: it may exit whenever its script ends."""
        for worker in self._all:
            worker.finished |= worker.name == name

    def cannot_continue(self, reason: str) -> None:
        """The job cannot continue with living processes."""
        if not self._is_over_elsewhere:
            self._trouble = self._trouble or reason

    @property
    def highest(self) -> int:
        """Highest number of a generation so far; -1 before the first."""
        return self._roll.highest

    # One turn ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._watchdog.forget()
        self._roll.forget()
        self._trouble = None
        for slot in self._slots:
            self._start(slot)
        numbers = ", ".join(str(worker.number) for worker in self._all)
        which = f"worker {numbers}" if len(self._all) == 1 else f"workers {numbers}"
        say(f"started {which}; those that are lost are replaced, the others keep running")

    def _start(self, slot: int) -> Worker:
        worker = self._starter.start(slot, self._session.path)
        self._all.append(worker)
        self._session.add(worker)
        return worker

    def _wait(self) -> list[signal.Signals]:
        now = time.monotonic()
        seconds = min([TICK, *(due - now for due, _ in self._due)])
        sentinels = [each.sentinel for each in self._workers if each.sentinel is not None]
        return self._inbox.wait(seconds, sentinels)

    def _turn(self) -> None:
        """Look at everything that may have happened."""
        ended = [(worker, code) for worker in self._workers if (code := _exit(worker)) is not None]
        for message in self._inbox.messages():
            message()
        self._roll.look(self._session.newest, self._all)
        # What a signal has ended is the cause: another worker of the same copy may fail after it.
        for worker, code in sorted(ended, key=lambda each: each[1] >= 0):
            # What it said before may still be on its way.
            if code or worker.finished or time.monotonic() - (worker.gone or 0.0) > SETTLE:
                self._end(worker, code)
        self._let_go()
        self._dismiss()
        self._guard.look(self._workers, self._session, self._roll.formed)
        self._report_early(after=ALONE)
        if self._trouble is None and not self._workers:
            self._conclude()
        if self._trouble is not None:
            self._begin_again(self._trouble)
        self._replace()

    def _let_go(self) -> None:
        """Tell the others of workers whose scripts have ended: they may train on, and need nobody.

        At the end of a job, nobody waits for that.
        """
        formed = self._roll.formed
        for worker in self._all:
            if worker.verdict is not Verdict.FINISHED or not self._workers:
                continue
            missed = formed is not None and worker.member not in formed.names
            if worker.settled and missed and not worker.dismissed:
                worker.verdict = Verdict.EARLY
                say(f"worker {worker.number} has ended its script: the others continue without it")
            if any(each.verdict is None for each in self._copy(worker)):
                continue
            if not worker.settled and time.monotonic() - (worker.gone or 0.0) > UNMISSED:
                worker.settled = True
                with contextlib.suppress(NotLive):  # no other member is left: see `_dismiss`
                    self._session.drop(worker.name)

    def _dismiss(self) -> None:
        """End workers that wait to join a training that is over."""
        formed = self._roll.formed
        if formed is None or not self._is_over:
            return
        waiting = [each for each in self._workers if each.member not in formed.names]
        waiting = [each for each in waiting if not each.dismissed]
        if waiting and self._is_over_elsewhere:
            number = count(len(waiting), "worker")
            say(f"the training is over on other machines: ending {number} that waited to join it")
        for worker in waiting:
            worker.dismissed = True
            worker.kill()

    def _end(self, worker: Worker, code: int) -> None:
        """Handle the end of a worker."""
        session, roll = self._session, self._roll
        if worker.dismissed:
            worker.verdict = Verdict.FINISHED
            return
        if worker.follows:
            worker.verdict = Verdict.LOST
            return
        if code == NOT_LIVE:
            raise ScriptNotLive(self._watchdog.error_of(local(worker)))
        verdict = worker.verdict = judge(
            code,
            finished=worker.finished,
            begun=session.newest is not None,
            formed=roll.formed is not None,
            ever_formed=roll.ever_formed,
        )
        if verdict is Verdict.FINISHED:
            return
        left = [each.verdict for each in self._copy(worker) if each.verdict in _GONE]
        if verdict is Verdict.LOST and left:
            # It cannot continue without the one that has left.
            verdict = worker.verdict = left[0]
        how = f"worker {worker.number} {ending(worker.pid, code)}"
        if code:
            worker.kill()  # what it has started would outlive it
            self._report_early()
            leaves = ": it was asked to leave, and is not replaced" * (verdict is Verdict.LEFT)
            say(f"{how} after {worker.lifetime:.1f} s{leaves}")
        if code not in (0, RESTART) and not worker.froze:
            kind = "worker_left" if verdict is Verdict.LEFT else "worker_lost"
            life = self._watchdog.life(worker.lifetime, [local(worker)])
            record(kind, how, session.replica(worker), without_step=life.without_step)
        error = self._watchdog.error_of(local(worker))
        self._failure = how + (f": {error}" if error else "")
        if verdict is Verdict.WRONG:
            raise GaveUp(f"failed: {self._failure}")
        if verdict is Verdict.ABSENT:
            raise GaveUp(_absence(worker, code, heard=worker.name in session.beats))
        if verdict is Verdict.LOST:
            self._take_along(worker)
        self._drop(worker)
        if verdict is Verdict.ANEW:
            self._trouble = self._trouble or f"worker {worker.number} was lost before the job began"
        elif verdict is Verdict.LOST:
            self._due.append((time.monotonic() + REPLACE_AFTER, worker))

    def _copy(self, worker: Worker) -> list[Worker]:
        """The workers that have the same copy of the model as this one, in parts; it included."""
        return [each for each in self._all if each.member == worker.member]

    def _take_along(self, worker: Worker) -> None:
        """End the workers that have the other parts of a lost one's copy of the model."""
        rest = [each for each in self._copy(worker) if each.verdict is None]
        if not rest:
            return
        numbers = ", ".join(str(each.number) for each in rest)
        say(f"ending worker {numbers}, with which worker {worker.number} had a copy of the model")
        for each in rest:
            each.follows = True
            each.kill()

    def _drop(self, worker: Worker) -> None:
        """Tell the others that a worker is gone, and those that had finished with it."""
        gone = [each for each in self._all if each.verdict is Verdict.FINISHED]
        gone += [each for each in self._copy(worker) if each.follows]
        try:
            for each in (worker, *gone):
                self._session.drop(each.name)
        except NotLive as error:
            # Whoever leaves last leaves nobody behind.
            if self._workers or worker.verdict is Verdict.LOST:
                self._trouble = self._trouble or str(error)

    def _replace(self) -> None:
        """Start the replacements that are due."""
        now = time.monotonic()
        due = [worker for when, worker in self._due if when <= now]
        self._due = [(when, worker) for when, worker in self._due if when > now]
        for worker in due:
            if self._is_over:
                continue  # there is no training to join any more: see `_conclude`
            copy = self._copy(worker)
            if any(each.verdict is None for each in copy):
                self._due.append((now + TICK, worker))  # they were killed, and are not reaped yet
                continue
            for each in copy:
                each.settled = True
            asked = worker.poll() == RESTART
            life = None if asked else self._watchdog.life(worker.lifetime, [local(worker)])
            if (refusal := self._budget.refusal(worker.slot, life)) is not None:
                text = f"workers of local rank {worker.slot} {refusal}; the last: {self._failure}"
                if not self._workers or self._roll.formed is None:
                    raise GaveUp(f"gave up: {text}")
                say(f"worker {worker.number} is not replaced: {text}")
                continue
            for each in copy:
                self._watchdog.forget(each.slot)
            for old, new in [(each, self._start(each.slot)) for each in copy]:
                say(f"worker {new.number} (process {new.pid}) replaces worker {old.number}")

    def _conclude(self) -> None:
        """No worker is left: the job is over, or must be started again to be completed."""
        last = [each for each in self._all if not (each.verdict is Verdict.LOST and each.settled)]
        # Those that the others have continued without have nothing to complete.
        members = () if self._roll.formed is None else self._roll.formed.names
        missing = [each for each in last if each.verdict is Verdict.LOST and each.member in members]
        if missing and self._is_over:
            self._trouble = f"worker {missing[0].number} was lost before its script had ended"
        elif all(worker.verdict is Verdict.LEFT for worker in last):
            raise _stopped(last[-1].poll() or 0)

    def _begin_again(self, reason: str) -> None:
        """Start the job again from what was kept, with new processes and a new authority."""
        slots = [Local(slot, slot, 0) for slot in self._slots]
        life = self._watchdog.life(time.monotonic() - self._session.began, slots)
        if (refusal := self._budget.refusal(JOB, life)) is not None:
            last = f"; the last error: {self._failure}" * bool(self._failure)
            raise GaveUp(f"gave up: the job {refusal}{last} ({reason})")
        number, most = self._budget.restarted, self._budget.most
        say(f"the job cannot continue live, starting it again ({number} of {most}): {reason}")
        signals = self._end_all(RESTART_GRACE, together=True)
        self._session.close()
        if signals:
            raise _stopped(128 + signals[0])
        self._session = self._open_session(self)
        self._begin()

    def _report_early(self, *, after: float = 0.0) -> None:
        """Report workers that exited with 0 before the others, at least `after` seconds ago."""
        for worker in self._all:
            if worker.verdict is not Verdict.EARLY or worker.settled or not self._workers:
                continue
            if time.monotonic() - (worker.gone or 0.0) >= after:
                worker.settled = True
                text = f"worker {worker.number} {ending(worker.pid, 0)}"
                text += f" after {worker.lifetime:.1f} s"
                say(f"{text}, while other workers were still running: its script ended early")
                record("worker_left", text, self._session.replica(worker))

    # The end -------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> NoReturn:
        """Stop the whole job."""
        say(f"{number.name}: stopping {count(len(self._workers), 'worker')}")
        self._end_all(self._grace, together=self._session.alone)
        raise _stopped(128 + number)

    def _end_all(self, grace: float, *, together: bool) -> list[signal.Signals]:
        """Ask all workers to stop, and kill those that do not in time.

        Args:
            grace: Seconds that they have.
            together: Whether the job stops with them; otherwise they leave it.

        Returns:
            The signals that came meanwhile; SIGINT ends the wait.
        """
        if together:
            self._session.stop_all()
        for worker in self._workers:
            worker.send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        signals: list[signal.Signals] = []
        while running := [each for each in self._workers if self._runs(each)]:
            if signal.SIGINT in signals or time.monotonic() > deadline:
                numbers = ", ".join(str(worker.number) for worker in running)
                say(f"killing worker {numbers}, which had {grace:g} s to stop")
                break
            self._guard.end_frozen(running, self._session)
            signals += self._wait()
        self._kill_all()
        return signals

    def _runs(self, worker: Worker) -> bool:
        """Whether a worker that was asked to stop still runs. If it fails, the others are told."""
        seen = worker.gone is not None
        if (code := _exit(worker)) is not None and not seen and code not in (0, *STOPPED):
            self._drop(worker)
        return code is None

    def _kill_all(self) -> None:
        """End what is left, and reap it."""
        for worker in self._workers:
            worker.kill()
        deadline = time.monotonic() + REAPED
        while any(_exit(each) is None for each in self._workers) and time.monotonic() < deadline:
            self._wait()
        for worker in self._workers:
            if worker.gone is None:
                say(f"worker {worker.number} (process {worker.pid}) cannot be killed")
        self._all, self._due = [], []


def _exit(worker: Worker) -> int | None:
    """The exit code of a worker, and the time at which it was first seen."""
    code = worker.poll()
    if code is not None and worker.gone is None:
        worker.gone = time.monotonic()
    return code


def _stopped(code: int) -> SignalException:
    number = signal.Signals(code - 128)
    return SignalException(f"stopped by {number.name}", sigval=number)


def _absence(worker: Worker, code: int, *, heard: bool) -> str:
    """The reason for which a job cannot begin: a worker has gone without an error.

    Args:
        worker: The worker.
        code: Its exit code.
        heard: Whether it has given any sign of life.
    """
    how = f"worker {worker.number} {ending(worker.pid, code)}"
    if code:
        return f"failed: {how}: it was asked to leave before the job had begun"
    if not heard:
        return (
            f"failed: {how} without taking part in the job: with --live, the script must call "
            "resilin.init_process_group()"
        )
    return f"failed: {how} before the job had begun: its script ended early"
