"""Growth of costs with replicas, samples, parameters and steps.

    python benchmarks/growth.py [--quick] [--check] > docs/figures/growth.json
    python docs/figures/growth.py

Prints the points of four curves, and how much the last one of each costs over the first one.

- `replicas`: a replica's share of the plan and of the data; and a whole optimizer step of a tiny
  model, on the last replica of so many. That replica is the only process: its group is torch's
  fake one and its reductions do nothing, so this is all that resilin does but wait for others.
- `samples`: 1000 indices anywhere in an epoch of so many samples, beside what
  `DistributedSampler` does at each start of an epoch.
- `parameters`: CPU time of a step over that of plain DDP, on two processes, as `overhead.py` has
  it, with copies in memory, an event log and an autoscaler; `every` has statistics in each step,
  `auto` as often as their budget allows.
- `steps`: bytes of the event log. A tenth of the steps (quick: a hundredth) is written into
  segments of a tenth of the size, which are sealed and merged as often; `event_log.py` writes all.

Times are of the processor, medians of single calls; the ratios are medians of turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contest import contest
from event_log import some_steps
from harness import finish, parse_args
from overhead_jobs import CONTENDERS, Model
from torch import Tensor, nn

import resilin
from resilin.core import BatchPlan, Ownership, SampleStream
from resilin.telemetry.log import EventLog
from resilin.telemetry.segments import SEGMENT_BYTES

LIMITS = {
    "share_growth": 3.0,
    "step_growth": 2.0,
    "ballot_numbers": 16,
    "index_growth": 4.0,
    "state_bytes": 500,
    "megabytes": 100.0,
}
"""Ratios of parameters have no limit here: `overhead.py --check` has, with a control."""
REPLICAS = (1, 2, 10, 100, 1000, 10_000, 100_000)
PER_REPLICA = 8
BATCH = 1000
CALLS = 100
ROWS = 10**8
PLAYERS = {"plain": "plain", "again": "control", "every": "every", "auto": "default"}
"""Contenders of the curve of parameters, by their names in it."""

Points = list[dict[str, float]]


def cpu_seconds(function: Any, repeats: int) -> float:
    """CPU time of the median call."""
    times = []
    for _ in range(repeats):
        start = time.process_time_ns()
        function()
        times.append(time.process_time_ns() - start)
    return statistics.median(times) / 1e9


# Replicas --------------------------------------------------------------------------------------


class Rows:
    """A dataset of any length that takes no time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(8), 0


class Done:
    """A reduction that is over."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def wait(self) -> None:
        """Nobody is waited for."""


def reduce_equals(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done:
    """The sum or extreme over replicas that all have the same numbers, without any of them."""
    del group, async_op
    return Done(tensor.mul_(dist.get_world_size()) if op == dist.ReduceOp.SUM else tensor)


def share_seconds(replicas: int, repeats: int) -> float:
    """The last replica's part of a step: the plan, and its positions."""
    total, cursors = PER_REPLICA * replicas + 1, itertools.count(step=PER_REPLICA * replicas)
    owners = Ownership(5, replicas)

    def share() -> None:
        cursor = 5 + next(cursors)
        owners.positions(replicas - 1, range(cursor, cursor + total))
        BatchPlan(total, replicas, max_local_bsz=4).micro_batches(owners.slot(replicas - 1, cursor))

    # One is too short for the clock of the processor.
    return cpu_seconds(lambda: [share() for _ in range(CALLS)], repeats) / CALLS


