"""Who is in the job: what replicas tell each other, and how they leave."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from resilin.compat import torch_names
from resilin.core.membership import Membership
from resilin.engine.base import Engine
from resilin.engine.group import LAUNCHER_ENV, detect
from resilin.engine.processes import process_gone, process_start
from resilin.engine.single import Single
from resilin.engine.stop import RESTART
from resilin.engine.torchrun import RUN_ID, SHUTDOWN_TIMEOUT, Torchrun

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@pytest.fixture
def plain(monkeypatch):
    """The environment of a process that nobody launched."""
    others = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", RUN_ID, SHUTDOWN_TIMEOUT)
    for name in (*LAUNCHER_ENV, *others):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# Who we are ----------------------------------------------------------------------------------


def test_a_process_that_nobody_launched_is_single(plain):
    engine = detect()
    assert type(engine) is Single
    assert (engine.membership.replica, engine.membership.num_replicas) == (0, 1)
    assert (
        engine.membership.host,
        engine.membership.local_process,
        engine.membership.num_local_processes,
    ) == (0, 0, 1)
    assert not engine.restartable
    assert engine.memory_name is None
    assert engine.begin_step() == engine.membership == Membership()
    assert engine.gradient_group() is None
    assert engine.all_committed()


@pytest.mark.parametrize("missing", [None, *LAUNCHER_ENV])
def test_only_a_whole_environment_is_that_of_a_launcher(plain, missing):
    for name in LAUNCHER_ENV:
        if name != missing:
            plain.setenv(name, "1")
    assert type(detect()) is (Torchrun if missing is None else Single)


def test_what_torchrun_says(plain):
    engine = Torchrun()
    assert (
        engine.membership.host,
        engine.membership.local_process,
        engine.membership.num_local_processes,
    ) == (0, 0, 1)
    assert (engine.restartable, engine.memory_name, engine.grace) == (False, None, 18.0)
    for name, value in {
        "GROUP_RANK": "3",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        RUN_ID: "my job",
        SHUTDOWN_TIMEOUT: "5",
    }.items():
        plain.setenv(name, value)
    # The launcher is asked anew when this process joins others.
    engine = Torchrun()
    assert (
        engine.membership.host,
        engine.membership.local_process,
        engine.membership.num_local_processes,
    ) == (3, 2, 4)
    assert (engine.restartable, engine.memory_name, engine.grace) == (True, "my job", 3.0)
    plain.setenv(RUN_ID, "none")
    assert engine.memory_name == f"agent-{os.getppid()}"


# Agreement and state -------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_a_step_begins_with_who_is_in_it():
    engine = detect()
    me = engine.begin_step()
    assert me == engine.membership
    assert (me.replica, me.num_replicas) == (me.process, me.num_processes) == (dist.get_rank(), 2)
    assert engine.gradient_group() is dist.group.WORLD


@pytest.mark.world_size(2, init=False)
def test_a_purpose_has_one_group_for_as_long_as_the_membership_lasts():
    engine = Engine()
    assert engine.group("control") is None
    seen = []
    for attempt in range(2):
        store = dist.PrefixStore(
            f"attempt {attempt}", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        )
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        control, storage = engine.group("control"), engine.group("storage")
        assert engine.group("control") is control
        assert engine.group("storage") is storage
        assert len({id(g) for g in (control, storage, dist.group.WORLD)}) == 3
        assert dist.get_backend(control) == "gloo"
        assert all(control is not old for old in seen)
        seen += [control, storage]
        assert engine.gather(rank) == [0, 1]
        dist.barrier()
        dist.destroy_process_group()
        assert engine.group("control") is None
        assert engine.gather(rank) == [rank]


@pytest.mark.world_size(2)
def test_host_group_is_that_of_the_gradients_where_it_takes_tensors_on_the_cpu():
    engine = detect()
    assert engine.host_group() is engine.gradient_group() is dist.group.WORLD


def test_host_group_of_one_replica_is_none(plain):
    assert detect().host_group() is None


@pytest.mark.world_size(2, init=False)
@pytest.mark.parametrize("backend", ["cuda:gloo", "cpu:gloo,cuda:gloo"])
def test_host_group_beside_one_that_takes_no_tensors_on_the_cpu(backend):
    engine, seen = detect(), []
    rank = int(os.environ["RANK"])
    for attempt in range(2):
        store = dist.PrefixStore(
            f"attempt {attempt}", dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
        )
        limit = timedelta(seconds=77)
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
        gradients, host = engine.gradient_group(), engine.host_group()
        assert gradients is dist.group.WORLD
        assert (host is gradients) == ("cpu" in backend)
        assert engine.host_group() is host
        assert all(host is not old for old in seen)
        seen.append(host)
        assert torch_names.timeout_of(host, torch.device("cpu")) == limit
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=host)
        assert total.item() == 3
        if host is not gradients:
            with pytest.raises(RuntimeError, match="No backend type associated with device"):
                dist.all_reduce(total, group=gradients)
        dist.barrier(group=host)
        dist.destroy_process_group()
        assert engine.host_group() is None


# Processes -----------------------------------------------------------------------------------


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


def test_a_process_that_lives_is_not_gone(process):
    started = process_start(process.pid)
    assert not process_gone(process.pid, started)
    assert not process_gone(os.getpid(), process_start(os.getpid()))
    assert process_start(process.pid) == started


@linux
def test_a_process_that_nobody_has_collected_is_gone(process):
    started = process_start(process.pid)
    assert started
    process.kill()
    deadline = time.monotonic() + 10
    while not process_gone(process.pid, started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_gone(process.pid, started)
    assert process_start(process.pid) == ""
    os.kill(process.pid, 0)  # It still has its number.


def test_a_process_that_was_collected_is_gone(process):
    started = process_start(process.pid)
    process.kill()
    process.wait(10)
    assert process_gone(process.pid, started)
    assert not process_start(process.pid)


@linux
def test_a_number_that_was_given_again_is_another_process(process):
    started = process_start(process.pid)
    assert process_gone(process.pid, str(int(started) - 1))


@linux
def test_a_name_that_looks_like_the_end_of_a_name(tmp_path):
    # The kernel puts the name of the program in the midst of its figures, as it is.
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    processes = [subprocess.Popen([name, "60"]) for name in ("/bin/sleep", program, "/bin/sleep")]
    try:
        began = [process_start(process.pid) for process in processes]
        assert all(each and each.isdigit() for each in began)
        assert sorted(map(int, began)) == [*map(int, began)]
        assert not process_gone(processes[1].pid, began[1])
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@linux
@pytest.mark.skipif(os.getuid() == 0, reason="root may send signals to everybody")
def test_a_process_of_somebody_else_that_lives_is_not_gone():
    assert not process_gone(1, process_start(1))


# The end -------------------------------------------------------------------------------------


def code_of(engine, *, asked):
    with pytest.raises(SystemExit) as end:
        engine.leave(asked=asked)
    return end.value.code


@pytest.mark.parametrize("asked", [True, False])
def test_a_single_process_ends_as_whoever_asked_wants_it(asked):
    engine = Single()
    engine.stop.request("a poller")
    assert code_of(engine, asked=asked) == RESTART == 75
    engine = Single()
    engine.stop._take(signal.SIGTERM)
    assert code_of(engine, asked=asked) == 143


def test_a_replica_that_follows_others_gives_its_agent_a_moment(plain):
    plain.setenv(RUN_ID, "a job")
    engine = Torchrun()
    began = time.monotonic()
    assert code_of(engine, asked=False) == RESTART
    assert 0.4 < time.monotonic() - began < 5


AGENT = """
import json, os, signal, sys, time
from resilin.engine.torchrun import Torchrun

