"""Jobs that share a cluster, and checks of them: what `sharing_job.py` has written down is judged.

folder = tmp_path / "first"
...  # run sharing_job.py FOLDER --epochs 3 --seed 1 in parts that come and go
assert_as_undisturbed(folder, epochs=3, seed=1)
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests import forked
from tests.cluster.sharing_job import HURRY, NUM_SAMPLES

if TYPE_CHECKING:
    from tests.cluster.served import Served

JOB = Path(__file__).with_name("sharing_job.py")
"""The script of the job."""
TOLERANCE = 1e-11
"""Largest relative distance of the parameters, in float64."""
NAMES = ("first", "second", "third")
"""The jobs of `assert_three_jobs_share`."""
EPOCHS = 4
"""Their epochs."""
LIMIT = 300.0
"""Seconds that an undisturbed run may take; a machine may be very busy."""


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


@functools.cache
def undisturbed(*, epochs: int, seed: int) -> dict[str, Any]:
    """The same job in one process that nobody touches: its steps and parameters."""
    with tempfile.TemporaryDirectory() as folder:
        forked.run(
            [sys.executable, JOB, folder, "--epochs", str(epochs), "--seed", str(seed)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off"},
            check=True,
            timeout=LIMIT,
        )
        state: dict[str, Any] = torch.load(Path(folder, "final.pt"))
    return state


def sharing_launch(
    folder: Path, name: str, *, epochs: int, seed: int, pause: float = 1.0, **wishes: Any
) -> dict[str, Any]:
    """A submission of `sharing_job.py`, with its checkpoints in its folder."""
    script = [str(JOB), str(folder), "--epochs", str(epochs), "--seed", str(seed)]
    return {
        "name": name,
        **wishes,
        "launch": {
            "script": [*script, "--pause", str(pause)],
            "directory": str(folder.parent),
            "python": sys.executable,
            "options": ["--warm", "--memory-dir", str(folder / "memory")],
            "environment": {"RESILIN_RUN_DIR": "off", "OMP_NUM_THREADS": "1"},
            "checkpoint_dir": str(folder / "checkpoints"),
        },
    }


def assert_three_jobs_share(
    served: Served,
    folder: Path,
    *,
    lose: Callable[[str], object],
    drain: Callable[[str], object] | None = None,
) -> tuple[str, str]:
    """Three jobs share four nodes, of which one is drained and one is lost; all end as undisturbed.

    Jobs are slow until both have happened, or one would be over before, on a machine that is busy.

    Args:
        served: The controller of four nodes with an accelerator each. It is killed on the way.
        folder: Where the jobs write.
        lose: Takes a node away, with all that runs on it.
        drain: Drains a node; None for the command of the controller.

    Returns:
        Names of the drained node and of the lost one.
    """

    def jobs_on(node: str) -> list[str]:
        return {each["name"]: each["jobs"] for each in served.client.nodes()}.get(node, [])

    def busy() -> list[str]:
        return [each["name"] for each in served.client.nodes() if each["jobs"]]

    folders = {name: folder / name for name in NAMES}
    for seed, (name, its) in enumerate(folders.items()):
        (its / "diaries").mkdir(parents=True)
        launch = sharing_launch(its, name, epochs=EPOCHS, seed=seed, max=4)
        assert served.client.submit(launch) == name
    served.wait(lambda: all(steps_done(its) > 2 for its in folders.values()))
    drained = next(iter(served.job("first")["nodes"]))
    (drain or served.client.drain)(drained)
    # The controller dies on the way, and another one takes over.
    served.kill()
    served.start()
    served.wait(lambda: not jobs_on(drained))
    served.wait(lambda: bool(busy()))
    lost = busy()[0]
    assert lost != drained
    lose(lost)
    served.wait(lambda: not jobs_on(lost))
    for its in folders.values():
        (its / HURRY).touch()
    served.wait(lambda: all(served.job(name)["ended"] is not None for name in NAMES), 600)
    assert {name: served.phase(name) for name in NAMES} == dict.fromkeys(NAMES, "finished")
    assert not jobs_on(drained)
    assert sum(served.job(name)["restarts"] for name in NAMES) > 0
    assert [served.job(name)["failures"] for name in NAMES] == [0, 0, 0]
    journal = (served.state / "journal.jsonl").read_bytes().splitlines()
    records = [json.loads(line.partition(b" ")[2]) for line in journal]
    started = [each["name"] for each in records if each["record"] == "Announced"]
    assert len(started) == len(set(started))  # no part was started twice
    assert sum(len(sizes_of(its)) for its in folders.values()) > len(NAMES)
    for seed, its in enumerate(folders.values()):
        assert_as_undisturbed(its, epochs=EPOCHS, seed=seed)
    return drained, lost
