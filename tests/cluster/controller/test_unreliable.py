"""A backend that lies, fails, answers late or twice, around real processes."""

import random
import time

import pytest

from resilin.cluster.backends.base import BackendError, PartState
from resilin.cluster.backends.local import LocalBackend
from resilin.cluster.controller.api import Api
from resilin.cluster.controller.journal import Journal
from resilin.cluster.controller.launch import Face
from resilin.cluster.controller.loop import Controller
from resilin.cluster.controller.meeting import OutsideStore
from resilin.cluster.controller.records import Opened
from resilin.cluster.controller.rules import Rules
from tests.cluster.controller.cheap import assert_never_twice, launch, statuses
from tests.cluster.controller.made import Even, node

pytestmark = pytest.mark.processes

CAPACITY = {"a": 2, "b": 1, "c": 1}
NODES = tuple(node(name, count) for name, count in CAPACITY.items())
RULES = Rules(interval=0.5, grace=5.0, lead=0.0, absent=3.0, backoff=0.1, backoff_limit=0.2)


class Unreliable:
    """The local backend, seen through a bad line."""

    def __init__(self, real, dice):
        self.real, self.dice, self.bad, self.before = real, dice, True, []

    def detect(self):
        return None

    def _fail(self, what, chance=0.1):
        if self.bad and self.dice.random() < chance:
            raise BackendError(f"{what}: no answer")

    def nodes(self):
        self._fail("nodes")
        if self.bad and self.dice.random() < 0.05:
            return ()
        return self.real.nodes()

    def list(self):
        self._fail("list")
        now = (time.monotonic(), self.real.list())
        self.before = [each for each in self.before if each[0] > now[0] - 1.0] + [now]
        told = self.dice.choice(self.before)[1] if self.bad else now[1]
        if self.bad and self.dice.random() < 0.1:
            told = told[: len(told) // 2]  # some are left out
        if self.bad and self.dice.random() < 0.1:
            told += told  # all of them twice
        return told

    def start(self, part):
        self._fail("start")
        for _ in range(self.dice.choice((1, 1, 2))):
            self.real.start(part)
        self._fail("start, though it was done")

    def stop(self, name, grace):
        self._fail("stop")
        for _ in range(self.dice.choice((1, 1, 2))):
            self.real.stop(name, grace)
        self._fail("stop, though it was done")


class Run:
    """A controller that is taken down and set up again over the same directory."""

    def __init__(self, tmp_path, dice):
        self.path, self.said = tmp_path, []
        self.local = LocalBackend(tmp_path / "local", "one", NODES)
        self.backend = Unreliable(self.local, dice)
        self.journal = None
        self.begin()

    def begin(self):
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.path / "state")
        if not self.journal.state.cluster:
            self.journal.append([Opened(time=time.time(), cluster="one")])
        self.controller = Controller(
            self.journal,
            self.backend,
            OutsideStore("127.0.0.1:1"),
            Even(),
            RULES,
            Face(url="http://127.0.0.1:1", token="t"),
            tell=self.said.append,
        )
        self.api = Api(self.controller)

    def end(self):
        self.journal.close()
        deadline = time.monotonic() + 60
        while running := [e.name for e in self.local.list() if e.state is not PartState.ENDED]:
            assert time.monotonic() < deadline
            for name in running:
                self.local.stop(name, 0)
            time.sleep(0.05)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_backend_says_no_job_is_lost_or_started_twice(tmp_path, seed):
    dice = random.Random(seed)
    run = Run(tmp_path, dice)
    names = ("one", "two", "three")
    try:
        for name in names:
            run.api.submit(launch(tmp_path / name, name, max=2))
        end = time.monotonic() + 10.0
        drained = False
        while time.monotonic() < end:
            run.controller.turn()
            if dice.random() < 0.1:
                run.begin()
            if dice.random() < 0.1:
                run.api.undrain("b") if drained else _drain(run, "b")
                drained = "b" in run.controller.state.drains
            time.sleep(dice.uniform(0, 0.1))
        run.backend.bad = False
        for name in names:
            (tmp_path / name / "finish").touch()
        deadline = time.monotonic() + 120
        while any(job["phase"] != "finished" for job in run.api.jobs()):
            run.controller.turn()
            assert time.monotonic() < deadline, run.api.jobs()
            time.sleep(0.02)
    finally:
        run.end()
    assert_never_twice(tmp_path / "local", CAPACITY)
    assert len(statuses(tmp_path / "local")) > len(names)  # they were moved
    assert {job["id"] for job in run.api.jobs()} == set(names)
    assert any("no answer" in text for text in run.said)


def _drain(run, name):
    if name in run.controller.state.nodes:
        run.api.drain(name, None)


def test_a_backend_that_is_away_is_reported_once_and_nothing_is_changed(tmp_path):
    run = Run(tmp_path, random.Random(0))
    try:
        run.backend.bad = False
        run.api.submit(launch(tmp_path / "one", "one", max=1))
        run.controller.turn()
        run.controller.turn()
        before = run.controller.state
        run.backend.bad, run.backend._fail = True, _away
        for _ in range(5):
            run.controller.turn()
        assert run.controller.state == before
        assert run.said == ["the backend does not answer: nodes: no answer"]
        run.api.submit(launch(tmp_path / "two", "two", max=1))  # people are served all the same
        assert len(run.api.jobs()) == 2
    finally:
        run.end()


def _away(what, chance=0.1):
    raise BackendError(f"{what}: no answer")
