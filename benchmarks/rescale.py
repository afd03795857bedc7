"""Time from a fault to the next step: resilin against a bare script that reloads a checkpoint.

Two faults. One is SIGKILL of one of the two workers of an agent. The other is the loss of a host:
SIGKILL of one of two agents together with its worker. The bare script is plain DDP under torchrun,
which reads a `torch.save` file when it is started again. Its agents have the rendezvous settings
of `resilin run`, because torchrun's own wait for half a minute; the full form also measures those,
once. They also have its kind of store: with the one that torch 2.13 takes by default, new workers
were seen to look for the dead ones, and to hang. Both train the same model with AdamW, 25 MB of
state in the quick form and 300 MB in the full one. They take turns, each time in a job of its own.
Ours is `resilin run --warm`, which forks workers from a process that has imported torch; `cold` is
the same without, where new workers import all of torch, and resilin besides; full form only.

A recovery ends when all replicas have completed a step. It is split by the marks of the slowest
replica: `launch` (to the first line of the new script: detection, rendezvous, process start),
`import`, `group`, `build` (model and DDP), `restore`, `step`. Steps that were completed before the
fault and made again are counted apart.

    python benchmarks/rescale.py --check           # about 12 minutes
    python benchmarks/rescale.py --quick --check   # about 2 minutes
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import rescale_jobs
from chaos import Host
from harness import finish, parse_args
from torch.distributed import TCPStore

from resilin.cli.options import RENDEZVOUS
from resilin.cli.run import OWN_STORE

HERE = Path(__file__).parent
PHASES = ("launch", "import", "group", "build", "restore", "step")
LIMIT = 120.0
"""Seconds to wait for anything, at most."""
FIRST_FAULT = 12
"""Step after which faults happen; then a few more, so that checkpoints are of different ages."""
LIMITS = {"ratio_worker": 1.0, "ratio_host": 1.0}

Line = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """A fault, and the numbers of agents and workers."""

    name: str
    num_agents: int
    num_workers: int


WORKER = Fault("worker", num_agents=1, num_workers=2)
HOST = Fault("host", num_agents=2, num_workers=1)


@dataclass(frozen=True)
class Recovery:
    """One fault, and its recovery."""

    seconds: float
    """From the fault until all replicas have completed a step."""
    phases: dict[str, float]
    """The same, in parts."""
    redone: int
    """Steps that all replicas had completed before the fault, and that were made again."""
    step_seconds: float
    """Median time between two steps before the fault."""


@dataclass
class Job:
    """One job: its agents, and what its processes have written down."""

    contender: str
    fault: Fault
    size: str
    store: TCPStore
    folder: Path
    hosts: list[Host] = field(default_factory=list)

    def command(self, memory: Path) -> list[str]:
        ours, tuned = self.contender in ("ours", "cold"), self.contender != "default"
        module = ["resilin.cli", "run"] if ours else ["torch.distributed.run"]
        command = [sys.executable, "-m", *module]
        command += ["--nproc-per-node", str(self.fault.num_workers), "--max-restarts", "100"]
        command += ["--memory-dir", str(memory)] if ours else []
        command += ["--warm"] if self.contender == "ours" else []
        if self.fault.num_agents == 1:
            command += ["--standalone"]
        else:
            command += ["--nnodes", f"1:{self.fault.num_agents}", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}"]
            command += ["--rdzv-id", self.folder.name]
            # `resilin run` has them from itself.
            settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
            command += ["--rdzv-conf", settings] if tuned and not ours else []
        script = "ours" if ours else "bare"
        return [*command, str(HERE / "rescale_jobs.py"), script, self.size, str(self.folder)]

    def start(self) -> None:
        (self.folder / "diaries").mkdir(parents=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RESILIN_RUN_DIR": str(self.folder / "events"),
        }
        if self.contender != "default":
            environment[OWN_STORE] = "1"
        for number in range(self.fault.num_agents):
            memory = Path("/dev/shm") / f"{self.folder.parent.name}-{self.folder.name}-{number}"
            with (self.folder / f"host-{number}.log").open("wb") as output:
                process = Popen(
                    self.command(memory),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**environment, rescale_jobs.HOST: str(number)},
                )
            self.hosts.append(Host(number, memory, process))

    def lines(self) -> list[Line]:
        found = []
        for path in (self.folder / "diaries").iterdir():
            whole = path.read_bytes().rpartition(b"\n")[0]
            found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda line: line["time"])

    def wait_for(self, condition: Callable[[list[Line]], bool]) -> list[Line]:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            lines = self.lines()
            if condition(lines):
                return lines
            for host in self.hosts:
                if host.process.poll() is not None:
                    raise RuntimeError(f"agent {host.number} ended: {host.process.returncode}")
            time.sleep(0.02)
        raise TimeoutError(f"{self.folder.name}: nothing happened for {LIMIT:g} s")

    def strike(self, worker: Line) -> float:
        """Lets the fault happen to a worker, or to the host that it is on."""
        when = time.time()
        if self.fault is WORKER:
            os.kill(worker["pid"], signal.SIGKILL)
        else:
            host = next(host for host in self.hosts if host.number == worker["host"])
            self.hosts.remove(host)
            host.end(memory=True)
            # Whoever started it.
            kill(worker["pid"])
        return when

    def end(self) -> None:
        for host in self.hosts:
            host.end(memory=True)
        for pid in {line["pid"] for line in self.lines()}:
            kill(pid)


def kill(pid: int) -> None:
    """Kills a worker, if it is one still: its number may be another process's by now."""
    with contextlib.suppress(OSError):
        if rescale_jobs.HOST.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)


