"""What a worker shows of itself; in processes of their own, which they leave marks on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilin.core.hang import Phase
from resilin.engine import environment, pulse

pytestmark = pytest.mark.processes

WORKER = {
    "RANK": "0",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}


def run(tmp_path, code, **env):
    command = [sys.executable, "-c", code]
    env = {**os.environ, **WORKER, environment.PULSE_DIR: str(tmp_path), **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


def test_a_job_shows_where_it_is(tmp_path):
    code = """
import os, time, torch, resilin
from pathlib import Path
from resilin.engine import environment, pulse

seen = []

def note(name):
    shown = pulse.read(Path(os.environ["RESILIN_PULSE_DIR"]), 3)
    seen.append((name, shown.phase.name, shown.begun, shown.steps, shown.began))

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        note("fetch")
        return torch.ones(1)

net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
note("built")
for _ in resilin.remaining_epochs_until(1):
    note("epoch")
    for x in resilin.AdaptiveDataLoader(Data(), batch_size=4):
        note("body")
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        note("after")
        optimizer.zero_grad()
    note("between")
    model.eval()
    before = pulse.read(Path(os.environ["RESILIN_PULSE_DIR"]), 3).beats
    model(torch.ones(2, 1))
    assert pulse.read(Path(os.environ["RESILIN_PULSE_DIR"]), 3).beats > before
    time.sleep(2.5 * pulse.INTERVAL)
    assert pulse.read(Path(os.environ["RESILIN_PULSE_DIR"]), 3).evaluating
    model.train()
note("done")
for each in seen:
    print(*each)
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("fetch")]
    assert lines == [
        "built START 0 0 None",
        "epoch START 0 0 0",
        "body STEP 1 0 0",
        "after AFTER 1 1 0",
        "body STEP 2 1 0",
        "after AFTER 2 2 0",
        "between BETWEEN 2 2 0",
        "done DONE 2 2 0",
    ]
    # It is there when the worker is not.
    shown = pulse.read(tmp_path, 3)
    assert (shown.phase, shown.steps, shown.left) == (Phase.DONE, 2, True)
    assert pulse.read(tmp_path, 0) is None


def test_jobs_of_one_process_share_what_they_show(tmp_path):
    code = """
import os, time, torch, resilin
from pathlib import Path
from resilin.engine import pulse

def shown():
    return pulse.read(Path(os.environ["RESILIN_PULSE_DIR"]), 3)

def train(samples, made_first):
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    make = lambda: resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    model = make() if made_first else None
    for _ in resilin.remaining_epochs_until(1):
        model = model or make()
        for x in resilin.AdaptiveDataLoader(torch.ones(samples, 1), batch_size=4):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = shown().beats
        model.eval()
        model(torch.ones(1, 1))
        assert shown().beats == before + 1
        model.train()
    return model

first = train(8, made_first=True)
resilin.reset_job()
print(shown().phase.name, shown().steps, shown().began)
second = train(16, made_first=False)
beats = shown().beats
first.eval()(torch.ones(1, 1))
assert shown().beats == beats, "a model of the former job shows nothing"
time.sleep(2.5 * pulse.INTERVAL)
print(shown().phase.name, shown().steps, shown().began)
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["START 0 None", "DONE 4 0"]
    left = pulse.read(tmp_path, 3)
    assert (left.phase, left.steps, left.left) == (Phase.DONE, 4, True)


SHOWS = """
import os, sys
from resilin.core.hang import Phase
from resilin.engine import pulse

shown = pulse.of_this_process()
shown.beat(Phase.STEP, 7)
"""


def test_what_a_worker_fails_with_is_left_behind(tmp_path):
    done = run(tmp_path, SHOWS + "raise ValueError('first line\\nsecond \\x1b[2J' + 'x' * 9999)")
    assert "Traceback" in done.stderr
    left = pulse.error_path(tmp_path, 3).read_text()
    assert left.startswith("ValueError: first line second ?[2Jxxx")
    assert len(left) < 400


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit(3)", "pass"])
def test_a_script_that_ends_says_so(tmp_path, code):
    run(tmp_path, SHOWS + code)
    assert pulse.read(tmp_path, 3).left
    assert not pulse.error_path(tmp_path, 3).exists()


def test_a_child_does_not_speak_for_its_parent(tmp_path):
    code = """
child = os.fork()
if child == 0:
    try:
        raise ValueError("of the child")
    finally:
        sys.exit(1)
os.waitpid(child, 0)
os._exit(0)
"""
    run(tmp_path, SHOWS + code)
    shown = pulse.read(tmp_path, 3)
    assert not shown.left
    assert not pulse.error_path(tmp_path, 3).exists()


def test_without_an_agent_there_is_nobody_to_show_anything_to(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.PULSE_DIR, raising=False)
    assert type(pulse.of_this_process()) is pulse.Pulse
    pulse.announce()
    # One that is gone has taken its directory along.
    monkeypatch.setenv(environment.PULSE_DIR, str(tmp_path / "gone"))
    assert type(pulse.of_this_process()) is pulse.Pulse
    pulse.announce()
    assert list(Path(tmp_path).iterdir()) == []


def test_a_place_that_is_full_does_not_end_the_worker(tmp_path):
    code = """
import os
usual = os.write

def full(descriptor, data):
    if len(data) == 4096:
        raise OSError(28, "No space left on device")
    return usual(descriptor, data)

os.write = full
from resilin.engine import pulse
assert type(pulse.of_this_process()) is pulse.Pulse
print("goes on")
"""
    assert run(tmp_path, code).stdout == "goes on\n"


@pytest.mark.parametrize("data", [b"", b"short", b"other 1\n" + bytes(64), b"\xff" * 4096])
def test_what_is_no_pulse_is_not_taken_for_one(tmp_path, data):
    (tmp_path / "0").write_bytes(data)
    assert pulse.read(tmp_path, 0) is None
