"""Branches from a checkpoint: once for real, the rest with a script that only pretends to train."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from resilin.cli import branch as command
from resilin.lab import launch
from resilin.lab.branch_plots import binned
from resilin.lab.branch_table import Branch, Outcome, judge, tabulate
from resilin.lab.grid import Failure
from resilin.lab.intervals import Interval
from tests.training.state.checkpoint.snapshots import as_saved_today

pytestmark = pytest.mark.processes

TIMEOUT = 110
ROOT = Path(__file__).parents[2]
REAL = """
import os, pathlib, sys
import torch
import resilin

class Seen(torch.utils.data.Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        with seen.open("a") as file:
            file.write(f"{index}\\n")
        return x[index], y[index]

seen = pathlib.Path(os.environ["RESILIN_RUN_DIR"], "seen.txt")
torch.set_num_threads(1)
x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(dim=1) > 0).long()
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = resilin.AdaptiveDataParallel(net, optimizer, rule="sqrt")
loader = resilin.AdaptiveDataLoader(Seen(), batch_size=8, shuffle=True, max_local_bsz=8)
resilin.checkpoint_to("kept", every=5, keep=99)
for epoch in resilin.remaining_epochs_until(1):
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
    pathlib.Path("whole").touch()
"""
PRETENDED = """
import json, os, sys, time
from pathlib import Path
from resilin.core.events import StartEvent, StepEvent
from resilin.core.trace import BatchTrace
from resilin.telemetry.log import EventLog

env, words = os.environ, sys.argv[1:]
place = Path(env["RESILIN_RUN_DIR"])
(place / "pid").write_text(str(os.getpid()))
size = BatchTrace.parse(Path(env["RESILIN_BATCH_TRACE"]).read_text()).at(0)
(commit,) = Path(env["RESILIN_CHECKPOINT_DIR"]).glob("*/COMMIT.json")
cursor = json.loads(commit.read_text())["commit"]["tree"]["loader/TensorDataset[50]/0"]["cursor"]
print("size", size, "cursor", cursor, "arguments", *words)
if "sleep" in words:
    time.sleep(300)
if "fail" in words and size == 16 and cursor == 74 + 64:
    raise SystemExit("this branch is to fail")
if "done" in words:
    raise SystemExit(0)
stop = int(env["RESILIN_STOP_AT"]) - 32 * ("early" in words and size == 16)
log = EventLog(place, "replica-0")
log.write(StartEvent(time=0, step=10, reference=6 if "other" in words else 8, replicas=1, hosts=1,
                     rule=env.get("RESILIN_RULE", "sqrt"), optimizer="SGD",
                     resumed="fresh" not in words, replays=env["RESILIN_BATCH_TRACE"]))
step, samples = 10, 74
while samples < stop:
    step, samples = step + 1, samples + size
    # The last 32 samples have the loss that counts.
    loss = 9.0 if samples <= 74 + 32 else cursor / 74 + {8: 0.0, 16: 0.001, 32: 0.5}[size]
    log.write(StepEvent(time=step, step=step, epoch=0, replicas=1, batch_size=size, local_bsz=size,
                        accumulation_steps=1, samples=samples, progress=step, scale=size / 8,
                        gain=1, lr_factor=(size / 8) ** 0.5,
                        loss=None if "mute" in words else loss))
log.close()
"""
PLAIN = ("--sizes=1,2,4", "--samples=64", "--window=32", "--repeats=2", "--batch-size=8")


def digests(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Runs the command on a script that trains nothing."""
    monkeypatch.chdir(tmp_path)
    as_saved_today(tmp_path / "kept")
    (tmp_path / "script.py").write_text(PRETENDED)
    plain = launch.command
    # Seeding loads torch, which such a script has no use for.
    monkeypatch.setattr(launch, "command", lambda script, words, *, seeded: plain(script, words))
    monkeypatch.setattr(command, "_draw", lambda *_: None)

    def run(*words, options=PLAIN, checkpoint="kept"):
        return command.main([checkpoint, *options, "--out=out", "script.py", *words])

    return run