def step_seconds(replicas: int, num_steps: int) -> tuple[float, int]:
    """A whole step of the last replica, and the numbers in its usual ballot.

    Now and then a ballot has a comparison of all replicas in it, too.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    resilin.reset_job()
    if replicas > 1:
        dist.init_process_group("fake", rank=replicas - 1, world_size=replicas, store=FakeStore())
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, stats_every=1)
    batch_size = PER_REPLICA * replicas
    loader = resilin.AdaptiveDataLoader(Rows(), batch_size, shuffle=True, max_local_bsz=4)
    times, ballots, start = [], [0], time.process_time()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        if (sent := model._steps._ballot.sent) is not None:
            ballots.append(sent.numel())
        optimizer.step()
        optimizer.zero_grad()
        if model.clock.steps > len(times):
            times.append(time.process_time() - start)
            start = time.process_time()
            if len(times) == num_steps:
                break
    if replicas > 1:
        dist.destroy_process_group()
    return statistics.median(times), statistics.median_low(ballots)


def by_replicas(quick: bool) -> Points:
    torch.set_num_threads(1)
    reduces = dist.all_reduce
    vars(dist)["all_reduce"] = reduce_equals
    step_seconds(2, 50)  # warm
    points: Points = [{"replicas": replicas} for replicas in REPLICAS]
    # Rounds, of which the best counts: whatever else the machine does comes and goes.
    for _, point in itertools.product(range(2 if quick else 6), points):
        replicas = round(point["replicas"])
        share = 1e6 * share_seconds(replicas, 10 if quick else 30)
        step, ballot = step_seconds(replicas, 25 if quick else 60)
        point["share_us"] = min(share, point.get("share_us", share))
        point["step_ms"] = min(1e3 * step, point.get("step_ms", 1e3 * step))
        point["ballot_numbers"] = ballot
    vars(dist)["all_reduce"] = reduces
    resilin.reset_job()
    return points


# Samples ---------------------------------------------------------------------------------------


def by_samples(quick: bool) -> Points:
    rng, points = random.Random(0), []
    for power in range(3, 11):
        num = 10**power

        def any_batch(num: int = num) -> None:
            # A new seed each time: nothing may come from a cache.
            start = rng.randrange(num - BATCH + 1)
            stream = SampleStream(num, seed=rng.getrandbits(64))
            stream.indices(range(start, start + BATCH))

        state = SampleStream(num, seed=2**63, fingerprint="Rows[10000000000]").state(num - 1)
        point: dict[str, float] = {
            "samples": num,
            "indices_ms": 1e3 * cpu_seconds(any_batch, 50 if quick else 300),
            "state_bytes": len(str(state)),
        }
        if power <= (6 if quick else 7):
            point["randperm_ms"] = 1e3 * cpu_seconds(lambda n=num: torch.randperm(n).tolist(), 3)
        points.append(point)
    return points


# Parameters ------------------------------------------------------------------------------------


def by_parameters(quick: bool) -> Points:
    torch.set_num_threads(1)
    points: Points = []
    for width in (128, 512) if quick else (128, 256, 512, 1024, 2048):
        model = Model(width, depth=4)
        contenders = {key: partial(CONTENDERS[name], model) for key, name in PLAYERS.items()}
        outcome = contest(contenders, ("plain", "again"), 2, 5.0 if quick else 90.0)
        plain = outcome.milliseconds("plain")
        points.append({"parameters": model.num_parameters, "plain_ms": plain})
        for key in ("every", "auto"):
            ratio = outcome.ratio(key, "plain", "again").median
            points[-1] |= {key: ratio, f"{key}_extra_ms": (ratio - 1) * plain}
    return points


# Steps -----------------------------------------------------------------------------------------


def by_steps(quick: bool) -> Points:
    part = 100 if quick else 10
    events, points = some_steps(1000), []
    marks = [10**power // part for power in range(3, 8) if 10**power // part >= 1000]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as directory:
        log = EventLog(directory, "replica-0", segment_bytes=SEGMENT_BYTES // part)
        writing = 0.0
        for first in range(0, marks[-1], len(events)):
            batch = [
                dataclasses.replace(event, time=1.7e9 + first + i, step=first + i)
                for i, event in enumerate(events)
            ]
            start = time.process_time()
            for event in batch:
                log.write(event)
            writing += time.process_time() - start
            if (num := first + len(events)) in marks:
                size = sum(path.stat().st_size for path in Path(directory).iterdir())
                points.append(
                    {
                        "steps": num * part,
                        "megabytes": size * part / 1e6,
                        "write_us": 1e6 * writing / num,
                    }
                )
        log.close()
    return points


def main() -> None:
    args = parse_args(__doc__ or "")
    curves = {
        "parameters": by_parameters(args.quick),
        "replicas": by_replicas(args.quick),
        "samples": by_samples(args.quick),
        "steps": by_steps(args.quick),
    }
    replicas, samples = curves["replicas"], curves["samples"]
    # Up to 65536 samples the order is sorted once and kept; from there on it is computed.
    computed = [point for point in samples if point["samples"] > 65536]
    figures = {
        "share_growth": replicas[-1]["share_us"] / replicas[0]["share_us"],
        "step_growth": replicas[-1]["step_ms"] / replicas[1]["step_ms"],
        "ballot_numbers": max(point["ballot_numbers"] for point in replicas),
        "index_growth": computed[-1]["indices_ms"] / computed[0]["indices_ms"],
        "state_bytes": max(point["state_bytes"] for point in samples),
        "megabytes": curves["steps"][-1]["megabytes"],
    }
    rounded = {
        name: [{key: float(f"{value:.4g}") for key, value in point.items()} for point in points]
        for name, points in curves.items()
    }
    finish("growth", {**figures, **rounded}, LIMITS, check=args.check)


if __name__ == "__main__":
    main()
