"""The watch over a replica, with processes that really die."""

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from resilin.engine.processes import process_start
from resilin.engine.torchrun import RUN_ID, SHUTDOWN_TIMEOUT, Torchrun
from resilin.engine.watch import Peer, Watch

pytestmark = pytest.mark.processes

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv(RUN_ID, "a job")
    monkeypatch.setenv(SHUTDOWN_TIMEOUT, "100")
    return Torchrun()


@pytest.fixture
def peer():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


class Abandoned:
    """Records why the replica was abandoned, and ends the watch as it would end the process."""

    def __init__(self):
        self.reasons = queue.Queue()
        self.watch = None

    def __call__(self, reason, late):
        self.reasons.put((reason, late))
        self.watch.close()

    def within(self, seconds):
        try:
            return self.reasons.get(timeout=seconds)
        except queue.Empty:
            return None


def watched(engine, *processes):
    peers = [Peer(process.pid, process_start(process.pid)) for process in processes]
    return watching(engine, peers)


def watching(engine, peers):
    abandoned = Abandoned()
    abandoned.watch = Watch(engine, peers, abandoned)
    return abandoned.watch, abandoned


GONE = ("another worker on this machine is gone", False)


@pytest.mark.parametrize("reaped", [True, pytest.param(False, marks=linux)])
def test_a_peer_that_dies_behind_the_request(engine, peer, reaped):
    watch, abandoned = watched(engine, peer)
    engine.stop.request("a test")
    assert abandoned.within(0.6) is None, "all are there, and there is time"
    peer.kill()
    if reaped:
        peer.wait(10)
    assert abandoned.within(5) == GONE
    watch.close()


def test_a_peer_that_dies_before_the_request_is_the_agents_business(engine, peer):
    watch, abandoned = watched(engine, peer)
    peer.kill()
    peer.wait(10)
    # Its agent will see it, and tell everybody.
    assert abandoned.within(0.8) is None
    engine.stop.request("a test")
    assert abandoned.within(5) == GONE
    watch.close()


@linux
def test_a_number_that_was_given_to_another_process_is_not_the_peer(engine, peer):
    watch, abandoned = watching(engine, [Peer(peer.pid, "1")])
    engine.stop.request("a test")
    assert abandoned.within(5) == GONE
    watch.close()


def test_the_deadline_comes_before_that_of_the_agent(engine, peer, monkeypatch):
    monkeypatch.setenv(SHUTDOWN_TIMEOUT, "1")
    watch, abandoned = watched(engine, peer)
    assert abandoned.within(1.0) is None, "nobody has asked"
    engine.stop.request("a test")
    began = time.monotonic()
    assert abandoned.within(5) == ("no step ended within 0.6 s", True)
    assert time.monotonic() - began > 0.55
    watch.close()


def test_an_agent_that_is_there_is_no_reason_to_go(engine):
    watch, abandoned = watched(engine)
    assert abandoned.within(0.7) is None
    assert not engine.orphaned()
    watch.close()


def test_without_an_agent_nobody_is_an_orphan(engine, monkeypatch):
    monkeypatch.delenv(RUN_ID)
    engine._agent = 1
    assert not engine.orphaned()


def test_closing_ends_the_thread(engine):
    watch, abandoned = watched(engine)
    began = time.monotonic()
    watch.close()
    watch.close()
    assert time.monotonic() - began < 2
    assert not [t for t in threading.enumerate() if t.name == "resilin-watch"]
    engine.stop.request("a test")
    assert abandoned.within(0.3) is None


def test_closing_from_within_does_not_wait_for_itself(engine):
    closed, ready = threading.Event(), threading.Event()

    def abandon(reason, late):
        assert ready.wait(5)
        watch.close()
        closed.set()

    watch = Watch(engine, [Peer(2**22 + 1, "1")], abandon)  # A number that no process can have.
    engine.stop.request("a test")
    ready.set()
    assert closed.wait(5)
    watch.close()


PROGRAM = """
import ctypes, os, signal, sys, threading, time
from resilin.engine.processes import process_start
from resilin.engine.torchrun import Torchrun
from resilin.engine.watch import Peer, Watch

signal.alarm(60)  # Whatever happens, nothing stays.

def block():
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

def work(peers):
    engine = Torchrun()
    engine.stop.listen()
    def abandon(reason, late):
        print(reason, late, flush=True)
        os._exit(engine.stop.exit_code)
    Watch(engine, peers, abandon)
    print("ready", flush=True)
    block()
"""


def program(code):
    environment = {**os.environ, RUN_ID: "a job", SHUTDOWN_TIMEOUT: "100"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_worker_whose_agent_dies_goes_though_its_main_thread_is_blocked():
    agent = program("""
        worker = os.fork()
        if worker == 0:
            work([])
        time.sleep(1)
        os._exit(0)
    """)
    try:
        # Its output ends when the worker is gone, and not only the agent.
        output, _ = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.wait(10)
    assert output == "ready\nthe agent of this worker is gone False\n"


def test_a_worker_that_waits_for_a_dead_peer_goes_when_it_is_told_to(peer):
    worker = program(f"work([Peer({peer.pid}, process_start({peer.pid}))])")
    try:
        assert worker.stdout.readline() == "ready\n"
        peer.kill()
        worker.send_signal(signal.SIGTERM)
        output, _ = worker.communicate(timeout=30)
    finally:
        worker.kill()
        worker.wait(10)
    assert output == "another worker on this machine is gone False\n"
    assert worker.returncode == 128 + signal.SIGTERM
