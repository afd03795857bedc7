"""The jobs that `gpu_check.py` starts: one section each, on all devices of this machine.

    torchrun --nproc-per-node 2 benchmarks/gpu_check_jobs.py SECTION FOLDER

Replica 0 writes the figures of the section to FOLDER/SECTION.json. Whatever a section finds wrong
is raised, on any replica. Without CUDA everything runs on the CPU, with gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import resilin
from resilin.core.stream import SampleStream

Figures = dict[str, Any]

REFERENCE = 12
SIZES = (24, 7, 12, 5, 31, 3)
"""Global batch sizes of the exact runs; shares differ, and most come in several micro-batches."""
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative error against one process; rounding alone is left."""
WARM_UP = 24
"""Steps before syncs are counted: the contents of gradients are checked in the first ones."""
KILL_EPOCHS, KILL_SAMPLES, KILL_BATCH = 4, 96, 8


def here() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def fresh_job() -> torch.device:
    """A job that keeps no state, which the next one in this process would resume."""
    resilin.reset_job()
    resilin.checkpoint_to(None, every=None, memory_every=None)
    return here()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def network(dtype: torch.dtype, width: int = 16) -> nn.Module:
    torch.manual_seed(2)
    layers = (nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(width, 3)).to(dtype)


def samples(num: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (num,), generator=generator)
    return TensorDataset(x, y, torch.randint(0, 5, (num,), generator=generator))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def mean_loss(output: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


def token_loss(output: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
    return (F.cross_entropy(output, y, reduction="none") * tokens).sum() / tokens.sum()


def difference(net: nn.Module, other: nn.Module) -> float:
    """Relative error of the parameters; raises if they are not numbers."""
    a, b = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in (net, other))
    error = float((a - b).norm() / b.norm())
    if error != error:
        raise AssertionError("parameters are not numbers")
    return error


# Exactness ---------------------------------------------------------------------------------------


def one_process(dtype: torch.dtype, loss: Callable[..., Tensor], steps: int) -> nn.Module:
    """The same training on whole batches, without resilin."""
    device, data = here(), samples(203, dtype)
    net = network(dtype).to(device)
    optimizer, stream, cursor = sgd(net), SampleStream(len(data), seed=5), 0
    for step in range(steps):
        span = stream.batch(cursor, SIZES[step % len(SIZES)])
        batch = data[torch.from_numpy(stream.indices(span))]
        x, y, tokens = (tensor.to(device) for tensor in batch)
        optimizer.zero_grad()
        loss(net(x), y, tokens).backward()
        optimizer.step()
        cursor = span.stop
    return net


def elastic(dtype: torch.dtype, loss: Callable[..., Tensor], steps: int) -> tuple[nn.Module, int]:
    """The network after these steps, and the most micro-batches that a step had."""
    device = fresh_job()
    net = network(dtype).to(device)
    optimizer = sgd(net)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", stats_every=2)
    weight = None if loss is mean_loss else lambda batch: batch[2].sum()
    loader = resilin.AdaptiveDataLoader(
        samples(203, dtype), REFERENCE, shuffle=True, seed=5, max_local_bsz=5, batch_weight=weight
    )
    loader.set_batch_size(lambda clock: SIZES[clock.steps % len(SIZES)])
    most = pieces = 0
    while model.clock.steps < steps:
        for batch in loader:
            x, y, tokens = (tensor.to(device) for tensor in batch)
            before, pieces = model.clock.steps, pieces + 1
            loss(model(x), y, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > before:
                most, pieces = max(most, pieces), 0
            if model.clock.steps >= steps:
                break
    return net, most


def exactness(quick: bool, folder: Path) -> Figures:
    steps, figures = (18 if quick else 60), {}
    cases = [
        (torch.float64, "mean", mean_loss),
        (torch.float32, "mean", mean_loss),
        (torch.float64, "tokens", token_loss),
    ]
    for dtype, name, loss in cases:
        trained, most = elastic(dtype, loss, steps)
        error, kind = difference(trained, one_process(dtype, loss, steps)), str(dtype)[6:]
        figures[f"error_{name}_{kind}"] = error
        if not error < LIMITS[dtype]:
            raise AssertionError(f"{name}, {kind}: error {error:g}, limit {LIMITS[dtype]:g}")
        if most < 2:
            raise AssertionError("no step was accumulated")
    return {**figures, "steps": steps, "most_micro_batches": most}


# Time --------------------------------------------------------------------------------------------


def large(quick: bool) -> tuple[nn.Module, int]:
    width, depth = (256, 4) if quick and not torch.cuda.is_available() else (2048, 8)
    torch.manual_seed(0)
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 10)).to(here()), width


