"""Signals that stop a job: who counts, and what becomes of a save that is under way."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from resilin.cli.stopping import StopSignals
from tests.cli.test_run import clean_environment

pytestmark = pytest.mark.processes

JOB = """
import pathlib, signal, sys, time

saved = pathlib.Path(sys.argv[1])


def save(number, frame):
    (saved / "asked").write_text(signal.Signals(number).name)
    while not (saved / "go").exists():
        time.sleep(0.02)
    (saved / "saved").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
(saved / "started").touch()
time.sleep(300)
"""


@pytest.fixture
def handlers():
    kept = {number: signal.getsignal(number) for number in signal.Signals if number not in (9, 19)}
    # A session in the background ignores SIGINT, and then a job does, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # One that was begun with nohup ignores SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in kept.items():
        with contextlib.suppress(TypeError, OSError):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("given", "sent"),
    [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGTERM")],
)
@pytest.mark.usefixtures("handlers")
def test_workers_get_a_signal_that_asks_them_to_save(given, sent):
    stop = StopSignals()
    stop.install()
    with pytest.raises(SignalException) as raised:
        os.kill(os.getpid(), signal.Signals[given])
    assert raised.value.sigval is signal.Signals[sent]
    assert stop.first is signal.Signals[given]


@pytest.mark.usefixtures("handlers")
def test_later_signals_are_ignored_and_a_second_interrupt_kills_once(capfd):
    stop, kills = StopSignals(), []
    stop.kill = lambda: kills.append(1)
    stop.install()
    with pytest.raises(SignalException):
        os.kill(os.getpid(), signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert kills == []
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    assert kills == [1]
    assert stop.first is signal.SIGINT
    assert capfd.readouterr().err.splitlines() == [
        "resilin: SIGINT: stopping the workers (SIGINT again kills them)",
        "resilin: SIGINT again: killing the workers",
    ]


def wait_for(path, process):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("signals", "code", "saves"),
    [
        (["SIGUSR1"] * 4, 138, True),
        (["SIGTERM", "SIGUSR1", "SIGTERM", "SIGTERM"], 143, True),
        (["SIGINT"], 130, True),
        (["SIGINT", "SIGINT"], 130, False),
    ],
    ids=["asked to leave", "stopped", "Ctrl-C", "Ctrl-C twice"],
)
def test_a_save_that_is_under_way_is_kept_however_often_the_agent_is_asked(
    tmp_path, signals, code, saves
):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "resilin.cli", "run", "--run-dir", "off"]
    process = subprocess.Popen(
        [*command, "--memory-dir", "off", "job.py", str(tmp_path)],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_for(tmp_path / "started", process)
        process.send_signal(signal.Signals[signals[0]])
        wait_for(tmp_path / "asked", process)
        for name in signals[1:]:
            process.send_signal(signal.Signals[name])
            time.sleep(0.1)  # or two of a kind are one
        if saves:
            (tmp_path / "go").touch()
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    assert (tmp_path / "saved").exists() == saves
    assert (tmp_path / "asked").read_text() == ("SIGTERM" if code == 130 else signals[0])
    assert errors.rstrip().endswith(f"resilin: stopped by {signals[0]}")
    assert "Traceback" not in errors
