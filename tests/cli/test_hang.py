"""Jobs that hang, fail again and again, or lose a worker that ends well; with real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilin.cli import hang
from resilin.cli.hang import Local, Watchdog
from resilin.core.hang import PATIENCE, Phase
from resilin.core.lives import MOST_FRUITLESS
from resilin.engine import environment, pulse
from resilin.telemetry.read import read_events
from tests import forked
from tests.cli.test_run import clean_environment, free_endpoint

JOB = Path(__file__).with_name("troubled_job.py")
TIMEOUT = 100
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")


@pytest.fixture
def job(tmp_path):
    """Starts the job; ends it, and its workers, whatever becomes of it."""
    agents = []

    def start(*arguments, options=()):
        command = [sys.executable, "-m", "resilin.cli", "run", "--memory-dir", tmp_path / "memory"]
        agents.append(
            forked.Popen(
                [*command, "--run-dir", tmp_path / "run", *options, JOB, *arguments],
                cwd=tmp_path,
                env=clean_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return agents[-1]

    yield start
    for agent in agents:
        agent.terminate()  # it ends its workers
    for agent in agents:
        agent.communicate(timeout=60)


def ends(agent):
    output, _ = agent.communicate(timeout=TIMEOUT)
    return agent.returncode, output


@pytest.mark.processes
@linux
@pytest.mark.timeout(300)
def test_a_worker_that_hangs_is_named_and_the_job_goes_on(tmp_path, job):
    # In turn: one is stopped in a step, one hangs in its own code, one leaves.
    options = ["--nproc=2", "--warm", "--hang-timeout=4"]
    code, output = ends(job("8:stop:1", "14:hang:0", "20:exit:1", options=options))
    assert code == 0, output
    said = [line for line in output.splitlines() if line.startswith("resilin: ")]
    said = [re.sub(r"\(process \d+\)", "(process N)", line)[9:] for line in said]
    # A machine that is busy may be slow, which is then said, too: only what must be there is asked.
    assert sum(line.startswith("no progress for ") for line in said) >= 2, output
    assert "worker 1 (process N) is stopped (SIGSTOP), after step 8" in said
    assert "worker 0 (process N) waits for the others in step 9" in said
    assert "worker 0 (process N) has not finished its part of step 15" in said
    assert "worker 1 (process N) waits for the others in step 15" in said
    assert "killing worker 1 to restart all workers" in said
    assert "killing worker 0 to restart all workers" in said
    (left,) = [line for line in said if "exited with code 0" in line]
    assert re.fullmatch(
        r"worker 1 .* exited with code 0 after [\d.]+ s, while other workers were still running: "
        "the script ended early on rank 1",
        left,
    )
    # The stacks of both that could write them are there, with the line at fault.
    stacks = [file.read_text() for file in sorted((tmp_path / "run").glob("stacks-*.txt"))]
    assert any("worker 1" not in each for each in stacks)
    line = next(n for n, text in enumerate(JOB.read_text().splitlines(), 1) if "it hangs" in text)
    hung = [each for each in stacks if f'troubled_job.py", line {line} in trouble' in each]
    assert hung
    assert "worker 1\n" in hung[0]
    faults = [event.kind for event in read_events(tmp_path / "run") if event.name == "fault"]
    assert faults.count("worker_hung") >= 2
    assert faults.count("worker_left") == 1
    assert not any((tmp_path / "memory").iterdir())


@pytest.mark.nightly(part="jobs")
@pytest.mark.timeout(300)
def test_a_script_that_fails_at_one_step_is_given_up_by_name(job):
    code, output = ends(job("*3:fail:0", options=["--nproc=1", "--warm"]))
    assert code == 1, output
    assert output.count("restarting the workers") == MOST_FRUITLESS
    gave_up = next(line for line in output.splitlines() if "gave up" in line)
    assert f"the workers failed {MOST_FRUITLESS} times in a row without making" in gave_up
    assert "a new step after step 3; the last error: worker 0 (process " in gave_up
    assert "exited with code 1: ValueError: a fault of the ?[2Jscript" in gave_up


@pytest.mark.nightly(part="jobs")
@linux
@pytest.mark.timeout(300)
def test_a_worker_that_hangs_on_another_agent_is_left_to_that_agent(job):
    options = ["--nnodes=2", "--rdzv-endpoint", free_endpoint(), "--hang-timeout=4", "--warm"]
    agents = [job("8:stop:1", options=options) for _ in range(2)]
    outputs = [ends(agent) for agent in agents]
    assert [code for code, _ in outputs] == [0, 0], outputs
    # Rank 1 is at one of them, and only that one ends anybody.
    outputs = sorted((text for _, text in outputs), key=lambda text: "is stopped (SIGSTOP)" in text)
    assert "is stopped (SIGSTOP)" not in outputs[0]
    assert "killing worker" not in outputs[0]
    assert "killing worker 1" in outputs[1]


# The watch itself, over processes that show what they are told to -------------------------------

SHOWS = """
import os, sys, time
from pathlib import Path
from resilin.core.hang import Phase
from resilin.engine.pulse import FilePulse

