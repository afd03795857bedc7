"""Machines that come and go as a trace says: real agents, and stand-ins where that is enough."""

import collections
import json
import os
import sys
import time

import pytest

from resilin.core.events import RescaleEvent
from resilin.core.trace import CapacityTrace, TraceError
from resilin.lab import capacity, launch
from resilin.lab.capacity import Machines, replay_capacity
from resilin.telemetry.read import read_events

pytestmark = pytest.mark.processes

TIMEOUT = 200
NUM_SAMPLES = 60
JOB = f"""
import json, os, pathlib, sys, time
import torch
import resilin

folder = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
dataset = torch.utils.data.TensorDataset(
    torch.ones({NUM_SAMPLES}, 2), torch.ones({NUM_SAMPLES}, 1), torch.arange({NUM_SAMPLES})
)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
loader = resilin.AdaptiveDataLoader(dataset, batch_size=8, shuffle=True)
began = resilin.resume()
engine = resilin.current_job().engine
flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
file = os.open(folder / f"{{time.time_ns()}}-{{os.getpid()}}", flags)


def tell(**facts):
    me = engine.membership
    facts |= dict(generation=me.generation, replicas=me.num_replicas, pid=os.getpid())
    os.write(file, (json.dumps(facts) + "\\n").encode())


tell(began=model.clock.steps)
for epoch in resilin.remaining_epochs_until(10**6):
    if (folder / "finish").exists():
        break
    for x, y, indices in loader:
        step = model.clock.steps
        mine = indices.tolist() if loader.current_samples else []
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        tell(step=step, epoch=epoch, samples=mine)
        time.sleep(0.02)
tell(finished=True)
"""


class ByProgress(CapacityTrace):
    """A trace whose time is what the job has done, so that no speed of a machine decides it."""

    def at(self, time):
        diary = read_diary(self.folder)
        counts = [line["replicas"] for line in diary if "step" in line]
        if (self.folder / "finish").exists():
            return 1
        if counts.count(2) >= 20:
            last = max(line["generation"] for line in diary)
            if sum(line["generation"] == last and line["replicas"] == 1 for line in diary) > 10:
                (self.folder / "finish").touch()
            return 1
        return 2 if counts.count(1) >= 10 else 1


def read_diary(folder):
    files = sorted(path for path in folder.iterdir() if path.name != "finish")
    lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line) for line in lines]


@pytest.mark.nightly(part="jobs")
def test_a_job_follows_the_machines_and_each_sample_is_used_once(tmp_path):
    (tmp_path / "script.py").write_text(JOB)
    folder, run_dir = tmp_path / "diaries", tmp_path / "run"
    folder.mkdir()
    run_dir.mkdir()
    trace = ByProgress((0.0, 1.0), (1, 2))
    ByProgress.folder = folder
    said = []
    code = replay_capacity(
        trace, tmp_path / "script.py", [str(folder)], run_dir=run_dir, seed=1, say=said.append
    )
    logs = "\n".join(path.read_text() for path in sorted(run_dir.glob("machine-*.log")))
    assert code == 0, logs
    changes = [line.partition(": ")[2] for line in said]
    assert changes == ["0 -> 1 machines", "1 -> 2 machines", "2 -> 1 machines"]

    diary = read_diary(folder)
    generations = {line["generation"]: line["replicas"] for line in diary}
    assert [count for _, count in sorted(generations.items())][::2] == [1, 1], logs
    assert 2 in generations.values()
    # A step counts in the last generation that made it: a later one began behind it.
    began = {line["generation"]: line["began"] for line in diary if "began" in line}
    used = collections.defaultdict(collections.Counter)
    for line in diary:
        if "step" in line:
            made = max(number for number, step in began.items() if step <= line["step"])
            if line["generation"] == made:
                used[line["epoch"]].update(line["samples"])
    last = max(used)
    assert last > 2
    for epoch, counts in used.items():
        assert counts == dict.fromkeys(range(NUM_SAMPLES), 1), epoch
    rescales = [event for event in read_events(run_dir) if isinstance(event, RescaleEvent)]
    pairs = [(event.replicas_before, event.replicas) for event in rescales]
    assert (1, 2) in pairs
    assert (2, 1) in pairs
    assert (run_dir / "checkpoints").is_dir()
    for pid in {line["pid"] for line in diary}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def stand_ins(tmp_path):
    """Machines whose agents are a few lines of Python; the store is a real one."""
    code = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    plan = {"seconds": 60.0, "code": 0}
    asked = []

    def command(options):
        asked.append(list(options))
        return [sys.executable, "-c", code, str(plan["seconds"]), str(plan["code"])]

    env = {**launch.environment_of(tmp_path), "CUDA_VISIBLE_DEVICES": "4,7"}
    machines = Machines(tmp_path, command, env, most=4)
    yield machines, plan, asked
    machines.close()


