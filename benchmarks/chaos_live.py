"""Live jobs under faults: processes, machines, networks and etcds that are lost while others train.

Several jobs under `resilin run --live`, one after another, each with a seeded schedule of faults:
2 to 5 workers of one launcher (`chaos_live_faults`), several launchers on machines of their own
with an etcd between them (`chaos_live_hosts`), and one job whose workers are killed until a process
that stays has seen 100 generations. Then their diaries and parameters are read, see
`chaos_live_job`:

- repeated and missing samples, counted by the model itself in committed steps: both 0;
- steps that were completed, and made again: 0; steps that two groups made beside each other: 0;
- steps after which two replicas differ in a bit: 0; members without the final parameters: 0;
- final parameters against those of an undisturbed run of one process, relative, in float64;
- seconds from a fault to the next step of all that stay, beyond the time to notice it;
- restarts of the whole job: 0; sums over an epoch that count something twice: 0. Those that lack
  something are reported, without a limit: who died in the body of a step has not added its part;
- growth of memory, threads, descriptors and ports of a process that stays, and of its launcher.

    python benchmarks/chaos.py --live --check           # at least 150 faults, needs root and etcd
    python benchmarks/chaos.py --live --quick --check   # 11 faults of one launcher's workers

`RESILIN_CHAOS_SEED` is the seed, 0 unless it is given. `RESILIN_CHAOS_JOBS` names the jobs to run,
as in `2,hosts`; all unless it is given.
"""

from __future__ import annotations

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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from chaos_live_faults import FIRST, KINDS, Faults
from chaos_live_figures import (
    both_commit,
    growth,
    growth_of_launcher,
    longest_wait,
    made_again,
    unequal,
)
from chaos_live_hosts import KINDS as HOST_KINDS
from chaos_live_hosts import HostsJob, disturb_hosts
from chaos_live_job import BATCH, NUM_SAMPLES
from chaos_live_jobs import HERE, START, Fault, Hung, Job, launch
from harness import finish

STUCK = 5.0
"""Seconds that a process may wait after a loss was noticed."""
GENERATIONS = 100
"""Generations that a process sees whose growth is measured."""

Disturb = Callable[[Job, random.Random, list[Fault]], None]
"""Has faults happen to a job; they are added to the list."""


# Jobs ----------------------------------------------------------------------------------------


def start(folder: Path, num_workers: int, *, warm: bool) -> Job:
    (folder / "diaries").mkdir(parents=True)
    return Job(folder, [launch(folder, "launcher", num_workers, *["--warm"] * warm)])


def tell(job: Job, fault: Fault, number: int) -> None:
    told = f"{job.folder.name}: {number:3d} {fault.kind}: {fault.seconds:.2f} s, "
    print(told, f"now {len(job.members())}", file=sys.stderr, flush=True)


def first_step(job: Job, num_workers: int) -> Fault:
    """Kills a worker in its first step, which nobody has completed."""
    job.until(lambda: built(job) == num_workers, "processes", START)
    (line, *_) = [line for line in job.lines if line["event"] == "built"]
    others = [m["pid"] for m in job.lines if m["event"] == "built" and m is not line]
    fault = Fault(FIRST, time.time(), 0.0, others)
    job.hit(line["pid"], signal.SIGKILL)
    return fault


def mixed(num_workers: int, wanted: Sequence[str], num: int, *, first: bool) -> Disturb:
    """Faults of the workers of one launcher: those that are wanted, and then the rarest so far."""

    def disturb(job: Job, dice: random.Random, happened: list[Fault]) -> None:
        if first:
            happened.append(first_step(job, num_workers))
        job.until(job.complete, "first step", START)
        faults, counts, left = Faults(job, dice, num_workers), Counter[str](), list(wanted)
        while len(happened) < num:
            time.sleep(dice.uniform(0.05, 0.8))
            job.read()
            possible = faults.possible()
            rarest = min(counts[kind] for kind in possible)
            kind = dice.choice([kind for kind in possible if counts[kind] == rarest])
            kind = next((each for each in left if each in possible), kind)
            if kind in left:
                left.remove(kind)
            counts[kind] += 1
            faults.await_strength(kind)
            fault = faults.happen(kind)
            job.await_recovery(fault)
            happened.append(fault)
            tell(job, fault, len(happened))

    return disturb


