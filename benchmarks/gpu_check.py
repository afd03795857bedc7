"""One command for somebody with GPUs: what holds on the CPU, tried on the devices of this machine.

    python benchmarks/gpu_check.py --out result.json           # a few minutes
    python benchmarks/gpu_check.py --out result.json --quick   # about a minute

Each section is a job of its own, on all GPUs of this machine, or without one on 2 processes of the
CPU. Its status is `passed`, `failed` with the error, or `not run` with what it needs; none is left
out. The exit code is 1 if a section failed. The result is one JSON, to be attached to an issue: it
has versions, names of devices and figures, and no paths and no names of hosts or users.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import resilin

HERE = Path(__file__).parent
JOBS = HERE / "gpu_check_jobs.py"
LIMIT = 600.0
"""Seconds that a section may take."""
KILL_AFTER = 10
"""Step after which a worker is killed."""

Figures = dict[str, Any]
Section = Callable[[], Figures]


class NotRunError(Exception):
    """A section cannot run here; the text says what it needs."""


class FailedError(Exception):
    """A job of a section failed; the text has the end of what it said."""


def status_of(section: Section) -> Figures:
    """Runs a section: its status, its figures, and the time that it took."""
    began = time.monotonic()
    try:
        result = {"status": "passed", **section()}
    except NotRunError as reason:
        result = {"status": f"not run: {reason}"}
    except Exception as error:
        # Whatever it is belongs into the result: nobody is here to look at a traceback.
        result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def check(sections: Mapping[str, Section]) -> dict[str, Figures]:
    """The results of all sections, in their order."""
    results = {}
    for name, section in sections.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = status_of(section)
        print(f"{name}: {results[name]['status']}", file=sys.stderr, flush=True)
    return results


def failures(results: Mapping[str, Figures]) -> list[str]:
    """What has to be looked at; a status that is none of the known ones, too."""
    return [
        f"{name}: {result.get('error', result['status'])}"
        for name, result in results.items()
        if result["status"] != "passed" and not result["status"].startswith("not run: ")
    ]


def environment() -> Figures:
    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = round(found.total_memory / 2**30, 1)
        capability = f"{found.major}.{found.minor}"
        devices.append({"name": found.name, "gib": memory, "capability": capability})
    nccl = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "resilin": resilin.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "devices": devices,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def num_processes() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def started(launcher: list[str], section: str, folder: Path, quick: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, str(JOBS), section, str(folder)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [*command, "--quick"] if quick else command,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "RESILIN_RUN_DIR": str(folder / "events")},
        )


def ended(job: subprocess.Popen[str], section: str, folder: Path) -> Figures:
    """Waits for a job, and gives its figures.

    Raises:
        FailedError: It failed, or took too long.
    """
    try:
        code: int | None = job.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(job)
    result = folder / f"{section}.json"
    if code is None:
        raise FailedError(f"not over after {LIMIT:g} seconds: {reason(folder)}")
    if code != 0 or not result.exists():
        raise FailedError(f"exit code {code}: {reason(folder)}")
    figures: Figures = json.loads(result.read_text())
    return figures


def end(job: subprocess.Popen[str]) -> None:
    """Ends whatever is left of a job, workers included."""
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    job.wait()


def reason(folder: Path) -> str:
    """Why a job failed: the errors of its processes, else the last lines of its log."""
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    lines = (folder / "log").read_text().splitlines()
    text = " | ".join(errors or lines[-8:])
    return (
        text.replace(str(folder), "").replace(str(HERE), "").replace(str(Path.home()), "~")[-2000:]
    )


def launched(section: str, quick: bool, *, of_resilin: bool = False) -> Figures:
    """Runs a section of `gpu_check_jobs.py` on all devices."""
    number = str(num_processes())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", number]
        run = ["resilin.cli", "run", "--nproc", number, "--memory-dir", str(folder / "memory")]
        job = started(run if of_resilin else torchrun, section, folder, quick)
        figures = ended(job, section, folder)
    return {"processes": num_processes(), **figures}


def syncs(quick: bool) -> Figures:
    if not torch.cuda.is_available():
        raise NotRunError("needs CUDA")
    return launched("syncs", quick)


def nccl(quick: bool) -> Figures:
    if not torch.cuda.is_available():
        raise NotRunError("needs CUDA")
    if num_processes() < 2:
        raise NotRunError("needs 2 GPUs")
    return launched("collectives", quick)


def host_collectives(quick: bool) -> Figures:
    """The same job with gloo, where there is no NCCL."""
    if torch.cuda.is_available():
        raise NotRunError("needs a machine without CUDA; nccl is in its place")
    return launched("collectives", quick)


def kill(quick: bool) -> Figures:
    """Kills one worker under `resilin run`; the others go on, and arrive where one process does."""
    number = str(num_processes())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = ["resilin.cli", "run", "--nproc", number, "--memory-dir", str(folder / "memory")]
        job = started(run, "kill", folder, quick)
        try:
            before, killed_at = kill_one(job, folder)
        except BaseException:
            end(job)
            raise
        figures = ended(job, "kill", folder)
        later = {pid: steps for pid, steps in notes(folder).items() if pid not in before}
    if not later:
        raise FailedError(f"no worker was started after one of {len(before)} was killed")
    reached = max(step for steps in before.values() for step, _ in steps)
    resumed = min(step for steps in later.values() for step, _ in steps)
    again = max(steps[0][1] for steps in later.values())
    return {
        "processes": num_processes(),
        **figures,
        "seconds_to_next_step": round(again - killed_at, 2),
        "steps_made_again": reached + 1 - resumed,
    }


Notes = dict[int, list[tuple[int, float]]]


def notes(folder: Path) -> Notes:
    """Steps of each worker, with their times; of those that have made one."""
    found: Notes = {}
    for path in folder.glob("*.steps"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.stem)] = [(int(step), float(when)) for step, when in lines]
    return {pid: steps for pid, steps in found.items() if steps}


def kill_one(job: subprocess.Popen[str], folder: Path) -> tuple[Notes, float]:
    """Kills a worker that has made some steps: what all had done, and when it was killed."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        now = notes(folder)
        if len(now) == num_processes() and min(s[-1][0] for s in now.values()) >= KILL_AFTER:
            os.kill(max(now), signal.SIGKILL)
            killed_at = time.time()
            # Steps that were noted while it died are of workers that are known.
            time.sleep(0.2)
            return {pid: steps for pid, steps in notes(folder).items() if pid in now}, killed_at
        if job.poll() is not None:
            raise FailedError(f"ended before the kill: {reason(folder)}")
        time.sleep(0.02)
    raise FailedError(f"step {KILL_AFTER} was not made in {LIMIT:g} seconds")


def sections(quick: bool) -> dict[str, Section]:
    return {
        "environment": environment,
        "exactness": lambda: launched("exactness", quick),
        "overhead": lambda: launched("overhead", quick),
        "syncs": lambda: syncs(quick),
        "collectives": lambda: host_collectives(quick),
        "nccl": lambda: nccl(quick),
        "copies": lambda: launched("copies", quick, of_resilin=True),
        "kill": lambda: kill(quick),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smaller form, about a minute")
    parser.add_argument("--check", action="store_true", help="as the other benchmarks: always on")
    args = parser.parse_args()
    results = check(sections(args.quick))
    failed = failures(results)
    text = json.dumps(
        {"benchmark": "gpu_check", "quick": args.quick, "failed": failed, "sections": results}
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