def batches(width: int, num: int, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        (
            torch.randn(size, width, generator=generator).to(here()),
            torch.randint(0, 10, (size,), generator=generator).to(here()),
        )
        for _ in range(num)
    ]


def plain_ddp(quick: bool) -> Callable[[Tensor, Tensor], None]:
    net, _ = large(quick)
    model, optimizer = DistributedDataParallel(net, gradient_as_bucket_view=True), sgd(net)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(quick: bool, stats: Any) -> tuple[Callable[[Tensor, Tensor], None], Any]:
    fresh_job()
    net, _ = large(quick)
    optimizer = sgd(net)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, batch_size=64 * dist.get_world_size(), stats_every=stats
    )

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def milliseconds(
    step: Callable[[Tensor, Tensor], None], data: list[tuple[Tensor, Tensor]]
) -> float:
    """Per step, of one turn."""
    wait_for(here())
    began = time.perf_counter()
    for x, y in data:
        step(x, y)
    wait_for(here())
    return (time.perf_counter() - began) * 1e3 / len(data)


def overhead(quick: bool, folder: Path) -> Figures:
    """Time of a step over plain DDP, in turns; figures only, a verdict takes a quiet machine."""
    num_turns, data = (6 if quick else 30), batches(large(quick)[1], 10 if quick else 40)
    parameters = sum(p.numel() for p in large(quick)[0].parameters())
    figures: Figures = {"parameters": parameters, "turns": num_turns}
    plain = plain_ddp(quick)
    for name, stats in {"default": "auto", "every_step": 1, "never": 10**6}.items():
        own, _ = ours(quick, stats)
        milliseconds(plain, data), milliseconds(own, data)
        turns = [(milliseconds(plain, data), milliseconds(own, data)) for _ in range(num_turns)]
        figures[f"ratio_{name}"] = statistics.median(b / a for a, b in turns)
        figures[f"milliseconds_{name}"] = statistics.median(b for _, b in turns)
        figures["milliseconds_ddp"] = statistics.median(a for a, _ in turns)
    return figures


# Waiting for the device --------------------------------------------------------------------------


def waits_of(step: Callable[[], None]) -> list[str]:
    """Where the host waited for the device within this call."""
    # "error" would raise at the first one; "warn" finds the same ones, and says all of them.
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    return [f"{Path(w.filename).name}:{w.lineno}" for w in found]


def syncs(quick: bool, folder: Path) -> Figures:
    """Counts how often a step waits for the device: it may not, measured or not."""
    if not waits_of(lambda: torch.ones(1, device=here()).item()):
        raise AssertionError("torch reports no wait for .item(): nothing can be counted")
    data = batches(large(quick)[1], 8)
    step, model = ours(quick, 2)
    for index in range(WARM_UP):
        step(*data[index % len(data)])
    found: dict[str, list[str]] = {"measured": [], "unmeasured": []}
    counts = dict.fromkeys(found, 0)
    for index in range(20):
        kind = "measured" if model.measures_next() else "unmeasured"
        x, y = data[index % len(data)]
        found[kind] += waits_of(lambda x=x, y=y: step(x, y))  # type: ignore[misc]
        counts[kind] += 1
    if not all(counts.values()):
        raise AssertionError(f"steps of each kind must be seen, and were {counts}")
    if any(found.values()):
        places = {kind: sorted(set(where)) for kind, where in found.items()}
        raise AssertionError(f"steps wait for the device, limit 0: {places} in {counts} steps")
    return {"waits": 0, "steps": counts}


# Groups ------------------------------------------------------------------------------------------


def collectives(quick: bool, folder: Path) -> Figures:
    """Sums over all replicas on the device and on the host, and how long they take."""
    device, engine = here(), resilin.current_job().engine
    world = engine.membership.num_replicas
    gradients, host = engine.gradient_group(), engine.host_group()
    if gradients is None or host is None:
        raise AssertionError(f"there are no groups for {world} replicas")
    figures: Figures = {
        "backend": dist.get_backend_config(gradients),
        "host_backend": dist.get_backend_config(host),
        "replicas": world,
    }
    if device.type == "cuda" and "cuda:nccl" not in figures["backend"]:
        raise AssertionError(f"gradients are reduced by {figures['backend']}, not by NCCL")
    cases = {"device_1mb": (device, gradients, 2**18), "host_8": (torch.device("cpu"), host, 8)}
    cases["device_64mb"] = (device, gradients, 2**24)
    for name, (place, group, size) in cases.items():
        tensor = torch.full((size,), 1.0 + engine.membership.replica, device=place)
        dist.all_reduce(tensor, group=group)
        expected = world * (world + 1) / 2
        if not bool((tensor == expected).all()):
            raise AssertionError(f"{name}: the sum is {tensor[0].item()}, not {expected}")
        times = []
        for _ in range(5 if quick else 30):
            wait_for(device)
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            wait_for(device)
            times.append((time.perf_counter() - began) * 1e3)
        figures[f"milliseconds_{name}"] = statistics.median(times)
    return figures