def long(job: Job, dice: random.Random, happened: list[Fault]) -> None:
    """Kills workers until one that is spared has seen many generations."""
    job.until(job.complete, "first step", START)
    faults = Faults(job, dice, 3)
    faults.spared = min(job.members())
    began = job.members()[faults.spared]["generation"]
    while job.members()[faults.spared]["generation"] < began + GENERATIONS + 4:
        # So that it writes down what it has in each generation.
        steps = 12 + max(line["step"] for line in job.members().values())
        job.until(
            lambda steps=steps: (
                len(job.members()) == 3  # type: ignore[misc]
                and max(line["step"] for line in job.members().values()) > steps
            ),
            "3 members for 12 steps",
            START,
        )
        fault = faults.happen("kill")
        job.await_recovery(fault)
        happened.append(fault)
        tell(job, fault, len(happened))


def disturb(job: Job, how: Disturb, seed: int, happened: list[Fault]) -> None:
    """Has faults happen to a job until its end."""
    try:
        how(job, random.Random(seed), happened)
        job.finish()
    except BaseException:
        print(f"--- {job.folder}", job.log[-20000:], file=sys.stderr)
        raise
    finally:
        job.end()


def restarts(job: Job) -> int:
    """Times that a launcher has started all processes again."""
    return job.log.count("starting it again")


def built(job: Job) -> int:
    return len({line["pid"] for line in job.lines if line["event"] == "built"})


