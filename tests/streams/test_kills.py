"""Kills, and other numbers of replicas, of a job over packs of shuffled documents of files."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.streams import kill_job
from tests.streams.kill_job import EPOCHS, STEPS, write_files

pytestmark = pytest.mark.nightly(part="jobs")

JOB = Path(kill_job.__file__)


def start(folder, *launcher, faults=()):
    """Runs the job to its end, and returns how it has ended and what it has logged."""
    environ = {
        **os.environ,
        "KILL_TEST_FOLDER": str(folder),
        "KILL_TEST_FAULTS": json.dumps(faults),
        "RESILIN_MEMORY_DIR": str(folder / "memory"),
        "RESILIN_LOG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    done = forked.run(
        [sys.executable, *launcher, str(JOB)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stderr


def run(folder, replicas, restarts, faults):
    options = ["--warm", "--nproc", str(replicas), "--max-restarts", str(restarts)]
    command = ["-m", "resilin.cli", "run", *options, "--run-dir", "off"]
    return start(folder, *command, faults=faults)


def told(folder, name):
    """What the members of the job have written down under a name."""
    lines = (folder / "marks").read_text().splitlines()
    return [
        json.loads(line.removeprefix(f"{name} ")) for line in lines if line.startswith(f"{name} ")
    ]


@pytest.fixture
def expected(tmp_path):
    """The parameters of one process that nobody disturbs."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    write_files(folder)
    code, log = start(folder)
    assert code == 0, log[-3000:]
    assert told(folder, "epoch") == [[epoch, [epoch + 1.0]] for epoch in range(EPOCHS)]
    return told(folder, "end")[0]


@pytest.mark.timeout(600)
def test_packs_of_a_killed_and_resized_job_are_used_once(tmp_path, expected):
    write_files(tmp_path)
    # In the middle of an epoch; and behind the last step of one, which ends this launcher.
    faults = [[1, "backward", 4], [0, "after_step", STEPS - 1]]
    code, log = run(tmp_path, 2, restarts=1, faults=faults)
    assert code != 0
    assert re.search(r"resumed 2 replicas at step [34] from memory", log), log[-3000:]
    faults += [[2, "backward", STEPS + 3]]
    code, log = run(tmp_path, 3, restarts=0, faults=faults)
    assert code != 0
    assert re.search(r"resumed 3 replicas at step [456] from", log), log[-3000:]
    # The machine was replaced: what is left is the directory of checkpoints.
    shutil.rmtree(tmp_path / "memory")
    faults += [[0, "end_of_epoch", 2 * STEPS]]
    code, log = run(tmp_path, 1, restarts=1, faults=faults)
    assert code == 0, log[-3000:]
    resumed = re.findall(r"resumed 1 replica at step (\d+) from (\w+)?", log)
    assert 0 < int(resumed[0][0]) <= STEPS + 3, log[-3000:]
    assert [where == "memory" for _, where in resumed] == [False, True], log[-3000:]
    marks = (tmp_path / "marks").read_text().splitlines()
    assert [f"{at} {step} {rank}" for rank, at, step in faults] == [
        line for line in marks if line.split()[0] not in ("epoch", "end")
    ]
    found = told(tmp_path, "epoch")
    assert {epoch for epoch, _ in found} == set(range(EPOCHS))
    assert all(counts == [epoch + 1.0] for epoch, counts in found)
    (end,) = told(tmp_path, "end")
    assert max(abs(a - b) for a, b in zip(end, expected, strict=True)) < 1e-11
