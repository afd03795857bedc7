"""A job under faults: real torchrun agents, and a seeded schedule of what befalls them.

Each agent stands for a host with memory of its own. Faults: SIGKILL of a worker, SIGKILL of an
agent with all that its host holds, SIGKILL of an agent alone, SIGTERM of a worker, a host that
joins, a host that leaves in order, a checkpoint that is truncated or changed in one bit just
before all hosts die, and a full disk. Afterwards the diaries of all replicas are read:

- samples of each epoch, along the steps that count: repeated and missing, both 0;
- steps that all replicas had completed and that were made again: 0, or, where all hosts with a
  copy in memory died, no more than since the newest checkpoint that is whole;
- final parameters against those of an undisturbed run of one process, relative, in float64;
- seconds from each fault to the next completed step.

    python benchmarks/chaos.py --check           # 100 faults, about half an hour
    python benchmarks/chaos.py --quick --check   # 8 faults, one of each kind; warm workers

With `--live`, live jobs are disturbed instead: see `chaos_live`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_live
import torch
from chaos_job import CHECKPOINT_EVERY
from harness import finish, parse_args
from torch.distributed import TCPStore

from resilin.training.state.checkpoint import Checkpoints, CorruptCheckpoint

HERE = Path(__file__).parent
RECOVERY_LIMIT = 90.0
"""Seconds from a fault to the next completed step, at most. What waits longer counts as hung."""
NUM_SAMPLES = 1797
"""Samples in an epoch: the digits that scikit-learn ships."""
WORKERS = (2, 1, 1)
"""Workers of each host."""
KINDS = (
    "kill worker",
    "kill host",
    "kill agent",
    "terminate worker",
    "join",
    "leave",
    "corrupt",
    "disk full",
)


class Hung(Exception):
    """No step was completed for too long."""


@dataclass
class Host:
    """One agent, and the memory of the host that it stands for."""

    number: int
    memory: Path
    process: subprocess.Popen[bytes]

    def end(self, *, memory: bool) -> None:
        """Kills agent and workers; with its memory if the host is lost."""
        workers = children(self.process.pid)
        self.process.kill()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if memory:
            shutil.rmtree(self.memory, ignore_errors=True)


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, timeout=10)
    return [int(line) for line in found.stdout.split()]


@dataclass
class Cluster:
    """The hosts of one job, and what is known from its diaries."""

    folder: Path
    store: TCPStore
    warm: bool = False
    hosts: list[Host] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def start_host(self, number: int | None = None) -> Host:
        """Starts an agent: on this host, which may have a memory already, or on any free one."""
        if number is None:
            number = min(set(range(len(WORKERS))) - {host.number for host in self.hosts})
        memory = Path("/dev/shm") / f"resilin-chaos-{os.getpid()}-{number}"
        command = [sys.executable, "-m", "resilin.cli", "run", *["--warm"] * self.warm]
        command += ["--nnodes", f"1:{len(WORKERS)}", "--nproc", str(WORKERS[number])]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-id", "chaos"]
        command += ["--memory-dir", str(memory), str(HERE / "chaos_job.py"), str(self.folder)]
        command += ["--pause", "0.02"]
        with (self.folder / f"host-{number}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RESILIN_RUN_DIR": str(self.folder / "events"),
                },
            )
        host = Host(number, memory, process)
        self.hosts.append(host)
        return host

    def remove(self, host: Host) -> None:
        self.hosts.remove(host)

    def read(self) -> None:
        """Takes in what the diaries say since the last time."""
        for path in (self.folder / "diaries").iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]

    def wait_for_step(self, since: float, limit: float = RECOVERY_LIMIT) -> float:
        """When the first step was completed in a generation that began after `since`."""
        deadline = time.time() + limit
        while time.time() < deadline:
            self.read()
            started = {
                line["run"]
                for line in self.lines
                if line["event"] == "start" and line["time"] > since
            }
            done = [
                line["time"]
                for line in self.lines
                if line["event"] == "done" and line["run"] in started
            ]
            if done:
                return min(done)
            self.reap()
            if not self.hosts:
                raise Hung("all agents have ended")
            time.sleep(0.05)
        raise Hung(f"no step within {limit:g} s")

    def reap(self) -> None:
        """Forgets agents that have ended by themselves."""
        for host in [host for host in self.hosts if host.process.poll() is not None]:
            self.remove(host)

    def end(self) -> None:
        for host in self.hosts:
            host.end(memory=True)
        for line in self.lines:
            # Workers whose agent was killed alone end by themselves; none may be left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if line["event"] == "start" and is_job(line["pid"]):
                    os.kill(line["pid"], signal.SIGKILL)


def is_job(pid: int) -> bool:
    try:
        return b"chaos_job" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# The faults ----------------------------------------------------------------------------------


def newest_whole(folder: Path) -> int:
    """Step of the newest checkpoint that can be loaded."""
    checkpoints = Checkpoints(folder / "checkpoints")
    for commit in checkpoints.commits():
        with contextlib.suppress(CorruptCheckpoint):
            checkpoints.load(commit)
            return commit.version.step
    return 0


def damage(folder: Path, dice: random.Random) -> str | None:
    """Truncates a file of the newest checkpoint, or changes one bit of it."""
    commits = Checkpoints(folder / "checkpoints").commits()
    if len(commits) < 2:
        return None
    files = [path for path in Path(commits[0].path).iterdir() if path.is_file()]
    path = dice.choice(sorted(files))
    content = bytearray(path.read_bytes())
    if dice.random() < 0.5:
        path.write_bytes(bytes(content[: len(content) // 2]))
        return f"truncated {path.name}"
    bit = dice.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))
    return f"flipped bit {bit} of {path.name}"


class Faults:
    """Faults of a cluster. Each returns the time of the fault, or None if nothing has to
    start again; what it says about memory decides what may be lost."""

    def __init__(self, cluster: Cluster, dice: random.Random, disk: Path | None) -> None:
        self.cluster, self.dice, self.disk = cluster, dice, disk
        self.all_memory_lost = False
        self.note = ""

    def possible(self) -> list[str]:
        num = len(self.cluster.hosts)
        kinds = ["kill worker", "kill host", "kill agent", "terminate worker", "corrupt"]
        kinds += ["join"] if num < len(WORKERS) else []
        kinds += ["leave"] if num > 1 else []
        kinds += ["disk full"] if self.disk is not None else []
        return kinds

    def _workers(self) -> list[int]:
        return [pid for host in self.cluster.hosts for pid in children(host.process.pid)]

    def _revive(self) -> None:
        if not self.cluster.hosts:
            self.cluster.start_host()

    def kill_worker(self) -> float | None:
        os.kill(self.dice.choice(self._workers()), signal.SIGKILL)
        return time.time()

    def terminate_worker(self) -> float | None:
        os.kill(self.dice.choice(self._workers()), signal.SIGTERM)
        return time.time()

    def kill_host(self) -> float | None:
        host = self.dice.choice(self.cluster.hosts)
        self.all_memory_lost = len(self.cluster.hosts) == 1
        when = time.time()
        host.end(memory=True)
        self.cluster.remove(host)
        self._revive()
        return when

    def kill_agent(self) -> float | None:
        """Its workers are orphans then; the memory of the host stays, and a new agent finds it."""
        host = self.dice.choice(self.cluster.hosts)
        when = time.time()
        host.process.kill()
        host.process.wait()
        self.cluster.remove(host)
        self.cluster.start_host(host.number)
        return when

    def join(self) -> float | None:
        self.cluster.start_host()
        return time.time()

    def leave(self) -> float | None:
        host = self.dice.choice(self.cluster.hosts)
        when = time.time()
        host.process.terminate()
        host.process.wait(timeout=60)
        self.cluster.remove(host)
        shutil.rmtree(host.memory, ignore_errors=True)
        return when

    def corrupt(self) -> float | None:
        for host in self.cluster.hosts:
            host.process.send_signal(signal.SIGSTOP)
        for pid in self._workers():
            os.kill(pid, signal.SIGSTOP)
        self.note = damage(self.cluster.folder, self.dice) or "nothing to damage yet"
        when = time.time()
        for host in list(self.cluster.hosts):
            host.end(memory=True)
            self.cluster.remove(host)
        self.all_memory_lost = True
        self.cluster.start_host()
        return when

    def disk_full(self) -> float | None:
        """For as long as two checkpoints take; both fail, and training continues."""
        assert self.disk is not None
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        before = max((line["step"] for line in self.cluster.lines), default=0)
        deadline = time.time() + RECOVERY_LIMIT
        while time.time() < deadline:
            self.cluster.read()
            steps = [line["step"] for line in self.cluster.lines if line["event"] == "done"]
            if max(steps, default=0) > before + 2 * CHECKPOINT_EVERY:
                break
            time.sleep(0.1)
        else:
            raise Hung("training did not continue with a full disk")
        filler.unlink()
        return None


# What it has come to ------------------------------------------------------------------------


@dataclass
class Run:
    """One generation, as its replicas have written it down."""

    time: float
    step: int
    """The step that it resumed from."""
    replicas: int
    done: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Replicas that have completed each step."""
    parts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The samples of each step, of all replicas."""
    epochs: dict[int, int] = field(default_factory=dict)

    @property
    def completed(self) -> int:
        """The last step that all replicas have completed."""
        return max((s for s, who in self.done.items() if len(who) == self.replicas), default=0)


def runs_of(lines: list[dict[str, Any]]) -> list[Run]:
    runs: dict[str, Run] = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        name, step = line["run"], line["step"]
        if line["event"] == "start":
            runs.setdefault(name, Run(line["time"], step, line["replicas"]))
        elif line["event"] == "done":
            runs[name].done[step].add(line["replica"])
        elif line["event"] == "part":
            runs[name].parts[step] += line["samples"]
            runs[name].epochs[step] = line["epoch"]
    return list(runs.values())


def samples_of(runs: list[Run]) -> dict[int, Counter[int]]:
    """Number of times each sample was used in each epoch, along the steps that count."""
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for step in range(1, max(step for run in runs for step in run.parts) + 1):
        # A step counts in the last generation that made it: a later one began after it.
        run = [run for run in runs if run.step < step][-1]
        used[run.epochs[step]].update(run.parts[step])
    return used


def undisturbed(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    """The same job in one process that nobody touches."""
    (folder / "diaries").mkdir(parents=True)
    (folder / "last_epoch").write_text(str(epoch))
    command = [sys.executable, str(HERE / "chaos_job.py"), str(folder)]
    subprocess.run(command, check=True, timeout=1200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return load(folder)


def load(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "final.pt")["parameters"]
    return state


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of 2 MB for the checkpoints, where that is allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=10).returncode:
        print("disk full: left out, a small file system cannot be mounted here", file=sys.stderr)
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def schedule(
    cluster: Cluster, faults: Faults, num: int, dice: random.Random
) -> list[dict[str, Any]]:
    """Lets `num` faults happen, each after the job has recovered from the last one."""
    happened: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    cluster.wait_for_step(0.0)
    while len(happened) < num:
        time.sleep(dice.uniform(0.2, 2.5))
        # The kinds take turns in random order, so that even few faults have all of them.
        possible = faults.possible()
        rarest = min(counts[kind] for kind in possible)
        kind = dice.choice([kind for kind in possible if counts[kind] == rarest])
        counts[kind] += 1
        faults.all_memory_lost, faults.note = False, ""
        cluster.read()
        when = getattr(faults, kind.replace(" ", "_"))()
        whole = newest_whole(cluster.folder) if faults.all_memory_lost else None
        seconds = None if when is None else cluster.wait_for_step(when) - when
        told = f"{len(happened) + 1:3d} {kind}: {faults.note}"
        print(told, "" if seconds is None else f"{seconds:.1f} s", file=sys.stderr, flush=True)
        happened.append(
            {
                "kind": kind,
                "seconds": seconds,
                "all_memory_lost": faults.all_memory_lost,
                "whole": whole,
                "time": when,
            }
        )
    return happened


def main() -> None:
    args = parse_args(__doc__ or "", live="disturb live jobs")
    if args.live:
        chaos_live.main(quick=args.quick, check=args.check)
        return
    num_faults = len(KINDS) if args.quick else 100
    dice = random.Random(0)
    folder = Path(tempfile.mkdtemp(prefix="resilin-chaos-"))
    job = folder / "job"
    (job / "diaries").mkdir(parents=True)
    began = time.time()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cluster = Cluster(job, store, warm=args.quick)
    try:
        with small_disk(job / "checkpoints") as disk:
            for _ in range(2):
                cluster.start_host()
            faults = Faults(cluster, dice, disk)
            happened = schedule(cluster, faults, num_faults, dice)
            cluster.read()
            epoch = 2 + max(line.get("epoch", 0) for line in cluster.lines)
            (job / "last_epoch").write_text(str(epoch))
            for host in cluster.hosts:
                host.process.wait(timeout=600)
            cluster.read()
    except BaseException:
        for path in sorted(job.glob("host-*.log")):
            print(f"--- {path.name}", path.read_text(errors="replace")[-6000:], file=sys.stderr)
        raise
    finally:
        cluster.end()
    plain = undisturbed(folder / "undisturbed", epoch)
    ours = load(job)
    distance = max(float((ours[name] - plain[name]).norm() / plain[name].norm()) for name in plain)
    report(cluster, happened, distance, time.time() - began, check=args.check)
    shutil.rmtree(folder)


def report(
    cluster: Cluster,
    happened: list[dict[str, Any]],
    distance: float,
    seconds: float,
    *,
    check: bool,
) -> None:
    runs = runs_of(cluster.lines)
    used = samples_of(runs)
    # Runs that began after all copies in memory were gone, and how far behind the newest
    # checkpoint that was whole.
    behind: dict[int, int] = {}
    for fault in happened:
        if fault["all_memory_lost"]:
            index = next(i for i, run in enumerate(runs) if run.time > fault["time"])
            behind[index] = fault["whole"] - runs[index].step
    lost = [max(0, before.completed - run.step) for before, run in itertools.pairwise(runs)]
    lost_with_memory = sum(steps for i, steps in enumerate(lost) if i + 1 not in behind)
    lost_without = [steps for i, steps in enumerate(lost) if i + 1 in behind]
    times = [fault["seconds"] for fault in happened if fault["seconds"] is not None]
    figures = {
        "faults": len(happened),
        "kinds": dict(Counter(fault["kind"] for fault in happened)),
        "generations": len(runs),
        "steps": max(run.completed for run in runs),
        "epochs": len(used),
        "repeated": sum(n - 1 for counts in used.values() for n in counts.values()),
        "missing": sum(NUM_SAMPLES - len(counts) for counts in used.values()),
        "lost_steps": lost_with_memory,
        "all_memory_lost": len(behind),
        "lost_steps_without_memory": max(lost_without, default=0),
        "steps_behind_newest_checkpoint": max(behind.values(), default=0),
        "relative_distance": distance,
        "recovery_seconds": round(statistics.median(times), 2),
        "recovery_seconds_max": round(max(times), 2),
        "seconds": round(seconds),
    }
    limits = {
        "repeated": 0,
        "missing": 0,
        "lost_steps": 0,
        "steps_behind_newest_checkpoint": 0,
        "relative_distance": 1e-8,
        "recovery_seconds_max": RECOVERY_LIMIT,
    }
    finish("chaos", figures, limits, check=check)


if __name__ == "__main__":
    main()
