"""A server with a socket, and members in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.authority.server import Server
from tests import forked

MEMBER = Path(__file__).with_name("member.py")
SECRET = bytes(range(16))


class Heard:
    """A server, and what the launcher hears from it."""

    def __init__(self, path, keeper, num_founders):
        self.path, self.keeper = path, keeper
        self.alive, self.finished, self.restart = [], [], []
        self.server = Server(
            path,
            keeper,
            num_founders=num_founders,
            secret=SECRET,
            address="127.0.0.1",
            on_alive=self.alive.append,
            on_finished=self.finished.append,
            on_restart=lambda name, reason: self.restart.append((name, reason)),
        )


class Process:
    """A member in a process."""

    def __init__(self, path, name):
        self.process = forked.Popen(
            [sys.executable, str(MEMBER), path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self):
        return json.loads(self.process.stdout.readline())

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def do(self, command):
        self.tell(command)
        return self.says()


@pytest.fixture
def serve(tmp_path):
    """Starts a server; ends it after the test."""
    started = []

    def start(num_founders=1, keeper=None):
        path = str(tmp_path / f"live-{len(started)}")
        started.append(Heard(path, keeper or LocalKeeper(), num_founders))
        return started[-1]

    yield start
    for each in started:
        each.server.close()


@pytest.fixture
def member():
    """Starts members; kills them after the test."""
    started = []

    def start(heard, name, *, expect=True):
        each = Process(heard.path, name)
        started.append(each)
        if expect:
            heard.server.expect(name, each.process.pid)
        return each

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=60)
