"""Cost of the elastic step: CPU time per optimizer step, over that of plain DDP.

    python benchmarks/overhead.py [--quick] [--check] [--peers | --telemetry]

Two models (an MLP of 4 x 1024, and 64 layers of 128) on 1 and 2 processes. One process accumulates
two micro-batches per step, two processes run one each. Plain DDP and resilin take turns in one run,
on the same batches; the ratio is taken within each turn, and its median is reported. `every` has
statistics in each step, `auto` as often as their default budget allows. With `--peers`, FairScale's
AdaScale takes turns too, if it is installed.

With `--telemetry` the two contenders are resilin without and with an event log, where the loss of
each step is recorded in both; the ratio is that of the second to the first.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from harness import finish
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import resilin
from resilin.core.stream import Ownership, SampleStream
from resilin.training import job as job_module
from resilin.training.data.cursor import Cursor
from resilin.training.data.iteration import Iteration
from resilin.training.lifecycle import begin_step
from resilin.training.records import MicroBatch

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())],
        nn.Linear(1024, 10),
    ),
    "deep": lambda: nn.Sequential(
        *[layer for _ in range(64) for layer in (nn.Linear(128, 128), nn.ReLU())],
        nn.Linear(128, 10),
    ),
}
WIDTH = {"mlp": 1024, "deep": 128}
LOCAL_BATCH = 64
LIMITS = {"every": 1.10, "auto": 1.03, "events": 1.01}

Batch = list[tuple[Tensor, Tensor]]
Step = Callable[[Batch], None]


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(name: str) -> Step:
    model, optimizer = make(name)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(batch: Batch) -> None:
        for index, (x, y) in enumerate(batch):
            ddp.require_backward_grad_sync = index == len(batch) - 1
            (F.cross_entropy(ddp(x), y) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(
    name: str, stats_every: Any, *, records: bool = False, events_dir: Path | None = None
) -> Step:
    # A job beside the others: reset_job() would take the gates of the other contenders off.
    job = job_module._current = job_module.Job()
    job.events.directory = events_dir
    model, optimizer = make(name)
    adaptive = resilin.AdaptiveDataParallel(
        model, optimizer, stats_every=stats_every, batch_size=LOCAL_BATCH
    )

    handed_out = Iteration(
        loader=None,
        name="loader",
        cursor=Cursor("loader", SampleStream(1)),
        training=True,
        moves=False,
        began=job.clock,
        membership=job.engine.membership,
        owners=Ownership(0, 1),
        position=0,
        data_end=0,
    )

    def step(batch: Batch) -> None:
        # What an AdaptiveDataLoader says; the cost of loading is not the subject here.
        total = LOCAL_BATCH * len(batch) * dist.get_world_size()
        job_module._current = job
        begin_step(job)
        for index, (x, y) in enumerate(batch):
            micro_batch = MicroBatch(
                number=job.iterations.next_number(),
                index=index,
                last=index == len(batch) - 1,
                weight=float(len(x)),
                total_weight=float(total),
                count=len(x),
                samples=total,
                scale=total / LOCAL_BATCH,
                sample_steps=total / LOCAL_BATCH,
            )
            job.iterations.hand_out(handed_out, micro_batch)
            loss = F.cross_entropy(adaptive(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if records:
                resilin.record(loss=loss)

    return step


def fairscale(name: str, num_micro_batches: int) -> Step:
    from fairscale.optim import AdaScale

    model, optimizer = make(name)
    ddp = DistributedDataParallel(model)
    adascale = AdaScale(optimizer, num_gradients_to_accumulate=num_micro_batches)

    def step(batch: Batch) -> None:
        for index, (x, y) in enumerate(batch):
            ddp.require_backward_grad_sync = index == len(batch) - 1
            (F.cross_entropy(ddp(x), y) / len(batch)).backward()
        adascale.step()
        adascale.zero_grad()

    return step


def measure(rank: int, world: int, port: int, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    num_micro_batches = 2 if world == 1 else 1
    turns, steps = (12, 5) if args.quick else (60, 10)
    if args.telemetry:
        turns, steps = (5 * turns, 2)  # a small difference needs many short turns
    events_dir = Path(args.folder) / f"{world}"
    for name in MODELS:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(LOCAL_BATCH, WIDTH[name], generator=generator)
        y = torch.randint(0, 10, (LOCAL_BATCH,), generator=generator)
        batch = [(x, y)] * num_micro_batches
        if args.telemetry:
            contenders = {
                "plain": ours(name, "auto", records=True),
                "events": ours(name, "auto", records=True, events_dir=events_dir / name),
            }
        else:
            contenders = {
                "plain": plain(name),
                "every": ours(name, 1),
                "auto": ours(name, "auto"),
            }
        if args.peers:
            contenders["fairscale"] = fairscale(name, num_micro_batches)
        for step in contenders.values():
            for _ in range(12):
                step(batch)
        ratios: dict[str, list[float]] = {key: [] for key in contenders if key != "plain"}
        for _ in range(turns):
            spent = {}
            for key, step in contenders.items():
                dist.barrier()
                start = time.process_time()
                for _ in range(steps):
                    step(batch)
                spent[key] = time.process_time() - start
            for key, values in ratios.items():
                values.append(spent[key] / spent["plain"])
        if rank == 0:
            for key, values in ratios.items():
                low, median, high = statistics.quantiles(values, n=4)
                prefix = f"{name}_{world}proc_{key}"
                results[prefix] = round(median, 3)
                results[f"{prefix}_quartiles"] = [round(low, 3), round(high, 3)]
            results[f"{name}_{world}proc_plain_ms"] = round(1e3 * spent["plain"] / steps, 2)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller form, about a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--peers", action="store_true", help="measure FairScale beside us")
    others.add_argument("--telemetry", action="store_true", help="measure what events cost")
    args = parser.parse_args()
    os.environ.pop("RESILIN_RUN_DIR", None)
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as args.folder:
        results = manager.dict()
        for world in (1, 2):
            mp.spawn(measure, (world, free_port(), args, results), nprocs=world)
        figures = dict(results)
    limits = {key: LIMITS[key.rsplit("_", 1)[-1]] for key in figures if key.endswith(tuple(LIMITS))}
    finish("telemetry" if args.telemetry else "overhead", figures, limits, check=args.check)


if __name__ == "__main__":
    main()
