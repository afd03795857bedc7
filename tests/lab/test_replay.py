"""Scripts that are really run under a trace, by the command, and what their training did."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from resilin.cli import replay as command
from resilin.core.events import StartEvent, StepEvent
from resilin.core.trace import BatchTrace, CapacityTrace
from resilin.engine import environment
from resilin.lab import launch
from resilin.lab.replay import as_batches, new_run_dir, read_trace
from resilin.telemetry.read import read_events

TIMEOUT = 200
ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RESILIN_DATA", ROOT.parent / "shared" / "data")) / "capacity"
NUM_SAMPLES, FEATURES = 160, 3
SCRIPT = f"""
import json, os, sys
import torch
import resilin
from resilin import AdaptiveDataLoader, AdaptiveDataParallel

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
x = torch.randn({NUM_SAMPLES}, {FEATURES}, generator=generator, dtype=torch.float64)
y = torch.randn({NUM_SAMPLES}, 1, generator=generator, dtype=torch.float64)
net = torch.nn.Linear({FEATURES}, 1).double()
for parameter in net.parameters():
    torch.nn.init.constant_(parameter, 0.5)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
resilin.init_process_group()
model = AdaptiveDataParallel(net, optimizer, rule="adascale")
loader = AdaptiveDataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=16, max_local_bsz=int(sys.argv[2])
)
loader.autoscale_batch_size(64, local_bsz_bounds=(1, int(sys.argv[2])))
updates, sizes, gradients = [], [], []
for epoch in resilin.remaining_epochs_until(1):
    for inputs, targets in loader:
        before = net.weight.detach().clone()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        gradient = torch.cat([net.weight.grad.flatten(), net.bias.grad]).tolist()
        optimizer.step()
        optimizer.zero_grad()
        updates.append(not torch.equal(net.weight, before))
        sizes.append(loader.current_samples)
        if updates[-1]:
            gradients.append(gradient)