shown = FilePulse(Path(sys.argv[1]), int(sys.argv[2]))
shown.start(40)
for _ in range(6):
    shown.begin_step()
shown.beat(Phase[sys.argv[3]], 46)
print("ready", flush=True)
exec(sys.argv[4])
"""
SLEEPS = "time.sleep(300)"
NATIVE = "import ctypes; ctypes.CDLL(None).sleep(300)"
HOLDS_ALL = "import ctypes; ctypes.PyDLL(None).sleep(300)"  # no other thread of it runs
DEBUGS = "import pdb; sys.stdin = open(os.dup(0)); pdb.set_trace(); 0"


@pytest.fixture
def shows(tmp_path):
    started = []

    def start(rank, phase, code=SLEEPS):
        command = [sys.executable, "-c", SHOWS, tmp_path, str(rank), phase, code]
        process = forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return Local(rank, 10 + rank, process.pid)

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


class Clock:
    """Seconds that go by when they are asked for."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def looks(watchdog, times):
    """What is found first, within so many looks."""
    return next((found for _ in range(times) if (found := watchdog.look()) is not None), None)


def watch(tmp_path, workers, timeout=20.0, num_replicas=None, clock=None):
    watchdog = Watchdog(tmp_path, timeout, clock or Clock())
    watchdog.begin(workers, num_replicas or len(workers))
    return watchdog