signal.alarm(60)
told = []
signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

def leave(how, asked):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine = Torchrun()
    if how == "agent gone":
        while os.getppid() == engine._agent:
            time.sleep(0.01)
        time.sleep(0.3)  # Until it was collected, too.
    engine.stop.listen()
    if how in ("poller", "agent gone"):
        engine.stop.request("a poller")
    elif how == "late SIGTERM":
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    elif how is not None:
        os.kill(os.getpid(), getattr(signal, how))
    try:
        engine.leave(asked=asked)
    except SystemExit as end:
        return end.code
    except BaseException as error:
        return repr(error)

def ends(how, asked):
    told.clear()
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        if how == "agent gone" and os.fork():
            time.sleep(0.3)
            os._exit(0)
        os.write(write, json.dumps(leave(how, asked)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(worker, 0)
    text = os.read(read, 1000)
    os.close(read)
    time.sleep(0.05)
    return [json.loads(text), len(told)]
"""


DEPARTURES = {
    # How the worker was asked to stop, whether it was this one, and whether there is an agent:
    # its exit code, and how often its parent was told to end.
    ("SIGTERM", True, True): [143, 0],
    ("SIGUSR1", True, True): [128 + signal.SIGUSR1, 1],
    ("poller", True, True): [75, 1],
    (None, False, True): [75, 0],
    ("late SIGTERM", False, True): [143, 0],
    ("agent gone", True, True): [75, 0],
    ("SIGUSR1", True, False): [128 + signal.SIGUSR1, 0],
}


@pytest.fixture(scope="module")
def departures():
    """How workers end under a real parent; all of them in one program, for torch loads slowly."""
    program = f"""
        for how, asked, agent in {list(DEPARTURES)!r}:
            os.environ.pop({RUN_ID!r}, None)
            os.environ.update({{{RUN_ID!r}: "a job"}} if agent else {{}})
            print(json.dumps(ends(how, asked)), flush=True)
    """
    result = subprocess.run(
        [sys.executable, "-c", AGENT + textwrap.dedent(program)],
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(DEPARTURES, lines, strict=True))


@pytest.mark.parametrize("way", DEPARTURES, ids=str)
def test_how_a_worker_leaves_its_agent(departures, way):
    assert departures[way] == DEPARTURES[way]