told = dict(updates=updates, sizes=sizes, gradients=gradients, weight=net.weight.tolist())
with open(os.path.join(sys.argv[1], os.environ.get("RANK", "0")), "w") as file:
    json.dump(told, file)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def expected(sizes):
    """The gradients of the same batches, and the weights behind them, in a plain loop."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64)
    net = torch.nn.Linear(FEATURES, 1).double()
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gradients, start = [], 0
    for size in sizes:
        optimizer.zero_grad()
        part = slice(start, start + size)
        torch.nn.functional.mse_loss(net(x[part]), y[part]).backward()
        gradients.append(torch.cat([net.weight.grad.flatten(), net.bias.grad]))
        optimizer.step()
        start += size
    return torch.stack(gradients), net.weight.detach()


def check_exact(told, sizes):
    gradients, weight = expected(sizes)
    torch.testing.assert_close(
        torch.tensor(told["gradients"], dtype=torch.float64), gradients, rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(torch.tensor(told["weight"], dtype=torch.float64), weight)


@pytest.mark.processes
def test_the_classic_example_accumulates_and_updates_as_a_larger_cluster_would(place, capfd):
    (place / "trace.csv").write_text("step,batchsize\n0,64\n1,96\n")
    (place / "out").mkdir()
    arguments = ["trace.csv", "--end", "error", "--rule", "constant", "--run-dir", "run"]
    assert command.main([*arguments, "script.py", str(place / "out"), "32"]) == 0, (
        capfd.readouterr()
    )
    told = json.loads((place / "out" / "0").read_text())
    assert told["updates"] == [False, True, False, False, True]
    assert told["sizes"] == [32, 32, 32, 32, 32]
    check_exact(told, [64, 96])
    found = list(read_events("run"))
    (start,) = [event for event in found if isinstance(event, StartEvent)]
    assert start.replays == str(place / "run" / "trace.csv")
    assert start.rule == "constant"
    steps = [event for event in found if isinstance(event, StepEvent)]
    assert [(step.batch_size, step.accumulation_steps) for step in steps] == [(64, 2), (96, 3)]


@pytest.mark.processes
def test_replicas_with_fewer_micro_batches_give_the_same_gradient(place, capfd):
    sizes = [3, 1, 40, 27, 89]
    trace = BatchTrace.from_sizes(sizes)
    (place / "trace.csv").write_text(trace.format())
    (place / "out").mkdir()
    arguments = ["trace.csv", "--replicas", "2", "--rule", "constant", "--run-dir", "run"]
    code = command.main([*arguments, "script.py", str(place / "out"), "1"])
    assert code == 0, capfd.readouterr()
    told = [json.loads((place / "out" / str(rank)).read_text()) for rank in range(2)]
    counts = [[], []]
    for rank in range(2):
        check_exact(told[rank], sizes)
        since = 0
        for number, update in enumerate(told[rank]["updates"]):
            if update:
                counts[rank].append(told[rank]["sizes"][since : number + 1])
                since = number + 1
    assert [sum(a) + sum(b) for a, b in zip(*counts, strict=True)] == sizes
    # Of three samples one replica has two, and the other one and a filler; of one, the other has
    # none, and takes part all the same.
    assert sorted(rank[0] for rank in counts) == [[0, 1], [1, 1]]
    assert sorted(rank[1] for rank in counts) == [[0], [1]]
    assert [len(rank[3]) for rank in counts] == [14, 14]


def test_a_script_that_does_not_train_with_resilin_is_refused(place, capfd):
    (place / "trace.csv").write_text("step,batchsize\n0,64\n")
    (place / "script.py").write_text("print('hello')")
    assert command.main(["trace.csv", "script.py"]) == 1
    assert "resilin: the script did not follow the trace" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_that_of_the_script(place, code, expected):
    (place / "trace.csv").write_text("step,batchsize\n0,64\n")
    (place / "script.py").write_text(code)
    assert command.main(["trace.csv", "script.py"]) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batches.csv", "--processes", "script.py"], "only for capacity traces: --processes"),
        (["batches.csv", "--local-bsz=8", "script.py"], "only for capacity traces: --local-bsz"),
        (["spot.csv", "script.py"], "give --local-bsz and --step-seconds"),
        (["spot.csv", "--local-bsz=8", "script.py"], "give --local-bsz and --step-seconds"),
        (["spot.csv", "--processes", "--replicas=2", "script.py"], "have no meaning: --replicas"),
        (
            ["spot.csv", "--local-bsz=8", "--step-seconds=1", "--speed=2", "script.py"],
            "--speed needs --processes",
        ),
        (["spot.csv", "--end=never", "script.py"], "invalid choice"),
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(place, capsys, arguments, message):
    (place / "batches.csv").write_text("step,batchsize\n0,64\n")
    (place / "spot.csv").write_text("time,replicas\n0,4\n60,2\n")
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err
    assert not (place / "resilin-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv", "script.py"], "none.csv: No such file"),
        (["batches.csv", "none.py"], "there is no script 'none.py'"),
        (["batches.csv", "--rule=fast", "script.py"], "rule ('fast') must be one of"),
        (["batches.csv", "--rule=:fast", "script.py"], "package.module:attribute"),
        (["batches.csv", "--run-dir=.", "script.py"], "'.' is not empty"),
        (["script.py", "script.py"], "script.py, line 2: the header is"),
        (["twice.csv", "script.py"], "step 0 must come after step 0; restarts='append'"),
        (["bytes.csv", "script.py"], "bytes.csv: not a text"),
    ],
)
def test_what_the_user_can_mend_is_one_line(place, capsys, arguments, message):
    (place / "batches.csv").write_text("step,batchsize\n0,64\n")
    (place / "twice.csv").write_text("step,batchsize\n0,64\n0,96\n")
    (place / "bytes.csv").write_bytes(b"step,batchsize\n0,\xff\n")
    assert command.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("resilin: ")
    assert message in line


def test_a_capacity_trace_becomes_batch_sizes(place):
    (place / "spot.csv").write_text("time,replicas\n0,8\n30,0\n60,4\n120,2\n")
    trace = read_trace("spot.csv", end="repeat")
    assert isinstance(trace, CapacityTrace)
    batches = as_batches(trace, local_bsz=4, step_seconds=30, max_replicas=4)
    assert [batches.at(step) for step in range(4)] == [16, 8, 8, 16]
    assert as_batches(batches) is batches
    with pytest.raises(ValueError, match=r"local_bsz \(8\).*step_seconds \(None\)"):
        as_batches(trace, local_bsz=8)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"public traces are not in {DATA} (RESILIN_DATA)")
def test_the_public_traces_become_batch_sizes():
    sizes = {"batchsize_mnist": (32, 2048), "gcp_spot_a100": (72, 128), "gcp_spot_tpuv2": (32, 128)}
    for name, bounds in sizes.items():
        trace = read_trace(DATA / f"{name}.csv", end="repeat", restarts="append")
        batches = as_batches(trace, local_bsz=8, step_seconds=120, max_replicas=16)
        assert (min(batches.sizes), max(batches.sizes)) == bounds, name
        assert batches.num_steps > 100


def test_run_directories_are_new_or_empty(place):
    assert new_run_dir("made/here").is_dir()
    assert new_run_dir("made/here").is_dir()
    first, second = new_run_dir(), new_run_dir()
    assert first != second
    assert first.parent.name == "resilin-runs"


def test_a_stopped_replay_takes_the_script_along(place):
    (place / "trace.csv").write_text("step,batchsize\n0,64\n")
    (place / "script.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('.pid').write_text(str(os.getpid()))\n"
        "os.rename('.pid', 'pid')\n"
        "time.sleep(60)\n"
    )
    line = [sys.executable, "-m", "resilin.cli", "replay", "trace.csv", "script.py"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (place / "pid").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((place / "pid").read_text()), 0)


def test_a_process_that_does_not_stop_is_killed_with_its_children(tmp_path):
    code = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    pathlib.Path('.pid').write_text(str(child))\n"
        "    os.rename('.pid', 'pid')\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "script.py").write_text(code)
    line = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} script.py"]
    process = launch.begin(line, dict(os.environ))
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        launch.end([process], 0.2)
    assert launch.exit_code(process) == 128 + signal.SIGKILL
    child = int((tmp_path / "pid").read_text())
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    """Whether a process is there; one that has ended may wait for somebody to take notice."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_launched_script_is_seeded_and_runs_as_by_itself(place, monkeypatch):
    (place / "sub").mkdir()
    (place / "sub" / "beside.py").write_text("number = 7")
    (place / "sub" / "script.py").write_text(
        "import json, random, sys\n"
        "import numpy as np\n"
        "import torch\n"
        "import beside\n"
        "assert sys.modules['__main__'].beside is beside\n"
        "told = [random.random(), np.random.rand(), torch.rand(1).item()]\n"
        "told += [__name__, sys.argv, beside.number]\n"
        "with open('told', 'w') as file:\n    json.dump(told, file)\n"
    )
    monkeypatch.setattr(sys, "argv", ["launch.py", "sub/script.py", "--lr", "1"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv(environment.SEED, "5")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        launch.main()
        launch.seed_generators(5)
        numbers = [random.random(), np.random.rand(), torch.rand(1).item()]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        sys.modules.pop("beside", None)
    told = json.loads((place / "told").read_text())
    assert told == [*numbers, "__main__", ["sub/script.py", "--lr", "1"], 7]


def test_a_run_is_steered_by_its_environment_alone(place, monkeypatch):
    monkeypatch.setenv(environment.CHECKPOINT_DIR, "/somewhere")
    monkeypatch.setenv(environment.RULE, "linear")
    env = launch.environment_of(place / "run", seed=3)
    assert env[environment.RUN_DIR] == str(place / "run")
    assert (env[environment.SEED], env[environment.LAB]) == ("3", "1")
    assert not {environment.CHECKPOINT_DIR, environment.RULE, environment.BATCH_TRACE} & set(env)
