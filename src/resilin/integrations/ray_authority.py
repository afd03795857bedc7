"""The authority of a live job on Ray: an actor with the keeper and the socket of the launcher.

It says who is in the job, requests the actors of the workers, and hears of their ends from Ray. It
decides nothing about the training. Its workers belong to it: if it is lost, Ray ends them.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from resilin.core.live import NotLive
from resilin.core.membership import Roster
from resilin.core.text import clean
from resilin.engine import environment
from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.authority.server import Server
from resilin.engine.stop import RESTART
from resilin.integrations.ray_crew import Crew, Hand
from resilin.integrations.ray_worker import Outcome, TrainFunction
from resilin.telemetry.extras import load

MOST_FAILED_STARTS = 5
"""Actors in a row that could not be started, after which the job is given up."""
LONGEST_REASON = 160
"""Most characters of an error of Ray in a line of the log."""

logger = logging.getLogger("resilin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requests of the user."""

    train: TrainFunction
    """The function of each worker."""
    config: Any
    """Its argument; None for none."""
    min_workers: int
    """Workers with which the job begins."""
    max_workers: int
    """Workers that are requested."""
    options: dict[str, Any]
    """Options of the workers' actors."""
    max_failures: int
    """Errors of workers and restarts of the job that are allowed; -1 for any number."""
    heartbeat: float
    """Seconds without a sign of life after which a worker is killed."""


class GaveUp(RuntimeError):
    """The job has failed too often."""


@dataclass
class Budget:
    """Failures that are allowed."""

    most: int
    """Number of them; -1 for any."""
    spent: int = 0
    """Number of those that there were."""

    def spend(self, reason: str) -> None:
        """Count a failure.

        Raises:
            GaveUp: It is one too many.
        """
        self.spent += 1
        if 0 <= self.most < self.spent:
            raise GaveUp(
                f"failure {self.spent} of the job, and max_failures is {self.most}: {reason}"
            )


