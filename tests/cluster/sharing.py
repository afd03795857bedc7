"""Checks of jobs that shared a cluster: what `sharing_job.py` has written down, read and judged.

folder = tmp_path / "first"
...  # run sharing_job.py FOLDER --epochs 3 --seed 1 in parts that come and go
assert_as_undisturbed(folder, epochs=3, seed=1)
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.cluster.sharing_job import NUM_SAMPLES

JOB = Path(__file__).with_name("sharing_job.py")
"""The script of the job."""
TOLERANCE = 1e-11
"""Largest relative distance of the parameters, in float64."""


@dataclass
class Run:
    """One generation of a job, as its replicas have written it down."""

    time: float
    life: str
    """Id of its rendezvous."""
    step: int
    """The step that it resumed from."""
    replicas: int
    samples: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The samples of each step, of all replicas."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The epoch of each step."""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """All lines of the diaries, in order of time; a line that was cut off is no line."""
    lines = []
    for path in (folder / "diaries").glob("*.jsonl"):
        lines += [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]
    return sorted(lines, key=lambda line: line["time"])


def runs_of(folder: Path) -> list[Run]:
    """The generations of a job, in order of time."""
    runs: dict[str, Run] = {}
    for line in lines_of(folder):
        name, step = line["run"], line["step"]
        if line["event"] == "start":
            runs.setdefault(name, Run(line["time"], line["life"], step, line["replicas"]))
        elif line["event"] == "part":
            runs[name].samples[step] += line["samples"]
            runs[name].epochs[step] = line["epoch"]
    return list(runs.values())


def steps_done(folder: Path) -> int:
    """The last step that any replica has completed so far."""
    return max((line["step"] for line in lines_of(folder) if line["event"] == "done"), default=0)


def sizes_of(folder: Path) -> list[int]:
    """Replicas of each generation that trained, in order of time."""
    return [run.replicas for run in runs_of(folder) if run.samples]


def samples_of(runs: list[Run]) -> dict[int, Counter[int]]:
    """Number of times each sample was used in each epoch, along the steps that count."""
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for step in range(1, max(step for run in runs for step in run.samples) + 1):
        # A step counts in the last generation that made it: a later one began after it.
        run = [run for run in runs if run.step < step][-1]
        assert step in run.epochs, f"step {step} was not made after it was lost"
        used[run.epochs[step]].update(run.samples[step])
    return used


def assert_once(folder: Path, *, epochs: int) -> None:
    """Each sample was used exactly once in each epoch, whatever happened to the job."""
    used = samples_of(runs_of(folder))
    once = Counter(range(NUM_SAMPLES))
    wrong = {
        epoch: dict(used[epoch] - once) | dict.fromkeys(once - used[epoch], 0)
        for epoch in range(epochs)
        if used[epoch] != once
    }
    assert not wrong, f"samples that were used more or less than once, by epoch: {wrong}"
    assert set(used) == set(range(epochs)), f"epochs {sorted(used)} instead of {epochs}"


def assert_one_life_at_once(folder: Path) -> None:
    """No two rendezvous of the job were in use at the same time."""
    spans: dict[str, tuple[float, float]] = {}
    for line in lines_of(folder):
        first, _ = spans.get(line["life"], (line["time"], 0.0))
        spans[line["life"]] = (first, line["time"])
    ordered = sorted(spans.items(), key=lambda item: item[1])
    for (one, (_, last)), (other, (first, _)) in itertools.pairwise(ordered):
        assert last < first, f"{one} was at work until {last}, and {other} from {first}"


def assert_as_undisturbed(folder: Path, *, epochs: int, seed: int) -> None:
    """Samples exactly once, one life at a time, and the parameters of a run nobody touched."""
    assert_once(folder, epochs=epochs)
    assert_one_life_at_once(folder)
    ours = torch.load(folder / "final.pt")
    plain = undisturbed(epochs=epochs, seed=seed)
    assert ours["steps"] == plain["steps"]
    for name, value in plain["parameters"].items():
        distance = float((ours["parameters"][name] - value).norm() / value.norm())
        assert distance <= TOLERANCE, f"{name} is {distance:.2e} from that of an undisturbed run"


def undisturbed(*, epochs: int, seed: int) -> dict[str, Any]:
    """The same job in one process that nobody touches: its steps and parameters."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(JOB), folder, "--epochs", str(epochs), "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off"}
        subprocess.run(command, check=True, timeout=300, env=environment)
        state: dict[str, Any] = torch.load(Path(folder, "final.pt"))
    return state