def undisturbed(folder: Path, epoch: int) -> dict[str, torch.Tensor]:
    """The same job in one process that nobody touches."""
    (folder / "diaries").mkdir(parents=True)
    (folder / "last_epoch").write_text(str(epoch))
    command = [sys.executable, str(HERE / "chaos_live_job.py"), str(folder)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    state: dict[str, torch.Tensor] = torch.load(folder / "final-alone.pt")["parameters"]
    return state


# What it has come to ------------------------------------------------------------------------


def judge(job: Job, happened: list[Fault], folder: Path) -> dict[str, float]:
    """The figures of one job."""
    finals = [torch.load(path) for path in sorted(job.folder.glob("final-*.pt"))]
    ends = [line for line in job.lines if line["event"] == "end"]
    if not finals:
        raise Hung("no process has reached the end")
    epochs = 1 + int((job.folder / "last_epoch").read_text())
    plain = undisturbed(folder, epochs - 1)
    ours = finals[0]["parameters"]
    seen = (-BATCH * ours["seen"]).round()
    distance = max(float((ours[name] - plain[name]).norm() / plain[name].norm()) for name in plain)
    sums = [line["samples"] for line in job.lines if line["event"] == "evaluated"]
    wrong = Counter(total for total in sums if total != NUM_SAMPLES)
    print(f"sums other than {NUM_SAMPLES}: {dict(wrong)}", file=sys.stderr)
    # Processes that are cut off wait for as long as they are.
    ended = {pid: fault.time for fault in reversed(happened) for pid in fault.cut_off}
    heard = [line for line in job.lines if line["time"] < ended.get(line["pid"], 1e12)]
    return {
        "repeated": float((seen - epochs).clamp_min(0).sum()),
        "missing": float((epochs - seen).clamp_min(0).sum()),
        "lost_steps": made_again(job.lines),
        "both_commit": both_commit(job.lines),
        "unequal_steps": unequal(job.lines),
        "unequal_ends": len({line["checksum"] for line in ends}) - 1,
        "relative_distance": distance,
        "stuck_seconds": longest_wait(heard, [(fault.time, fault.notice) for fault in happened]),
        "sums_above": sum(total > NUM_SAMPLES for total in sums),
        "sums_below": sum(total < NUM_SAMPLES for total in sums),
        "launcher": max(abs(launcher.returncode) for launcher in job.launchers),
        "restarts": restarts(job) - sum(fault.kind == FIRST for fault in happened),
        **growth(job.lines),
        **growth_of_launcher(job.sizes),
    }


def plans(*, quick: bool, seed: int) -> dict[str, tuple[Callable[[Path], Job], Disturb]]:
    """The jobs by name: how each is started, and what happens to it."""
    if quick:
        every = mixed(4, KINDS, len(KINDS), first=False)
        return {"4": (lambda folder: start(folder, 4, warm=True), every)}
    found: dict[str, tuple[Callable[[Path], Job], Disturb]] = {}
    for num, count in {2: 10, 3: 20, 4: 20, 5: 20}.items():
        warm = num > 2  # else each fault takes as long as torch to be imported
        how = mixed(num, (), count, first=bool((num + seed) % 2))
        found[str(num)] = (lambda folder, num=num, warm=warm: start(folder, num, warm=warm), how)  # type: ignore[misc]
    for name, workers in {"hosts": (2, 1, 1), "hosts2": (1, 2)}.items():

        def disturbed(job: Job, dice: random.Random, happened: list[Fault]) -> None:
            assert isinstance(job, HostsJob)
            kinds = dice.sample(HOST_KINDS, len(HOST_KINDS))
            disturb_hosts(job, kinds, dice, happened, tell)

        found[name] = (lambda folder, workers=workers: HostsJob(folder, workers), disturbed)  # type: ignore[misc]
    found["long"] = (lambda folder: start(folder, 3, warm=True), long)
    return found


def main(*, quick: bool, check: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="resilin-chaos-live-"))
    began, seed = time.time(), int(os.environ.get("RESILIN_CHAOS_SEED", "0"))
    jobs = plans(quick=quick, seed=seed)
    chosen = os.environ.get("RESILIN_CHAOS_JOBS")
    results: list[dict[str, float]] = []
    happened: list[Fault] = []
    hung: list[str] = []
    for name in chosen.split(",") if chosen else jobs:
        open_job, how = jobs[name]
        job = open_job(folder / f"job-{name}")
        faults: list[Fault] = []
        try:
            disturb(job, how, seed, faults)
            results.append(judge(job, faults, folder / f"undisturbed-{name}"))
            print(json.dumps({"job": name, **results[-1]}), file=sys.stderr, flush=True)
        except (Hung, subprocess.TimeoutExpired) as error:
            print(f"hung: {error}", file=sys.stderr)
            hung.append(name)
        happened += faults
    if not results:
        raise SystemExit(f"every job hung: {', '.join(hung)}")
    figures: dict[str, Any] = {
        "faults": len(happened),
        "kinds": dict(Counter(fault.kind for fault in happened)),
        "recovery_seconds": round(statistics.median(fault.seconds for fault in happened), 2),
        "seconds": round(time.time() - began),
        "hung": len(hung),
        **{name: max(result[name] for result in results) for name in results[0]},
    }
    limits = dict.fromkeys(results[0], 0.0)
    limits |= {
        "hung": 0,
        "relative_distance": 1e-12,
        "stuck_seconds": STUCK,
        "memory_growth_mb": 32,
        "thread_growth": 2,
        "descriptor_growth": 4,
        "port_growth": 4,
        "launcher_memory_growth_mb": 16,
        "launcher_thread_growth": 2,
        "launcher_descriptor_growth": 4,
        "launcher_port_growth": 2,
    }
    # A process that dies between its step and `stats +=` has not added, and nobody knows what.
    del limits["sums_below"], limits["generations"]
    finish("chaos live", figures, limits, check=check)
    shutil.rmtree(folder)
