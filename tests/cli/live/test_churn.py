"""Members in processes of their own that are killed, frozen and replaced, by the rules alone."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import forked

MEMBER = Path(__file__).with_name("churn_member.py")
LONG = 60.0
SILENT = 1.5
"""Seconds without a sign of life after which a member counts as frozen."""
FAULTS = ["kill", "kill", "freeze", "leave", "break", "join", "kill two"]


class Launcher:
    """What the launcher of a live job does, as far as its authority is concerned."""

    def __init__(self, heard, directory):
        self.heard, self.directory = heard, directory
        self.processes = {}
        self.number = 0

    def start(self):
        name = f"m{self.number}"
        self.number += 1
        self.processes[name] = forked.Popen(
            [sys.executable, str(MEMBER), self.heard.path, name, str(self.directory)]
        )
        self.heard.server.expect(name, self.processes[name].pid)

    def reap(self):
        """Reports who has ended, and starts others for them."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                self.heard.server.drop(name)
                self.start()

    def wait(self, condition):
        deadline = time.monotonic() + LONG
        while not condition():
            newest = self.heard.keeper.newest
            assert time.monotonic() < deadline, f"stuck: {[*self.processes]}, {newest}"
            assert self.heard.restart == []
            self.reap()
            time.sleep(0.01)

    def together(self):
        newest = self.heard.keeper.newest
        return (
            newest is not None
            and newest.formed == newest.roster
            and {*newest.roster.names} == {*self.processes}
        )

    def witnesses(self):
        """Living members of the last formed generation: without any, the job is restarted."""
        formed = self.heard.keeper.newest.formed
        living = {name for name, each in self.processes.items() if each.poll() is None}
        return living & {*formed.names}

    def steps(self, name):
        log = self.directory / f"log-{name}"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def settle(self):
        """All are in one generation, and each of them makes steps."""
        self.wait(self.together)
        before = {name: self.steps(name) for name in self.processes}
        self.wait(
            lambda: all(self.steps(name) > before.get(name, 0) + 1 for name in self.processes)
        )

    def silent(self, name):
        """Whether nothing was heard of a member for so long."""
        before, since = self.heard.alive.count(name), time.monotonic()

        def frozen():
            nonlocal before, since
            if self.heard.alive.count(name) != before:
                before, since = self.heard.alive.count(name), time.monotonic()
            return time.monotonic() - since > SILENT

        return frozen


@pytest.fixture
def launcher(serve, tmp_path):
    started = Launcher(serve(num_founders=3), tmp_path)
    for _ in range(3):
        started.start()
    yield started
    for each in started.processes.values():
        each.kill()
    for each in started.processes.values():
        each.wait(timeout=60)


def state(log):
    """The generations that made the steps of a member, which may be writing its next line."""
    steps = []
    *lines, _ = log.read_text().split("\n")
    for entry in map(json.loads, lines):
        steps = entry if isinstance(entry, list) else [*steps, entry]
    return steps


@pytest.mark.nightly(part="torture")
@pytest.mark.parametrize("seed", range(2))
def test_members_come_and_go_and_the_others_continue(launcher, tmp_path, seed):
    rng = random.Random(seed)
    launcher.settle()
    for _ in range(20):
        fault = rng.choice(FAULTS)
        if len(launcher.witnesses()) < 3:
            launcher.settle()
        names = rng.sample([*launcher.processes], 2)
        first = launcher.processes[names[0]]
        if fault == "kill":
            first.kill()
        elif fault == "kill two":
            first.kill()
            launcher.processes[names[1]].kill()
        elif fault == "freeze":
            first.send_signal(signal.SIGSTOP)
            launcher.wait(launcher.silent(names[0]))
            first.kill()
        elif fault == "leave":
            first.send_signal(signal.SIGUSR1)
            launcher.wait(lambda name=names[0]: name not in launcher.processes)
        elif fault == "break":
            first.send_signal(signal.SIGUSR2)
        elif fault == "join" and len(launcher.processes) < 5:
            launcher.start()
        if rng.random() < 0.7:
            # Otherwise the next fault comes while this one is being dealt with.
            launcher.settle()
    launcher.settle()
    newest = launcher.heard.keeper.newest
    states = [state(tmp_path / f"log-{name}") for name in newest.roster.names]
    common = min(map(len, states))
    assert all(each[:common] == states[0][:common] for each in states)
    # A step is made by the same generation as the one before, or by a later one.
    assert states[0] == sorted(states[0])
    assert len({*states[0]}) > 5
    assert launcher.heard.restart == []
