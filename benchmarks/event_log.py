"""The event log of a long run: bytes on disk, and what writing and reading cost.

    python benchmarks/event_log.py [--quick] [--check]

Writes 10^7 step events into one log and prints the bytes that are left of them, the microseconds
that a write took with its share of sealing and merging, and those that loading takes per line. The
quick form finds the bytes from 10^5 events in segments of a hundredth of the size, which are sealed
and merged as often, and the times from a shorter log of the true segment size. Times are of the
processor, so that a disk or a neighbour does not count.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import finish, parse_args

from resilin.core.events import StartEvent, StepEvent, from_json, to_json
from resilin.telemetry.log import EventLog
from resilin.telemetry.run import Run
from resilin.telemetry.segments import SEGMENT_BYTES

NUM_STEPS = 10**7
LIMITS = {"megabytes": 100.0}


def some_steps(count: int) -> list[StepEvent]:
    """Steps as a job of eight replicas tells them, with numbers of full length."""
    rng = random.Random(0)
    return [
        StepEvent(
            time=1.7e9 + rng.random(),
            step=0,
            generation=12,
            epoch=40,
            replicas=8,
            batch_size=1024,
            local_bsz=64,
            accumulation_steps=2,
            samples=10**10,
            progress=1e7 * rng.random(),
            scale=8.0,
            gain=1 + 7 * rng.random(),
            lr_factor=1 + 7 * rng.random(),
            lr=0.1 * rng.random(),
            sqr_norm=rng.random(),
            trace=1000 * rng.random(),
            seconds=rng.random(),
            loss=rng.random(),
            metrics={"accuracy": rng.random()},
        )
        for _ in range(count)
    ]


def microseconds(function: Callable[[StepEvent], object], steps: list[StepEvent]) -> float:
    times = []
    for _ in range(9):
        start = time.process_time()
        for step in steps:
            function(step)
        times.append((time.process_time() - start) / len(steps))
    return 1e6 * statistics.median(times)


def long_run(num_steps: int, segment_bytes: int, directory: str) -> dict[str, float]:
    """Writes a log and loads it."""
    log = EventLog(directory, "replica-0", segment_bytes=segment_bytes)
    log.write(
        StartEvent(time=1.7e9, step=0, reference=128, replicas=8, hosts=1, rule="", optimizer="")
    )
    steps = some_steps(1000)
    writing = 0.0
    for first in range(0, num_steps, len(steps)):
        batch = [
            dataclasses.replace(step, time=1.7e9 + first + i, step=first + i)
            for i, step in enumerate(steps)
        ]
        before = time.process_time()
        for step in batch:
            log.write(step)
        writing += time.process_time() - before
    log.close()
    before = time.process_time()
    run = Run.load(directory)
    loading = time.process_time() - before
    assert run.steps.step[-1] == num_steps - 1
    return {
        "bytes": sum(path.stat().st_size for path in Path(directory).iterdir()),
        "lines": len(run.steps),
        "write_microseconds": 1e6 * writing / num_steps,
        "load_microseconds_per_line": 1e6 * loading / len(run.steps),
    }


def main() -> None:
    args = parse_args(__doc__)
    # Merging waits for the disk, a few times in an hour of training; here, all day.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as small, TemporaryDirectory(dir=memory) as large:
        if args.quick:
            part = 100
            sizes = long_run(NUM_STEPS // part, SEGMENT_BYTES // part, small)
            times = long_run(50_000, SEGMENT_BYTES, large)
        else:
            part = 1
            sizes = times = long_run(NUM_STEPS, SEGMENT_BYTES, large)
    steps = some_steps(1000)
    lines = {id(step): to_json(step) for step in steps}
    figures = {
        "megabytes": sizes["bytes"] * part / 1e6,
        "lines": sizes["lines"] * part,
        "bytes_per_event": statistics.fmean(map(len, lines.values())),
        "write_microseconds": times["write_microseconds"],
        "to_json_microseconds": microseconds(to_json, steps),
        "from_json_microseconds": microseconds(lambda step: from_json(lines[id(step)]), steps),
        "load_microseconds_per_line": times["load_microseconds_per_line"],
        # What part of it is the standard library's, on this machine and today.
        "json_loads_microseconds": microseconds(lambda step: json.loads(lines[id(step)]), steps),
    }
    finish("event_log", figures, LIMITS, check=args.check)


if __name__ == "__main__":
    main()
