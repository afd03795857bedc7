"""Cost of a report of a long run: seconds and peak memory of `resilin report`.

    python benchmarks/report.py [--quick] [--check]

A log of a million steps (quick: the same) is written as a job writes it, with a rescale, a fault
and a checkpoint now and then, and decisions every 20 steps. The report is then made by the command,
three times, each in a process of its own; the fastest counts, because the machine may do other
things, and the slowest is told too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import finish, parse_args

from resilin.core.events import (
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    FaultEvent,
    RescaleEvent,
    StartEvent,
    StepEvent,
)
from resilin.telemetry.log import EventLog

STEPS = 1_000_000
LIMITS = {"report_seconds": 10.0, "report_gb": 1.0}
REFERENCE = 128


def write(folder: Path) -> float:
    """Writes the log of a run; returns the seconds that it took."""
    began = time.perf_counter()
    log = EventLog(folder, "replica-0")
    log.write(
        StartEvent(
            time=0.0,
            step=0,
            reference=REFERENCE,
            replicas=4,
            hosts=1,
            rule="adascale",
            optimizer="SGD",
            total_steps=2.0 * STEPS,
        )
    )
    samples, progress, replicas, generation = 0, 0.0, 4, 0
    for step in range(1, STEPS + 1):
        now = 0.1 * step
        size = REFERENCE * (1 + step % 7)
        samples, progress = samples + size, progress + 1.5
        log.write(
            StepEvent(
                time=now,
                step=step,
                generation=generation,
                epoch=step // 10_000,
                replicas=replicas,
                batch_size=size,
                local_bsz=64,
                accumulation_steps=2,
                samples=samples,
                progress=progress,
                scale=size / REFERENCE,
                gain=1.5,
                lr_factor=1.5,
                lr=0.1,
                sqr_norm=1.0 / step,
                trace=120.0,
                seconds=0.1,
                loss=2.0 / step**0.3,
            )
        )
        if step % 20 == 0:
            log.write(
                DecisionEvent(
                    time=now,
                    step=step,
                    generation=generation,
                    batch_size_before=size,
                    batch_size=size if step % 200 else 2 * size,
                    reason="keeps its size: nothing promises more",
                )
            )
        if step % 10_000 == 0:
            log.write(
                EpochEvent(
                    time=now,
                    step=step,
                    generation=generation,
                    epoch=step // 10_000,
                    samples=samples,
                    progress=progress,
                )
            )
            log.write(
                CheckpointEvent(
                    time=now,
                    step=step,
                    generation=generation,
                    action="saved",
                    path=f"ckpt/{step}",
                    num_bytes=10**9,
                    seconds=4.0,
                )
            )
        if step % 50_000 == 0:
            generation += 1
            before, replicas = replicas, 2 + generation % 6
            log.write(
                FaultEvent(
                    time=now, step=step, kind="worker_lost", detail="rank 1 was killed", replica=1
                )
            )
            log.write(
                RescaleEvent(
                    time=now,
                    step=step,
                    generation=generation,
                    replicas_before=before,
                    replicas=replicas,
                    reason="resumed from memory",
                    seconds=9.0,
                )
            )
    log.close()
    return time.perf_counter() - began


def measure(command: list[str]) -> tuple[float, float, float]:
    """Runs a command; returns its seconds, those of the processor, and its peak memory in GB."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{command} failed with status {status}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    args = parse_args(__doc__ or "")
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        written = write(run)
        size = sum(path.stat().st_size for path in run.iterdir())
        page = Path(temporary) / "report.html"
        command = [sys.executable, "-m", "resilin.cli", "report", str(run), "--out", str(page)]
        seconds, cpu_seconds, peak = zip(*(measure(command) for _ in range(3)), strict=True)
        figures = {
            "steps": STEPS,
            "write_us_per_step": round(1e6 * written / STEPS, 2),
            "log_mb": round(size / 1e6, 1),
            "report_seconds": round(min(seconds), 2),
            "report_seconds_worst": round(max(seconds), 2),
            "report_cpu_seconds": round(min(cpu_seconds), 2),
            "report_gb": round(max(peak), 3),
            "page_mb": round(page.stat().st_size / 1e6, 2),
        }
    finish("report", figures, LIMITS, check=args.check)


if __name__ == "__main__":
    main()
