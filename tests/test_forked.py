"""Programs that are forked behave as those of a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import forked

pytestmark = pytest.mark.processes

SHOWS = """
import json, multiprocessing, os, sys, torch
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "main": sys.modules["__main__"].__dict__.get("MARK"),
    "variables": {name: os.environ.get(name) for name in ("GIVEN", "LEFT_OUT")},
    "cwd": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "parent": multiprocessing.parent_process() is None,
    "method": multiprocessing.get_start_method(),
    "input": sys.stdin.read(),
}))
MARK = 1
"""


@pytest.mark.parametrize("how", ["script", "code", "module"])
def test_it_is_the_main_program_with_what_it_was_given(tmp_path, monkeypatch, how):
    monkeypatch.setenv("LEFT_OUT", "1")
    (tmp_path / "shows.py").write_text(SHOWS)
    what = {"script": ["shows.py"], "code": ["-c", SHOWS], "module": ["-m", "shows"]}[how]
    command = [sys.executable, *what, "--lr", "1"]
    named = {"cwd": tmp_path, "env": {"GIVEN": "yes"}, "start_new_session": True}
    told = []
    for popen in (forked.Popen, subprocess.Popen):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with popen(command, **pipes, **named) as program:
            out, _ = program.communicate("a line", timeout=60)
        assert program.returncode == 0
        told.append(json.loads(out))
    assert told[0] == told[1]
    assert told[0]["variables"] == {"GIVEN": "yes", "LEFT_OUT": None}


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("import atexit, os; atexit.register(os._exit, 5); raise SystemExit(7)", 5),
    ],
)
def test_how_it_ended(code, status):
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert ("ZeroDivisionError" in done.stderr) is ("/" in code)
    if status:
        with pytest.raises(subprocess.CalledProcessError):
            forked.run([sys.executable, "-c", code], check=True, timeout=60, stderr=-3)


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_it_ignores_ctrl_c_if_the_test_does(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        code = "import signal; print(signal.getsignal(signal.SIGINT))"
        command = [sys.executable, "-c", code]
        named = {"capture_output": True, "text": True, "timeout": 60}
        ours, theirs = (each.run(command, **named).stdout for each in (forked, subprocess))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ours.split(" at ")[0] == theirs.split(" at ")[0]


@pytest.mark.nightly(part="jobs")
def test_it_is_ended_by_a_signal_or_when_its_time_is_up():
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"]
    program = forked.Popen(command, stdout=subprocess.PIPE)
    program.stdout.readline()
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=60)
    assert program.returncode == program.poll() == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(command, stdout=subprocess.DEVNULL, timeout=0.5)


WORKER = """
import atexit, os, signal, sys
atexit.register(print, "the end", flush=True)
print(os.environ["GIVEN"], os.getppid(), "torch" in sys.modules, os.getpgid(0), flush=True)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


def test_warm_workers_are_forked_in_the_process_group_and_environment_of_the_agent(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2", "worker.py"]
    named = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = {**os.environ, "GIVEN": "yes", "RESILIN_MEMORY_DIR": "off"}
    with forked.Popen(
        command, cwd=tmp_path, env=variables, start_new_session=True, **named
    ) as agent:
        out, errors = agent.communicate(timeout=100)
    assert agent.returncode == 0, errors
    said = [line.split() for line in out.splitlines() if line.startswith("yes")]
    assert len(said) == out.count("the end") == 2, out
    (parent,) = {int(line[1]) for line in said}
    assert parent not in (agent.pid, os.getpid())
    assert {(line[2], int(line[3])) for line in said} == {("True", agent.pid)}


def test_what_is_no_program_of_this_python_is_refused():
    for command in (["sleep", "1"], [sys.executable, "-X", "dev", "-c", "pass"]):
        with pytest.raises(ValueError, match="not a program of this Python"):
            forked.Popen(command)