# Memory copies -----------------------------------------------------------------------------------


def copies(quick: bool, folder: Path) -> Figures:
    """How long a step stands still for a memory copy, beside a plain copy of the same bytes."""
    device = here()
    net, width = large(quick)
    optimizer = sgd(net)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(512, width, generator=generator))
    loader = resilin.AdaptiveDataLoader(data, 64, shuffle=True)
    resilin.checkpoint_to(None, memory_every=2)
    times: dict[bool, list[float]] = {True: [], False: []}
    num_steps, began = (24 if quick else 80), None
    for _ in resilin.remaining_epochs_until(num_steps // 8):
        for (x,) in loader:
            # From one micro-batch to the next: a copy is made between two steps.
            wait_for(device)
            now, steps = time.perf_counter(), model.clock.steps
            if began is not None and steps > 8:
                times[steps % 2 == 0].append((now - began) * 1e3)
            began = now
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if not any(path.is_file() for path in Path(os.environ["RESILIN_MEMORY_DIR"]).rglob("*")):
        raise AssertionError("no copy is in memory: nothing was measured")
    state = [*net.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    plain = []
    for _ in range(10):
        wait_for(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait_for(device)
        plain.append((time.perf_counter() - start) * 1e3)
    usual, kept = statistics.median(times[False]), statistics.median(times[True])
    return {
        "bytes": num_bytes,
        "milliseconds_step": usual,
        "milliseconds_step_with_copy": kept,
        "milliseconds_standing_still": kept - usual,
        "milliseconds_memcpy": statistics.median(plain),
    }


# A kill ------------------------------------------------------------------------------------------


def trained_to_the_end() -> nn.Module:
    """What the job that is killed has to arrive at, in one process and without resilin."""
    data, net = samples(KILL_SAMPLES, torch.float64), network(torch.float64).to(here())
    optimizer, stream = sgd(net), SampleStream(KILL_SAMPLES, seed=5)
    for start in range(0, KILL_EPOCHS * KILL_SAMPLES, KILL_BATCH):
        indices = stream.indices(range(start, start + KILL_BATCH))
        x, y, _ = (tensor.to(here()) for tensor in data[torch.from_numpy(indices)])
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def steps_to_write_down(folder: Path) -> Callable[[int], None]:
    """Notes of this process: one line for each step, which survives it."""
    note = os.open(folder / f"{os.getpid()}.steps", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    return lambda step: (os.write(note, f"{step} {time.time()}\n".encode()), None)[1]


def kill(quick: bool, folder: Path) -> Figures:
    """A job that the driver kills a worker of."""
    device, net = here(), network(torch.float64).to(here())
    optimizer = sgd(net)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    data = samples(KILL_SAMPLES, torch.float64)
    loader = resilin.AdaptiveDataLoader(data, KILL_BATCH, shuffle=True, seed=5)
    resilin.checkpoint_to(folder / "checkpoints", every=None, memory_every=1)
    done = steps_to_write_down(folder)
    for _ in resilin.remaining_epochs_until(KILL_EPOCHS):
        for batch in loader:
            x, y, _ = (tensor.to(device) for tensor in batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done(model.clock.steps)
            time.sleep(0.05)
    error = difference(net, trained_to_the_end())
    if not error < LIMITS[torch.float64]:
        raise AssertionError(f"error {error:g} after the kill, limit {LIMITS[torch.float64]:g}")
    return {"error": error, "steps": model.clock.steps}


SECTIONS: dict[str, Callable[[bool, Path], Figures]] = {
    "exactness": exactness,
    "overhead": overhead,
    "syncs": syncs,
    "collectives": collectives,
    "copies": copies,
    "kill": kill,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    resilin.init_process_group()
    try:
        figures = SECTIONS[args.section](args.quick, args.folder)
    except Exception as error:
        # The launcher would say that a process has failed, and not why.
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        (args.folder / f"{os.getpid()}.error").write_text(text)
        raise
    if resilin.current_job().engine.membership.replica == 0:
        (args.folder / f"{args.section}.json").write_text(json.dumps(figures))
    resilin.reset_job()
    if dist.is_initialized():
        # Nobody leaves before all are done. Then at once: torch now and then aborts a process whose
        # groups end with it ("terminate called without an active exception").
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