@pytest.mark.nightly(part="jobs")
def test_branches_of_a_real_run(tmp_path):
    (tmp_path / "train.py").write_text(REAL)
    (tmp_path / "first").mkdir()
    first = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "RESILIN_RUN_DIR": "first"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert first.returncode == 0, first.stderr
    order = [int(line) for line in (tmp_path / "first/seen.txt").read_text().split()]
    (tmp_path / "whole").unlink()
    kept = tmp_path / "kept"
    checkpoint = sorted(path for path in kept.glob("step-*"))[0]
    step = int(checkpoint.name.split("-")[1])
    before = digests(kept)
    line = [sys.executable, "-m", "resilin.cli", "branch", str(checkpoint), "--sizes", "1,2"]
    line += ["--samples", "64", "--repeats", "2", "--jobs", "2", "--out", "out", "--json"]
    done = subprocess.run(
        [*line, "--", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    # Nobody has written where the checkpoint is, and no branch went on after its samples.
    assert digests(kept) == before
    assert not (tmp_path / "whole").exists()
    assert not list((tmp_path / "out").rglob("*.distcp"))
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "out" / "table.json").read_text())
    assert (told["step"], told["rule"], told["window"]) == (step, "sqrt", 16)
    assert (told["failures"], told["warnings"]) == ([], [])
    small, large = told["rows"]
    assert (small["steps"], large["steps"]) == (8, 4)
    assert (small["samples"], large["samples"]) == (64, 64)
    assert (small["lr_factor"], large["lr_factor"]) == (1, pytest.approx(math.sqrt(2)))
    assert small["difference"] is None
    assert large["difference"]["num"] == 2
    assert len({*small["losses"], *large["losses"]}) == 4
    # The same samples in the same order, whatever the size; each repeat has its own.
    for repeat in range(2):
        start = 8 * step + 64 * repeat
        for size in (1, 2):
            text = (tmp_path / f"out/{size}x/repeat-{repeat}/seen.txt").read_text()
            assert [int(word) for word in text.split()][:64] == order[start : start + 64]
    height, width, _ = imread(tmp_path / "out" / "branch.png").shape
    assert height > 300
    assert width > 900


def test_the_table_has_each_size_and_the_critical_batch(tmp_path, pretend, capsys):
    before = digests(tmp_path / "kept")
    assert pretend("--lr=1") == 0
    assert digests(tmp_path / "kept") == before
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:6] == ["1x", "8", "8", "64", "x1", "2"]
    assert rows[2][:6] == ["2x", "16", "4", "64", "x1.41", "2"]
    assert rows[3][:6] == ["4x", "32", "2", "64", "x2", "2"]
    assert [row[-1] for row in rows[1:4]] == ["smallest", "within", "beyond"]
    assert "+0.0010 +- 0.0000" in out
    assert "+0.5000 +- 0.0000" in out
    assert out.splitlines()[-1] == (
        "rule sqrt; critical batch: at least 2x (16 samples), below 4x (32)"
    )
    assert "the checkpoint is of 2 replicas, and each branch is one process" in err
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.startswith("| size | batch |")
    assert table.endswith("below 4x (32)\n")
    assert json.loads((tmp_path / "out" / "table.json").read_text())["critical"] == {
        "at_least": 16,
        "below": 32,
    }
    # The second repeat begins where the first one ends; arguments are passed on.
    log = (tmp_path / "out/4x/repeat-1/log.txt").read_text()
    assert log == "size 32 cursor 138 arguments --lr=1\n"
    assert "cursor 74 " in (tmp_path / "out/4x/repeat-0/log.txt").read_text()