@dataclass
class Life:
    """One life of a job: from the start of its first workers until it is over or cannot continue.

    Args:
        terms: What the user has asked for.
        budget: Failures that are left.
        address: Address of this node.
        above: Newest generation of the lives before; -1 for none.
        show: Called with each change of the workers, in a line for the log.
    """

    terms: Terms
    budget: Budget
    address: str
    above: int
    show: Callable[[str], None]
    formed: Roster | None = None
    """The newest generation that was formed."""
    beats: dict[str, int] = field(default_factory=dict)
    """Signs of life, by name."""
    _trouble: str | None = None
    _failed_starts: int = 0

    def __post_init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        self.keeper = LocalKeeper(above=self.above)
        self.server = Server(
            f"tcp://{self.address}:0",
            self.keeper,
            num_founders=self.terms.min_workers,
            secret=self.secret,
            address=self.address,
            on_alive=self._note,
            on_finished=lambda name: None,  # the answer of its actor says so
            on_restart=lambda name, reason: self._cannot_continue(reason),
        )
        self.crew = Crew(f"ray-{secrets.token_hex(4)}", self.terms.options)

    def _note(self, name: str) -> None:
        self.beats[name] = self.beats.get(name, 0) + 1

    def _cannot_continue(self, reason: str) -> None:
        self._trouble = self._trouble or reason

    @property
    def highest(self) -> int:
        """Highest number of a generation so far."""
        newest = self.keeper.newest
        return self.above if newest is None else newest.roster.generation

    def run(self) -> list[Any]:
        """Run until the training is over.

        Returns:
            What the functions have returned, in the order of the replicas.

        Raises:
            NotLive: It cannot continue with living processes.
            GaveUp: Too many workers have failed.
            Exception: The function has failed before the job ever began.
        """
        while True:
            self.crew.request(self.terms.max_workers)
            for hand in self.crew.answered():
                self._hear(hand)
            self._look()
            for hand in list(self.crew.frozen(self.terms.heartbeat, self.beats)):
                self._lose(hand, f"gave no sign of life for {self.terms.heartbeat:g} s")
            finished = [each for each in self.crew.hands if each.finished]
            members = () if self.formed is None else self.formed.names
            left = [each for each in self.crew.running if each.name in members]
            if finished and not left:
                finished.sort(key=lambda each: self._order(each, members))
                return [each.value for each in finished]
            if self._trouble is not None:
                raise NotLive(self._trouble)
            if not finished:
                self._admit()

    def close(self) -> None:
        """End all workers, and the socket."""
        self.crew.close()
        self.server.close()
        self.keeper.close()

    @staticmethod
    def _order(hand: Hand, members: tuple[str, ...]) -> tuple[int, int]:
        place = members.index(hand.name) if hand.name in members else len(members)
        return place, hand.number

    def _look(self) -> None:
        """Take the newest generation that was formed."""
        newest = self.keeper.newest
        if newest is None or newest.formed is None or newest.formed == self.formed:
            return
        self.formed = newest.formed
        names = {each.name: str(each) for each in self.crew.hands}
        members = ", ".join(names.get(name, name) for name in self.formed.names)
        self.show(f"generation {self.formed.generation}: {members}")

    def _admit(self) -> None:
        """Call the functions of workers that wait, as many as may take part now.

        The first ones begin together. Others join when a generation was formed: until then nobody
        has a state that they could be given.
        """
        for hand in self.crew.hands:
            if hand.place is None or hand.result is not None:
                continue
            if self.formed is None and len(self.crew.running) >= self.terms.min_workers:
                return
            self.server.expect(hand.name, hand.place.pid)
            settings = {
                environment.LIVE: self.server.address,
                environment.MEMBER: hand.name,
                environment.LIVE_SECRET: self.secret.hex(),
            }
            hand.result = hand.actor.run.remote(settings, self.terms.train, self.terms.config)

    def _hear(self, hand: Hand) -> None:
        """Take an answer of a worker, or the news that none will come."""
        ray: Any = load("ray", "ray", "run_live")
        try:
            answer = ray.get(hand.awaited)
        except ray.exceptions.RayTaskError as error:
            if self.formed is None and self.above < 0:
                raise  # it would do so again
            self._lose(hand, f"failed: {_last_line(error)}")
            self.budget.spend(f"{hand} failed: {_last_line(error)}")
        except ray.exceptions.RayError as error:
            if hand.place is None:
                self._fail_to_start(hand, error)
            else:
                self._lose(hand, f"is lost: {_last_line(error)}")
        else:
            if not isinstance(answer, Outcome):
                hand.place, self._failed_starts = answer, 0
            elif answer.code in (None, 0):
                hand.finished, hand.value = True, answer.value
            elif answer.code == RESTART and self.formed is None:
                self._lose(hand, "was lost before the job began")
                self._cannot_continue(f"{hand} was lost before the job began")
            else:
                self._lose(hand, f"has left with exit code {answer.code}")

    def _fail_to_start(self, hand: Hand, error: Exception) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            raise GaveUp(f"{self._failed_starts} actors in a row did not start: {error}") from error
        self.show(f"{hand} did not start: {_last_line(error)}")
        self.crew.release(hand)

    def _lose(self, hand: Hand, how: str) -> None:
        """Tell the others that a worker is gone, and those that have finished with it."""
        gone = [hand, *(each for each in self.crew.hands if each.finished)]
        try:
            for each in gone:
                self.server.drop(each.name)
        except NotLive as error:
            if len(gone) == 1:  # otherwise the training is over
                self._cannot_continue(str(error))
        # The others first: they wait for that, and nobody waits for the log.
        self.show(f"{hand} {how}")
        self.crew.release(hand)


class LiveAuthority:
    """The actor. `run` takes as long as the job; other methods answer meanwhile."""

    def __init__(self) -> None:
        environment.log_to_stderr()
        self._life: Life | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def run(self, terms: Terms) -> list[Any]:
        """Run a job until it is over; returns what the functions have returned.

        Raises:
            GaveUp: It has failed too often.
        """
        ray: Any = load("ray", "ray", "run_live")
        budget, above = Budget(terms.max_failures), -1
        while True:
            life = Life(terms, budget, ray.util.get_node_ip_address(), above, self._show)
            self._life = life
            try:
                return life.run()
            except NotLive as error:
                budget.spend(str(error))
                self._show(f"the job cannot continue live, and is started again: {error}")
            finally:
                above = max(above, life.highest)
                life.close()

    def status(self) -> dict[str, Any]:
        """The process of this actor, the generation with its workers, and what has happened."""
        life = self._life
        newest = None if life is None else life.keeper.newest
        formed = None if newest is None else newest.formed
        places = {} if life is None else {each.name: each.place for each in list(life.crew.hands)}
        names = () if formed is None else formed.names
        return {
            "pid": os.getpid(),
            "generation": None if formed is None else formed.generation,
            "members": [
                {"pid": place.pid, "node": place.node}
                for name in names
                if (place := places.get(name))
            ],
            "log": list(self._lines),
        }

    def _show(self, line: str) -> None:
        with self._lock:
            self._lines = [*self._lines[-999:], line]
        logger.info("%s", line)


def _last_line(error: BaseException) -> str:
    return clean((str(error).strip() or type(error).__name__).splitlines()[-1], LONGEST_REASON)
