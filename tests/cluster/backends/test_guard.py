"""A part leaves no process behind, however it ends."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PATIENCE = 60.0
SPAWNS = "echo $$ >> {0}; setsid sleep 1000 & echo $! >> {0}; "
"""Starts a child in another session, as `resilin run` does with its workers."""


@pytest.fixture
def guard():
    process = subprocess.Popen(
        [sys.executable, "-m", "resilin.cluster.backends.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield process
    if not process.stdin.closed:
        process.stdin.close()
    process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 0


def tell(guard, *requests):
    guard.stdin.write(b"".join(json.dumps(each).encode() + b"\n" for each in requests))
    guard.stdin.flush()


def order(command, **more):
    whole = {"environment": {}, "directory": ".", "log": "", **more}
    return {"command": ["bash", "-c", command], **whole}


def told(guard):
    return json.loads(guard.stdout.readline())


def pids(path, number):
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or len(path.read_text().split()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for pid in path.read_text().split()]


def are_gone(found):
    return not any(Path(f"/proc/{pid}").exists() for pid in found)


def test_what_a_command_leaves_behind_is_killed(guard, tmp_path):
    tell(guard, order(SPAWNS.format(tmp_path / "pids") + "exit 5"))
    assert set(told(guard)) == {"pid"}
    assert told(guard) == {"code": 5}
    assert are_gone(pids(tmp_path / "pids", 2))


def test_all_processes_end_with_whoever_asked_for_them(guard, tmp_path):
    tell(guard, order(SPAWNS.format(tmp_path / "pids") + "wait"))
    found = pids(tmp_path / "pids", 2)
    assert not are_gone(found)
    guard.stdin.close()
    assert set(told(guard)) == {"pid"}
    assert told(guard) == {"code": 128 + signal.SIGKILL}
    assert are_gone(found)


def test_the_guard_is_no_child_of_its_parent(guard, tmp_path):
    tell(guard, order(SPAWNS.format(tmp_path / "pids") + "wait"))
    (first, _) = pids(tmp_path / "pids", 2)
    parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != guard.pid
    assert guard.wait(timeout=PATIENCE) == 0
    assert Path(f"/proc/{first}").exists()


def test_a_request_that_arrives_with_the_order_is_not_lost(guard):
    tell(guard, order("sleep 1000"), {"grace": 0})
    assert set(told(guard)) == {"pid"}
    assert told(guard) == {"code": 128 + signal.SIGKILL}


def test_the_earliest_deadline_counts(guard, tmp_path):
    tell(
        guard, order("trap '' USR1; " + SPAWNS.format(tmp_path / "pids") + "while :; do wait; done")
    )
    found = pids(tmp_path / "pids", 2)
    tell(guard, {"grace": 3600}, {"grace": 0.2}, {"grace": 3600})
    assert set(told(guard)) == {"pid"}
    assert told(guard) == {"code": 128 + signal.SIGKILL}
    assert are_gone(found)


def test_the_directory_of_the_log_is_made(guard, tmp_path):
    log = tmp_path / "not" / "there" / "log"
    tell(guard, order("echo $WORD", environment={"WORD": "hello"}, log=str(log)))
    told(guard)
    assert told(guard) == {"code": 0}
    assert log.read_text() == "hello\n"