@pytest.mark.nightly(part="jobs")
def test_the_number_of_machines_is_what_is_wanted(stand_ins, monkeypatch):
    machines, plan, asked = stand_ins
    started = []
    begin = launch.begin
    monkeypatch.setattr(
        launch, "begin", lambda *a: started.append((a, begin(*a))) or started[-1][1]
    )
    machines.follow(3)
    assert (machines.num_running, machines.finished()) == (3, None)
    machines.follow(1)
    assert machines.num_running == 1
    machines.follow(0)
    for _, process in started:
        process.wait(timeout=TIMEOUT)
    assert machines.finished() is None  # they were stopped, so nothing is over
    machines.follow(2)
    devices = [arguments[1]["CUDA_VISIBLE_DEVICES"] for arguments, _ in started]
    assert devices == ["4", "7", "4", "4", "7"]
    options = dict(zip(asked[0][::2], asked[0][1::2], strict=True))
    assert (options["--nproc"], options["--nnodes"]) == ("1", "1:4")
    assert options["--checkpoint-dir"].endswith("checkpoints")
    memories = {tuple(line)[-1] for line in asked[:3]}
    assert len(memories) == 3
    machines.close()
    assert all(process.poll() is not None for _, process in started)

    # An agent that comes too late to a job that is done fails; the job did not.
    machines = Machines(machines._run_dir, machines._command, machines._env, most=4)
    try:
        plan.update(seconds=0.0, code=1)
        machines.follow(1)
        plan.update(seconds=1.0, code=0)
        machines.follow(2)
        assert wait_for_end(machines) == 0
        machines.close(gently=True)
    finally:
        machines.close()


@pytest.mark.nightly(part="jobs")
def test_a_job_that_fails_has_its_exit_code(stand_ins):
    machines, plan, _ = stand_ins
    plan.update(seconds=0.0, code=3)
    machines.follow(2)
    assert wait_for_end(machines) == 3
    assert machines.is_failing


def wait_for_end(machines):
    deadline = time.monotonic() + TIMEOUT
    while (code := machines.finished()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def test_a_trace_without_hope_is_refused(tmp_path):
    (tmp_path / "script.py").write_text("")
    nothing = CapacityTrace((0.0, 9.0), (0, 0), "repeat")
    with pytest.raises(TraceError, match=r"no replicas from 0 s on.*'repeat'"):
        replay_capacity(nothing, tmp_path / "script.py", run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"speed \(0.0\) must be"):
        replay_capacity(nothing, tmp_path / "script.py", run_dir=tmp_path, speed=0)
    capacity._check_hope(CapacityTrace((0.0,), (1,)), 5.0)
    ends_empty = CapacityTrace((0.0, 9.0), (1, 0))
    capacity._check_hope(ends_empty, 5.0)
    with pytest.raises(TraceError, match="from 9 s"):
        capacity._check_hope(ends_empty, 9.0)