def wait_until(condition):
    """Waits for what happens in another process, which may be slow to get the processor."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@linux
@pytest.mark.parametrize("code", [SLEEPS, NATIVE, HOLDS_ALL])
def test_the_stacks_of_a_worker_that_is_blocked_are_written(
    tmp_path, monkeypatch, shows, capsys, code
):
    monkeypatch.setenv(environment.RUN_DIR, "off")
    monkeypatch.setattr(hang, "ASKED", TIMEOUT)  # a worker on a busy machine answers late
    workers = [shows(0, "WAITING"), shows(1, "STEP", code)]
    watchdog = watch(tmp_path, workers)
    found, guilty = looks(watchdog, 40)
    assert guilty == [workers[1]]
    assert found.told_apart
    said = capsys.readouterr().err
    assert f"worker 11 (process {workers[1].pid}) has not finished its part" in said
    assert "worker 10:" in said
    assert "worker 11:" in said
    assert said.count('File "<string>"') >= 2
    watchdog.kill(guilty)
    time.sleep(0.2)
    assert watchdog.error(11) == ""


@linux
def test_a_worker_that_was_stopped_does_not_keep_the_others_from_reporting(
    tmp_path, monkeypatch, shows, capsys
):
    monkeypatch.setenv(environment.RUN_DIR, "off")
    workers = [shows(rank, "BETWEEN") for rank in range(3)]
    for worker in workers[1:]:
        os.kill(worker.pid, signal.SIGSTOP)
    # A process stops when it next gets the processor, not when the signal is sent.
    for worker in workers[1:]:
        wait_until(lambda pid=worker.pid: hang._is_stopped(pid))
    _, guilty = looks(watch(tmp_path, workers), 40)
    assert guilty == workers[1:]
    said = capsys.readouterr().err
    assert said.count("is stopped (SIGSTOP), after step 46") == 2
    assert "worker 10:" in said
    assert "worker 11:" not in said


def test_a_debugger_is_not_a_hang(tmp_path, shows):
    workers = [shows(0, "WAITING"), shows(1, "STEP", DEBUGS)]
    wait_until(lambda: pulse.read(tmp_path, 1).debugged)  # its own thread has to notice it
    assert looks(watch(tmp_path, workers), 200) is None


def test_a_machine_that_was_suspended_is_not_a_hang(tmp_path, shows):
    workers = [shows(0, "STEP")]
    clock = Clock()
    watchdog = watch(tmp_path, workers, clock=clock)
    assert looks(watchdog, 5) is None
    clock.now += 3600
    assert looks(watchdog, 5) is None


def test_it_is_said_once_that_the_one_who_hangs_is_elsewhere(tmp_path, shows, capsys):
    workers = [shows(0, "WAITING")]
    watchdog = watch(tmp_path, workers, num_replicas=2)
    assert looks(watchdog, 30) is None
    assert capsys.readouterr().err.count("wait for a worker of another agent") == 1
    assert looks(watchdog, 30)[1] == workers


def test_a_watch_that_is_off_sees_nothing(tmp_path, shows):
    assert looks(watch(tmp_path, [shows(0, "STEP")], timeout=float("inf")), 1000) is None


def test_a_worker_that_shows_nothing_is_not_watched(tmp_path, shows):
    # A script that does not use resilin, or has not come to it.
    workers = [shows(0, "WAITING"), Local(1, 11, 1)]
    assert looks(watch(tmp_path, workers), int(20 * PATIENCE * 20)) is None
    assert looks(Watchdog(None, 20.0, Clock()), 100) is None


# How far a job came -------------------------------------------------------------------------------


def publish(directory, worker, *, steps, epoch=0, epochs=-1, phase=Phase.AFTER, flags=0, began=0):
    """What a worker of this number has published."""
    numbers = (1, 5, steps, steps, began, int(phase), 9, flags, epoch, epochs)
    (directory / str(worker)).write_bytes(pulse._RECORD.pack(pulse._MAGIC, *numbers))


@pytest.mark.parametrize(
    ("shown", "words", "early"),
    [
        ([], "finished", False),
        ([{"steps": 0, "began": -1}], "finished", False),
        ([{"steps": 6, "epoch": 3, "epochs": 3, "phase": Phase.DONE}], "finished", False),
        (
            [{"steps": 5, "epoch": 0, "epochs": 3}, {"steps": 6, "epoch": 0, "epochs": 3}],
            "ended at step 6, in epoch 1 of 3, before its epochs were over",
            True,
        ),
        ([{"steps": 6}], "ended at step 6", False),
        ([{"steps": 6, "phase": Phase.DONE}], "finished", False),
    ],
)
def test_the_end_of_a_job_says_how_far_it_came(tmp_path, shown, words, early):
    for number, each in enumerate(shown):
        publish(tmp_path, number, **each)
    assert hang.ending(tmp_path) == words
    assert (hang.left_early(tmp_path) is not None) == early


def test_a_worker_sees_that_another_one_waits_for_it(tmp_path):
    mine = pulse.FilePulse(tmp_path, 0)
    try:
        mine.beat(Phase.BETWEEN, 6)
        assert not mine.missed()
        publish(tmp_path, 1, steps=6)
        assert not mine.missed()
        publish(tmp_path, 1, steps=5, phase=Phase.WAITING)
        assert not mine.missed()
        publish(tmp_path, 1, steps=6, phase=Phase.WAITING)
        assert mine.missed()
    finally:
        mine.close()
