"""Which failure is the cause, and how agents tell each other."""

import signal
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from resilin.cli.blame import Causes, Failure, causes, lines
from resilin.core.events import FaultEvent
from resilin.engine.processes import process_start
from resilin.engine.stop import RESTART
from resilin.telemetry.read import read_events
from tests import forked
from tests.cli.live.etcd_process import until
from tests.cli.test_run import clean_environment, free_endpoint

pytestmark = pytest.mark.processes

KILLED = Failure(rank=1, pid=12, code=-9, error="RuntimeError: of an earlier moment")
FOLLOWS = Failure(rank=0, pid=11, code=1, error="RuntimeError: reset by peer", follows=True)
RAISED = Failure(rank=2, pid=13, code=1, error="ValueError: bad sample 17")
JOB = """
import os, pathlib, signal, sys, time

import torch
import resilin

resilin.init_process_group()
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
loader = resilin.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=8)
resilin.checkpoint_to(None, memory_every=1)
resumed = resilin.resume()
for _ in resilin.remaining_epochs_until(2):
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rank = os.environ["RANK"]
        if resumed is None and model.clock.steps == 5 and sys.argv[1] == "unseen":
            pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
            while rank == "1":
                if pathlib.Path("agent").exists() and pathlib.Path("pid-0").exists():
                    os.kill(int(pathlib.Path("agent").read_text()), signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
        elif resumed is None and model.clock.steps == 5 and rank == "0":
            if sys.argv[1] == "raise":
                raise ValueError("bad sample 17")
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_failure_that_follows_from_another_one_is_no_cause():
    assert causes([FOLLOWS, KILLED, RAISED]) == [KILLED, RAISED]
    assert causes([FOLLOWS]) == [FOLLOWS]


def test_a_line_names_the_worker_its_process_its_signal_or_its_error():
    assert lines([KILLED, RAISED], 1.26, most=8) == [
        "worker 1 (process 12) was killed by SIGKILL after 1.3 s",
        "worker 2 (process 13) exited with code 1 after 1.3 s: ValueError: bad sample 17",
    ]
    assert KILLED.told("b") == "worker 1 on b (process 12) was killed by SIGKILL"


def test_workers_that_fail_alike_have_one_line():
    alike = [Failure(rank=i, pid=i, code=1, error="ValueError: x") for i in range(12)]
    (line,) = lines(alike, 0.0, most=3)
    assert line.endswith("ValueError: x (and 11 more workers in the same way: 1, 2, 3, ...)")
    different = [Failure(rank=i, pid=i, code=i + 1) for i in range(5)]
    assert lines(different, 0.0, most=3)[-1] == "and 2 more"


def test_a_worker_that_asked_for_a_restart_is_no_fault():
    assert lines([Failure(rank=0, pid=1, code=RESTART)], 0.0, most=3) == []


@pytest.fixture
def store():
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_agents_read_the_cause_of_the_others_and_not_their_own(store):
    a, b = (Causes(store, rank, 2) for rank in range(2))
    assert a.of_others(0) is None
    b.publish("worker 1 on b\nwas killed")
    assert b.of_others(0) is None
    # A line of another machine stays one line.
    assert a.of_others() == "worker 1 on b was killed"


def test_an_agent_whose_store_is_gone_waits_for_no_cause():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    agent = Causes(client, 0, 2, clock=lambda: 0.0)  # its time never ends
    del server
    agent.publish("x")
    assert agent.of_others() is None


def start(tmp_path, *options, how="kill"):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", *options]
    return forked.Popen(
        [*command, "--memory-dir", tmp_path / "memory", "job.py", how],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process):
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    lines = [line for line in errors.splitlines() if line.startswith("resilin:")]
    return process.returncode, [line.removeprefix("resilin: ") for line in lines], errors


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_the_first_worker_that_failed_is_named_and_the_others_say_nothing(tmp_path, how):
    code, lines, errors = said(start(tmp_path, "--nproc", "3", "--run-dir", "run", how=how))
    assert code == 0, errors
    end = {"kill": "was killed by SIGKILL", "raise": "exited with code 1"}[how]
    first = next(i for i, line in enumerate(lines) if end in line)
    assert lines[first].startswith("worker 0 (process ")
    assert lines[first].endswith(": ValueError: bad sample 17") == (how == "raise")
    assert lines[first + 1] == "restarting the workers (restart 1 of 1000)"
    kinds = ("writing", "agent", "started", "a lost", "worker 0", "restarting", "resumed")
    for line in lines[:-1]:
        assert line.startswith(kinds), errors
    assert lines[-1] == "finished after 1 restart"
    assert len({*lines}) == len(lines), "a line is said twice"
    (fault,) = [each for each in read_events(tmp_path / "run") if isinstance(each, FaultEvent)]
    assert (fault.kind, fault.replica) == ("worker_lost", 0)
    assert ("ValueError: bad sample 17" in fault.detail) == (how == "raise")


def test_the_first_worker_that_failed_is_named_by_an_agent_that_looks_late(tmp_path):
    process = start(tmp_path, "--nproc", "2", "--run-dir", "run", how="unseen")
    # Complete as soon as it is there.
    (tmp_path / "agent.new").write_text(str(process.pid))
    (tmp_path / "agent.new").rename(tmp_path / "agent")
    # Both end while the agent stands still: worker 0 since it has lost worker 1.
    for rank in range(2):
        file = tmp_path / f"pid-{rank}"
        until(lambda file=file: file.exists() and file.read_text(), f"worker {rank} at step 5")
        pid = int(file.read_text())
        until(lambda pid=pid: process_start(pid) == "", f"the end of worker {rank}")
    process.send_signal(signal.SIGCONT)
    code, told, errors = said(process)
    assert code == 0, errors
    (cause,) = [line for line in told if "was killed by SIGKILL" in line]
    assert cause.startswith("worker 1 (process ")
    assert "lost the connection" not in errors
    (fault,) = [each for each in read_events(tmp_path / "run") if isinstance(each, FaultEvent)]
    assert (fault.kind, fault.replica) == ("worker_lost", 1)


def test_an_agent_names_the_worker_of_another_agent_that_failed_first(tmp_path):
    options = ["--nnodes", "2", "--rdzv-endpoint", free_endpoint(), "--run-dir", "run"]
    agents = [start(tmp_path, *options) for _ in range(2)]
    ends = [said(agent) for agent in agents]
    for code, told, errors in ends:
        assert code == 0, errors
        (cause,) = [line for line in told if "was killed by SIGKILL" in line]
        assert cause.startswith(("worker 0 (process ", f"worker 0 on {socket.gethostname()} (pro"))
        assert "lost the connection" not in errors
        assert "worker 1 (" not in errors
        restart = [line for line in told if "restarting the workers" in line]
        assert len(restart) == 1
    faults = [each for each in read_events(tmp_path / "run") if isinstance(each, FaultEvent)]
    assert [(each.kind, each.replica) for each in faults] == [("worker_lost", 0)]
