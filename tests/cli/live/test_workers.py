"""Processes of workers: cold and warm ones, their environment, their end with the launcher."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from resilin.engine import environment
from resilin.engine.processes import process_gone, process_start

pytestmark = pytest.mark.processes

TIMEOUT = 200
LAUNCHER = """
import os, sys, time
from resilin.cli.live.workers import Starter

if __name__ == "__main__":
    script, warm = sys.argv[1], sys.argv[2] == "warm"
    arguments = [script, *sys.argv[3:]]
    starter = Starter(
        "job", 2, [sys.executable, *arguments], arguments if warm else None, {"MINE": "1"}
    )
    workers = [starter.start(0, "/the/socket")]
    open_files = len(os.listdir("/proc/self/fd"))
    workers.append(starter.start(1, "/the/socket"))
    print(*(worker.pid for worker in workers), flush=True)
    sys.stdin.readline()
    workers[0].kill()
    while workers[0].poll() is None:
        time.sleep(0.01)
    more = len(os.listdir("/proc/self/fd")) - open_files
    print(workers[0].poll(), workers[1].poll(), more, flush=True)
    time.sleep(600)
"""
WORKER = """
import json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
told = json.dumps({**os.environ, "pid": os.getpid(), "child": child.pid, "group": os.getpgid(0)})
(out / f".{os.getpid()}").write_text(told)
(out / f".{os.getpid()}").rename(out / f"{os.getpid()}")
time.sleep(600)
"""


def until(condition, what):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def launched(tmp_path, request):
    """A launcher with two workers: the process, and what the workers told."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "launcher.py", tmp_path / "worker.py", request.param, out],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "7", "MASTER_ADDR": "elsewhere"},
    )
    pids = []
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        until(lambda: len(list(out.glob("[0-9]*"))) == 2, "workers did not start")
        yield process, [json.loads((out / str(pid)).read_text()) for pid in pids]
    finally:
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)


both = pytest.mark.parametrize("launched", ["cold", "warm"], indirect=True)


@both
def test_workers_have_their_own_names_and_groups_and_nothing_of_torchrun(launched):
    process, told = launched
    for slot, env in enumerate(told):
        assert env["LOCAL_RANK"] == str(slot)
        assert env["LOCAL_WORLD_SIZE"] == "2"
        assert env[environment.LIVE] == "/the/socket"
        assert env[environment.MEMBER] == f"job-{slot}"
        assert env[environment.AGENT] == str(process.pid)
        assert env["MINE"] == "1"
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & {*env} == set()
        assert env["group"] == env["pid"]


@both
def test_a_worker_that_is_killed_takes_along_what_it_has_started(launched):
    process, told = launched
    start = process_start(told[0]["child"])
    process.stdin.write("\n")
    process.stdin.flush()
    # Files of the one that is gone are closed: there are no more than with one worker.
    assert process.stdout.readline().split() == [str(-signal.SIGKILL), "None", "0"]
    until(lambda: process_gone(told[0]["child"], start), "its child lives on")
    assert not process_gone(told[1]["pid"], process_start(told[1]["pid"]))


@both
def test_workers_end_with_a_launcher_that_is_killed(launched):
    process, told = launched
    pids = [env["pid"] for env in told]
    starts = {pid: process_start(pid) for pid in pids}
    # One that is stopped can do nothing about it itself.
    os.kill(pids[1], signal.SIGSTOP)
    process.kill()
    until(lambda: all(process_gone(pid, starts[pid]) for pid in pids), "workers live on")