def test_a_rule_can_be_named(tmp_path, pretend, capsys):
    assert pretend(options=[*PLAIN, "--rule=linear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == "linear"


def test_a_failed_branch_is_told_of_and_its_pair_is_left_out(tmp_path, pretend, capsys):
    assert pretend("fail") == 1
    out, err = capsys.readouterr()
    assert "2x/repeat-1 failed with exit code 1; the end of its log:" in err
    assert "resilin:   this branch is to fail" in err
    rows = [line.split() for line in out.splitlines()]
    # One pair has no interval.
    assert (rows[2][5], rows[2][-1]) == ("1", "undecided")
    assert "at least 1x (8 samples), below 4x (32); undecided: 2x" in out
    assert json.loads((tmp_path / "out/table.json").read_text())["failures"] == ["2x/repeat-1"]


def test_a_branch_that_ends_early_has_failed(pretend, capsys):
    assert pretend("early") == 1
    assert "2x/repeat-0 failed: training was over after 32 of 64 samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("done", "nothing is left to train there. Give the script more epochs"),
        ("mute", "the script records no loss: call resilin.record(loss=loss)"),
        ("fresh", "its state has to be kept by resilin"),
        ("other", "reference batch of the script (6) is not that of the branches (8)"),
    ],
)
def test_what_concerns_all_branches_ends_after_the_first(tmp_path, pretend, capsys, word, message):
    assert pretend(word) == 1
    assert message in capsys.readouterr().err
    assert len(list((tmp_path / "out").rglob("log.txt"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes=1"], "sizes (1) must be at least two"),
        (["--samples=72"], "samples (72) must be a multiple of 32"),
        (["--window=8"], "window (8) must be a multiple of 32"),
        (["--window=96"], "window (96) must be above 0 and at most samples (64)"),
        (["--repeats=1"], "repeats (1) must be at least 2"),
        (["--tolerance=0"], "tolerance (0.0) must be above 0"),
        (["--rule=fast"], "rule ('fast') must be one of"),
        (["--jobs=2", "nothing.py"], "there is no script 'nothing.py'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path, pretend, capsys, options, message):
    assert pretend(options=[*PLAIN, *options]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("resilin: ")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_sizes_are_whole_multiples(pretend, capsys):
    with pytest.raises(SystemExit, match="2"):
        pretend(options=["--sizes=1,1.5", "--samples=64"])
    assert "'1.5' is not a whole number" in capsys.readouterr().err


def test_the_reference_batch_has_to_be_known(pretend, capsys):
    assert pretend(options=PLAIN[:-1]) == 1
    assert "does not say its reference batch: give --batch-size" in capsys.readouterr().err


def test_a_directory_in_use_is_refused(tmp_path, pretend, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert pretend() == 1
    assert "run directory 'out' is not empty" in capsys.readouterr().err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_branch_that_runs(tmp_path, pretend):
    line = [sys.executable, "-m", "resilin.cli", "branch", "kept", *PLAIN, "--out=out"]
    process = subprocess.Popen([*line, "script.py", "sleep"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (pids := [p for p in tmp_path.glob("out/*/*/pid") if p.read_text()]):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (file,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


# The table -------------------------------------------------------------------------------------


def outcome(loss, reported=1.0):
    return Outcome(loss, 4, 64, 1.0, reported, "sqrt", ((32.0, 64.0), (loss, loss)))


def table(losses, failures=(), reported=1.0, tolerance=0.01):
    found = {
        Branch(size, repeat): outcome(loss, reported)
        for size, each in losses.items()
        for repeat, loss in enumerate(each)
    }
    inputs = {"reference": 8, "tolerance": tolerance, "step": 1, "samples": 64, "window": 32}
    return tabulate(found, failures, sizes=tuple(losses), **inputs)


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (Interval(0.005, 0.005, 3), "within"),
        (Interval(-1.0, 0.5, 3), "within"),
        (Interval(0.005, 0.006, 3), "undecided"),
        (Interval(0.02, 0.01, 3), "undecided"),
        (Interval(0.03, 0.01, 3), "beyond"),
        (Interval(0.005, math.nan, 1), "undecided"),
        (Interval(math.nan, math.nan, 0), "undecided"),
        (Interval(math.nan, math.nan, 3), "beyond"),
    ],
)
def test_an_interval_decides_where_it_leaves_out_the_tolerance(difference, verdict):
    assert judge(difference, 0.01) == verdict


def test_a_size_is_compared_with_the_smallest_of_the_same_repeat():
    # The repeats differ by far more than the tolerance; the pairs do not.
    row = table({1: (1.0, 2.0, 3.0), 2: (1.001, 2.003, 3.002)}).rows[1]
    assert row.difference.mean == pytest.approx(0.002)
    assert row.verdict == "within"


def test_the_critical_batch_is_an_interval():
    base = (1.0, 2.0, 3.0)
    near, far = (1.001, 2.001, 3.001), (1.5, 2.5, 3.5)
    unsure = (1.0, 2.0, 3.03)
    found = table({1: base, 2: near, 4: unsure, 8: far})
    assert (found.at_least.size, found.below.size) == (2, 8)
    assert found.critical().endswith("at least 2x (16 samples), below 8x (64); undecided: 4x")
    # A larger size that is within again says nothing of those between.
    found = table({1: base, 2: unsure, 4: near})
    assert (found.at_least.size, found.below) == (1, None)
    assert "no size was surely beyond" in found.critical()


def test_a_size_that_diverged_is_beyond():
    found = table({1: (1.0, 2.0), 2: (math.nan, 2.0)})
    assert found.rows[1].verdict == "beyond"
    assert json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="is not finite in repeat 1"):
        table({1: (1.0, math.inf), 2: (1.0, 2.0)})


def test_without_the_smallest_size_there_is_nothing_to_compare_with():
    failure = Failure(Branch(1, 0), "failed with exit code 1", "the reason")
    with pytest.raises(ValueError, match="no branch of 1x has a result: 1x/repeat-0 failed"):
        table({1: (), 2: (1.0,)}, [failure])


def test_few_reports_are_warned_of():
    found = table({1: (1.0, 2.0), 2: (1.0, 2.0)}, reported=0.5)
    assert found.warnings[0] == "1x/repeat-0: only 50% of the window was reported"
    assert not table({1: (1.0, 2.0), 2: (1.0, 2.0)}).warnings


def test_a_curve_is_averaged_by_samples():
    curve = ((4.0, 8.0, 12.0), (1.0, 2.0, 4.0))
    assert binned(curve, np.array([0, 6, 12]), 4).tolist() == [
        pytest.approx((4 * 1 + 2 * 2) / 6),
        pytest.approx((2 * 2 + 4 * 4) / 6),
    ]
