"""Jobs that are really run, by the command, with scripts that need nothing of the library."""

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module

import pytest
import torch.distributed as dist

from resilin.cli import options, preflight, run
from resilin.core.events import FaultEvent
from resilin.engine import environment
from resilin.telemetry.read import read_events
from tests import forked

TIMEOUT = 200
WORKER = """
import json, os, pathlib, signal, sys, time

out, env = pathlib.Path(sys.argv[1]), os.environ
rank, restarts = env["RANK"], env["TORCHELASTIC_RESTART_COUNT"]


def tell(name, **more):
    # Renamed, so that whoever waits for it finds all of it.
    hidden = out / f".{name}-{os.getpid()}"
    hidden.write_text(json.dumps({**env, **more, "argv": sys.argv[2:]}))
    hidden.rename(out / f"{name}-{os.getpid()}")
"""


@pytest.fixture
def job(tmp_path):
    """Starts the command with a script; whatever still runs at the end is killed, workers too."""
    (tmp_path / "out").mkdir()
    agents = []

    def start(code, *options, arguments=(), **env):
        script = tmp_path / "script.py"
        script.write_text(WORKER + code)
        command = [sys.executable, "-m", "resilin.cli", "run", *options]
        agents.append(
            forked.Popen(
                [*command, script, tmp_path / "out", *arguments],
                cwd=tmp_path,
                env={**clean_environment(), environment.RUN_DIR: "off", **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
    for file in (tmp_path / "out").iterdir():
        pid = int(file.name.rpartition("-")[2])
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)
    for agent in agents:
        agent.communicate(timeout=TIMEOUT)  # behind the workers, which hold its pipes


def clean_environment():
    ours = ("RESILIN_", "PET_", "OMP_", "LOGLEVEL", "TORCH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def free_endpoint():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def told(tmp_path, name):
    """What the workers told under this name."""
    files = sorted((tmp_path / "out").glob(f"{name}-*"))
    return [json.loads(file.read_text()) for file in files]


def wait_for(tmp_path, name, number, agent):
    deadline = time.monotonic() + TIMEOUT
    while len(found := told(tmp_path, name)) < number:
        assert agent.poll() is None, agent.communicate(timeout=TIMEOUT)
        assert time.monotonic() < deadline, f"{len(found)} of {number} {name}"
        time.sleep(0.05)
    return found


def ends(agent):
    """The exit code and the lines of the command itself."""
    _, errors = agent.communicate(timeout=TIMEOUT)
    assert "Traceback" not in errors
    return agent.returncode, [line for line in errors.splitlines() if line.startswith("resilin:")]


@pytest.mark.processes
def test_a_worker_that_dies_is_named_and_the_job_goes_on(tmp_path, job):
    code = """
memory = pathlib.Path(env["RESILIN_MEMORY_DIR"])
tell(f"start{restarts}", mode=memory.stat().st_mode & 0o777)
(memory / f"state{rank}").write_text("x")
if restarts == "0":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
    options = ["--nproc", "2", "--memory-dir", tmp_path / "memory", "--rdzv-id", "job7"]
    options += ["--checkpoint-dir", "s3://bucket/job", "--checkpoint-every", "10min"]
    options += ["--run-dir", "run"]
    agent = job(code, *options, arguments=["--lr", "0.1"])
    status, lines = ends(agent)
    assert status == 0, lines
    worker = next(
        file for file in (tmp_path / "out").glob("start0-*") if '"RANK": "1"' in file.read_text()
    )
    dead = worker.name.rpartition("-")[2]
    said = [line.removeprefix("resilin: ") for line in lines]
    assert said[0] == "writing events to run; to watch: resilin top run"
    assert said[1].endswith("starts 2 workers of job job7")
    assert said[2].startswith(f"worker 1 (process {dead}) was killed by SIGKILL after ")
    assert said[3:] == [
        f"restarting the workers (restart 1 of {run.MAX_RESTARTS})",
        "finished after 1 restart",
    ]
    starts = told(tmp_path, "start1")
    assert [start["WORLD_SIZE"] for start in starts] == ["2", "2"]
    for start in starts:
        assert start["argv"] == ["--lr", "0.1"]
        assert start["mode"] == 0o700
        assert start[environment.MEMORY_DIR] == str(tmp_path / "memory" / "job7")
        assert start[environment.CHECKPOINT_DIR] == "s3://bucket/job"
        assert start[environment.CHECKPOINT_EVERY] == "10min"
        assert start[environment.LOG] == "INFO"
        assert start["OMP_NUM_THREADS"] == "1"
        assert start[run.OWN_STORE] == "1"
        assert start[environment.RUN_DIR] == str(tmp_path / "run")
    assert list((tmp_path / "memory").iterdir()) == []
    # The agent writes it down, too: a worker that is killed cannot.
    (fault,) = read_events(tmp_path / "run")
    assert isinstance(fault, FaultEvent)
    assert (fault.kind, fault.replica) == ("worker_lost", 1)
    assert fault.detail == f"worker 1 (process {dead}) was killed by SIGKILL"


@pytest.mark.processes
def test_a_job_that_fails_keeps_its_state_in_memory_and_says_where(tmp_path, job):
    code = """
memory = pathlib.Path(env["RESILIN_MEMORY_DIR"])
(memory / "state").write_text(restarts)
tell("start")
sys.exit(3)
"""
    options = ["--max-restarts", "1", "--memory-dir", tmp_path / "memory", "--rdzv-id", "job7"]
    run_dir = {environment.RUN_DIR: str(tmp_path / "run")}
    status, lines = ends(job(code, *options, RESILIN_LOG="WARNING", **run_dir))
    assert status == 1
    assert sum("exited with code 3" in line for line in lines) == 2
    *lost, end = read_events(tmp_path / "run")
    assert [(fault.kind, fault.without_step) for fault in lost] == [("worker_lost", True)] * 2
    assert (end.kind, end.detail) == ("gave_up", "after 1 restart (--max-restarts 1)")
    assert lines[-2] == "resilin: gave up after 1 restart (--max-restarts 1)"
    assert (
        f"kept the latest state in {tmp_path}/memory/job7: resume with --rdzv-id job7" in lines[-1]
    )
    assert (tmp_path / "memory" / "job7" / "state").read_text() == "1"
    assert [start[environment.LOG] for start in told(tmp_path, "start")] == ["WARNING"] * 2


@pytest.mark.processes
def test_a_script_that_fails_at_once_is_not_restarted_for_ever(tmp_path, job):
    status, lines = ends(
        job("tell('start'); sys.exit(1)", RESILIN_MEMORY_DIR=str(tmp_path / "own"))
    )
    assert status == 1
    assert len(told(tmp_path, "start")) == 5
    assert lines[-1].startswith(
        "resilin: gave up: the workers failed 5 times in a row without making a step; "
    )
    assert "exited with code 1 (--max-restarts N" in lines[-1]
    # What the user manages is neither made nor removed.
    assert told(tmp_path, "start")[0][environment.MEMORY_DIR] == str(tmp_path / "own")
    assert not (tmp_path / "own").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_workers_before_the_job_ends(tmp_path, job, number):
    code = """
def save(number, frame):
    time.sleep(0.5)
    tell("saved", number=number)
    sys.exit(0)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
(pathlib.Path(env["RESILIN_MEMORY_DIR"]) / "state").write_text("x")
tell("start")
time.sleep(600)
"""
    options = ["--nproc=2", "--memory-dir", tmp_path / "memory", "--checkpoint-dir", tmp_path]
    agent = job(code, *options)
    wait_for(tmp_path, "start", 2, agent)
    agent.send_signal(number)
    status, lines = ends(agent)
    assert status == 128 + number
    assert lines[-1] == f"resilin: stopped by {number.name}"
    assert [saved["number"] for saved in told(tmp_path, "saved")] == [number] * 2
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.nightly(part="jobs")
def test_a_signal_while_others_are_waited_for_ends_the_command(tmp_path, job):
    options = [
        "--nnodes=2",
        "--rdzv-endpoint",
        free_endpoint(),
        "--memory-dir",
        tmp_path / "memory",
    ]
    agent = job("", *options)
    deadline = time.monotonic() + TIMEOUT
    while not any((tmp_path / "memory").glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    agent.terminate()
    status, lines = ends(agent)
    assert status == 143
    assert lines[-1] == "resilin: stopped by SIGTERM"
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.nightly(part="jobs")
def test_a_signal_while_the_directory_is_made_leaves_none_behind(tmp_path):
    code = """
import os, signal, sys
from resilin.cli import run

class Interrupted(run.MemoryDirectory):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

run.MemoryDirectory = Interrupted
sys.exit(run.main(sys.argv[1:]))
"""
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-c", code, "--memory-dir", tmp_path / "memory", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path)
    assert done.returncode == 143, done.stderr
    assert "resilin: stopped by SIGTERM" in done.stderr + done.stdout
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.processes
def test_a_machine_that_joins_later_makes_the_job_larger(tmp_path, job):
    code = """
tell(f"start{env['WORLD_SIZE']}")
if env["WORLD_SIZE"] == "1":
    time.sleep(600)
"""
    endpoint = free_endpoint()
    options = ["--nnodes=1:2", "--rdzv-endpoint", endpoint, "--memory-dir", tmp_path / "memory"]
    first = job(code, *options)
    wait_for(tmp_path, "start1", 1, first)
    second = job(code, *options)
    (status, lines), (other_status, other_lines) = ends(first), ends(second)
    assert (status, other_status) == (0, 0), (lines, other_lines)
    said = [line.removeprefix("resilin: ") for line in lines]
    host = socket.gethostname()
    assert said[1] == "another agent is waiting to join: restarting the workers"
    assert said[2].startswith(f"{host} joined: 2 workers on 2 agents; worker ")
    assert said[3:] == ["finished"]
    assert other_lines[1].startswith("resilin: 2 workers on 2 agents; worker ")
    starts = told(tmp_path, "start2")
    assert sorted(start["RANK"] for start in starts) == ["0", "1"]
    # They are one job on one machine, and the last of them tidies up.
    run_id = endpoint.replace(":", "-")
    assert {start["RESILIN_MEMORY_DIR"] for start in starts} == {f"{tmp_path}/memory/{run_id}"}
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.nightly(part="jobs")
def test_workers_do_not_wait_for_one_whose_machine_has_gone_before_they_met(tmp_path, job):
    # As in a group that is being formed: nothing tells a worker of the one that will not come.
    code = """
tell(f"start{env['WORLD_SIZE']}")
if env["WORLD_SIZE"] == "2" or not list(out.glob("start2-*")):
    time.sleep(600)
"""
    host, endpoint = socket.gethostname(), free_endpoint()
    options = ["--nnodes=1:2", "--rdzv-endpoint", endpoint, "--memory-dir", "off"]
    stays = job(code, *options)
    wait_for(tmp_path, "start1", 1, stays)
    goes = job(code, *options)
    starts = wait_for(tmp_path, "start2", 2, stays)
    goes.kill()
    status, lines = ends(stays)
    said = [line.removeprefix("resilin: ") for line in lines]
    assert status == 0, said
    assert said[-3:] == [
        "an agent is gone: restarting the workers",
        f"{host} left: 1 worker on 1 agent; worker 0 runs here",
        "finished",
    ]
    assert len(starts) == 2
    assert len(told(tmp_path, "start1")) == 2


@pytest.mark.nightly(part="jobs")
def test_agents_meet_again_when_one_goes_before_the_ranks_are_dealt_out(tmp_path, job):
    endpoint = free_endpoint()
    options = ["--nnodes=1:2", "--rdzv-endpoint", endpoint, "--rdzv-id=job7", "--memory-dir=off"]
    # Read at once where it is missing, and no meeting before both have come.
    conf = "--rdzv-conf=read_timeout=5,last_call_timeout=8"
    stays = job("tell(f\"start{env['WORLD_SIZE']}\")", *options, conf)
    goes = f"""
import os, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

limits = dict(last_call_timeout=8, keep_alive_interval=1, keep_alive_max_attempt=5)
parameters = RendezvousParameters("c10d", "{endpoint}", "job7", 1, 2, is_host=False, **limits)
get_rendezvous_handler(parameters).next_rendezvous()
os._exit(0)
"""
    forked.run([sys.executable, "-c", goes], check=True, timeout=TIMEOUT)
    status, lines = ends(stays)
    assert status == 0, lines
    assert "an agent left before ranks were assigned: repeating the rendezvous" in lines[1]
    assert lines[2:] == ["resilin: finished"]
    assert len(told(tmp_path, "start1")) == 1


@pytest.mark.nightly(part="jobs")
def test_a_spare_machine_ends_well_when_the_job_is_over(tmp_path, job):
    code = """
tell("start")
while not (out / "go-0").exists():
    time.sleep(0.05)
"""
    endpoint = free_endpoint()
    options = ["--nnodes=1", "--rdzv-endpoint", endpoint, "--rdzv-id=job7", "--memory-dir=off"]
    first = job(code, *options)
    (start,) = wait_for(tmp_path, "start", 1, first)
    assert start[environment.MEMORY_DIR] == "off"
    spare = job(code, *options)
    host, _, port = endpoint.partition(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    deadline = time.monotonic() + TIMEOUT
    while not pickle.loads(base64.b64decode(store.get("torch.rendezvous.job7"))).redundancy_list:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "out" / "go-0").touch()
    assert ends(first)[0] == 0
    status, lines = ends(spare)
    assert (status, lines[-1]) == (0, "resilin: the job ended without needing this machine")
    assert len(told(tmp_path, "start")) == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-script.py"], "there is no script 'no-such-script.py' (looked in "),
        (["some-directory"], "there is no script 'some-directory'"),
        (["-m", "no_such_package.train"], "there is no module 'no_such_package.train'"),
        (["--no-python", "no-such-command"], "'no-such-command' is not a command"),
        (
            ["--checkpoint-dir", "nosuchprotocol://bucket/job", "train.py"],
            "checkpoints cannot be written to nosuchprotocol://bucket/job: Protocol not known",
        ),
        (
            ["--checkpoint-dir", "needs-a-package://bucket", "train.py"],
            "needs-a-package://bucket: a package is missing (pip it)",
        ),
    ],
)
def test_what_cannot_start_fails_at_once(tmp_path, monkeypatch, capsys, command, said):
    known = import_module("fsspec.registry").known_implementations
    missing = {"class": "no_such_package.FS", "err": "pip it"}
    monkeypatch.setitem(known, "needs-a-package", missing)
    monkeypatch.delenv(environment.CHECKPOINT_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('was started')")
    (tmp_path / "some-directory").mkdir()
    assert run.main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("resilin: ")
    assert said in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some-directory", "train.py"]


def test_a_script_that_cannot_be_read_fails_at_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    assert run.main([str(tmp_path / "train.py")]) == 2
    assert "cannot be read by user" in capsys.readouterr().err


def test_a_place_for_checkpoints_that_is_named_in_the_environment_is_tried(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.py").write_text("raise SystemExit('was started')")
    monkeypatch.setenv(environment.CHECKPOINT_DIR, "nosuchprotocol://bucket/job")
    assert run.main([str(tmp_path / "train.py")]) == 2
    assert "Protocol not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["train.py"], ["-m", "json.tool"], ["package"], ["--no-python", "true"]]
)
def test_what_can_start_is_let_through(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(environment.CHECKPOINT_DIR, raising=False)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    preflight.check(options.parser().parse_args(["--checkpoint-dir", "memory://a", *arguments]))
    preflight.check(options.parser().parse_args(arguments))


def test_an_error_of_a_network_is_left_to_the_workers(tmp_path, monkeypatch, capsys):
    def fails(url):
        raise ConnectionError("no route")

    monkeypatch.setattr("resilin.training.state.checkpoint.storage.url_to_fs", fails)
    (tmp_path / "train.py").write_text("")
    arguments = ["--checkpoint-dir", "s3://bucket/a", str(tmp_path / "train.py")]
    preflight.check(options.parser().parse_args(arguments))
    assert "workers will try again (ConnectionError: no route)" in capsys.readouterr().err