def steps(lines: list[Line], *, pid: int | None = None) -> list[Line]:
    return [line for line in lines if line["event"] == "step" and pid in (None, line["pid"])]


def recover(job: Job, at_step: int, rank: int) -> Recovery:
    """Start a job, cause its fault after a step, and measure the recovery."""
    replicas = job.fault.num_agents * job.fault.num_workers

    def running(lines: list[Line]) -> bool:
        return len({line["pid"] for line in steps(lines) if line["step"] >= at_step}) == replicas

    job.start()
    before = job.wait_for(running)
    old = {line["pid"] for line in before}
    when = job.strike(next(line for line in before if line["rank"] == rank))
    left = len(job.hosts) * job.fault.num_workers

    def recovered(lines: list[Line]) -> bool:
        return len({line["pid"] for line in steps(lines)} - old) == left

    lines = job.wait_for(recovered)
    # Without those of a generation that failed before its first step.
    new = {line["pid"] for line in steps(lines)} - old
    marks = [when]
    for phase in PHASES:
        # The first line of each process: of its steps, the first one.
        first: dict[int, float] = {}
        for line in lines:
            if line["event"] == phase and line["pid"] in new:
                first.setdefault(line["pid"], line["time"])
        marks.append(max(first.values()))
    completed = min(steps(lines, pid=pid)[-1]["step"] for pid in old)
    resumed = min(steps(lines, pid=pid)[0]["step"] for pid in new)
    times = [line["time"] for line in steps(before, pid=min(old))]
    return Recovery(
        seconds=marks[-1] - when,
        phases={p: b - a for p, (a, b) in zip(PHASES, itertools.pairwise(marks), strict=True)},
        redone=max(0, completed + 1 - resumed),
        step_seconds=statistics.median(b - a for a, b in itertools.pairwise(times)),
    )


@contextlib.contextmanager
def jobs(store: TCPStore) -> Iterator[Callable[[str, Fault, str, int], Recovery]]:
    """A function that measures one recovery. What it leaves behind is removed."""
    folder = Path(tempfile.mkdtemp(prefix="resilin-rescale-"))
    numbers = itertools.count()

    def measure(contender: str, fault: Fault, size: str, turn: int) -> Recovery:
        name = f"{fault.name}-{contender}-{next(numbers)}"
        job = Job(contender, fault, size, store, folder / name)
        try:
            recovery = recover(job, FIRST_FAULT + 3 * turn % 10, rank=turn % 2)
        except BaseException:
            for path in sorted(job.folder.glob("host-*.log")):
                print(f"--- {path.name}", path.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
        finally:
            job.end()
            shutil.rmtree(job.folder)
        told = ", ".join(f"{phase} {part:.2f}" for phase, part in recovery.phases.items())
        print(
            f"{name}: {recovery.seconds:.2f} s ({told}), {recovery.redone} steps redone",
            file=sys.stderr,
            flush=True,
        )
        return recovery

    try:
        yield measure
    finally:
        shutil.rmtree(folder)


def summary(recoveries: list[Recovery]) -> dict[str, Any]:
    times = [recovery.seconds for recovery in recoveries]
    return {
        "seconds": round(statistics.median(times), 2),
        "range": [round(min(times), 2), round(max(times), 2)],
        "phases": {
            phase: round(statistics.median(r.phases[phase] for r in recoveries), 2)
            for phase in PHASES
        },
        "redone_steps": [recovery.redone for recovery in recoveries],
        "step_seconds": round(statistics.median(r.step_seconds for r in recoveries), 3),
    }


def main() -> None:
    args = parse_args(__doc__ or "")
    size = "small" if args.quick else "large"
    repeats = {WORKER: 2, HOST: 2} if args.quick else {WORKER: 7, HOST: 5}
    width, depth = rescale_jobs.SIZES[size]
    figures: dict[str, Any] = {"megabytes": round(12e-6 * depth * width * (width + 1))}
    began = time.time()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with jobs(store) as measure:
        for fault, num in repeats.items():
            taken: dict[str, list[Recovery]] = {"ours": [], "bare": []}
            if not args.quick:
                taken["cold"] = []
            for turn in range(num):
                for contender, recoveries in taken.items():
                    recoveries.append(measure(contender, fault, size, turn))
            found = {contender: summary(recoveries) for contender, recoveries in taken.items()}
            figures[fault.name] = found
            # Within each turn, because the machine may be busier in one than in another.
            for contender in taken.keys() - {"bare"}:
                pairs = zip(taken[contender], taken["bare"], strict=True)
                ratio = statistics.median(mine.seconds / theirs.seconds for mine, theirs in pairs)
                suffix = "" if contender == "ours" else f"_{contender}"
                figures[f"ratio_{fault.name}{suffix}"] = round(ratio, 3)
        if not args.quick:
            default = measure("default", HOST, size, 0)
            figures["host_bare_default_seconds"] = round(default.seconds, 2)
    figures["seconds"] = round(time.time() - began)
    finish("rescale", figures, LIMITS, check=args.check)


if __name__ == "__main__":
    main()
