"""Parts of an elastic job whose samples are counted, for the tests of backends."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilin.cluster.backends.base import Part
from tests import forked
from tests.cluster import sharing

ROOT = Path(__file__).parents[3]
LIFE = uuid.uuid4().hex[:8]
"""Part of the id of each job: copies in memory of a test that failed must not be found."""


@contextmanager
def serving_store() -> Iterator[str]:
    """The meeting place of all jobs, on no node."""
    command = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1", "--port", "0"]
    store = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert store.stdout is not None
        yield f"127.0.0.1:{store.stdout.readline().split()[-1]}"
    finally:
        store.terminate()
        store.communicate(timeout=60)


def part_of(
    name: str, node: str, command: str | Sequence[str], accelerators: int = 1, **more: Any
) -> Part:
    """A part with a command of the shell, or another one."""
    command = ["bash", "-c", command] if isinstance(command, str) else command
    job = name.rpartition("-g")[0]
    return Part(name=name, job=job, node=node, accelerators=accelerators, command=command, **more)


def training(name: str, node: str, endpoint: str, folder: Path, *, epochs: int, seed: int) -> Part:
    """A part of the job `sharing_job.py`, which is slow until `hurry` is called.

    Else it would be over before others have joined, on a machine that is busy.
    """
    if not folder.exists():
        folder.mkdir()
        (folder / "slow").touch()
    job = name.rpartition("-g")[0]
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm"]
    command += ["--nnodes", "1:4", "--nproc", "1"]
    command += ["--rdzv-id", f"{job}-{LIFE}", "--rdzv-endpoint", endpoint]
    command += ["--rdzv-conf", "is_host=0"]
    command += ["--checkpoint-dir", str(folder / "checkpoints"), str(sharing.JOB), str(folder)]
    command += ["--epochs", str(epochs), "--seed", str(seed)]
    command += ["--slow-while", str(folder / "slow")]
    environment = {"OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off", "PART": name}
    log = str(folder / f"{name}.log")
    return part_of(name, node, command, environment=environment, directory=str(ROOT), log=log)


def hurry(folder: Path) -> None:
    """Let the job take its steps at full speed."""
    (folder / "slow").unlink()


def part_of_rank_0(folder: Path) -> str:
    """Name of the part with the first replica of the generation that trains."""
    starts = [line for line in sharing.lines_of(folder) if line["event"] == "start"]
    pid = [line["pid"] for line in starts if line["replica"] == 0][-1]
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (name,) = [each[5:].decode() for each in variables if each.startswith(b"PART=")]
    return name
