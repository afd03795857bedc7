"""Cost of a memory copy for a training loop: the time for which a step stands still.

    python benchmarks/memory_copy.py [--quick] [--check]

One process keeps the states of models of 4 and of 25 million parameters, with momentum SGD and with
Adam, as `resilin run` does it between two steps. Each copy is taken in turns with a bare
`torch.Tensor.copy_` of as many bytes. Prints both times with their quartiles, the time that the
thread takes to write the files meanwhile, and what the first copy costs, which allocates memory.
The limit is on the ratio of the medians of wall time, for the worst of the four; CPU time of the
thread that trains is printed beside it, since wall time also counts who else uses the machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import finish, parse_args
from torch import nn

import resilin
from resilin.engine.base import Engine
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.memory_schedule import MemorySchedule
from resilin.training.state.registry import Registry
from resilin.training.state.snapshot import Version

LIMIT = 1.2
SIZES = {"4M": (512, 16), "25M": (1024, 24)}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def trained(width: int, layers: int, optimizer_of: Any) -> Registry:
    """What is registered of a job that has made some steps."""
    resilin.reset_job()
    blocks = [(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(layers)]
    net = nn.Sequential(*(part for block in blocks for part in block))
    optimizer = optimizer_of(net.parameters())
    model = resilin.AdaptiveDataParallel(net, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(6, width))
    for (x,) in resilin.AdaptiveDataLoader(data, batch_size=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return resilin.current_job().registry


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and CPU time of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    function()
    return time.perf_counter() - wall, time.thread_time() - cpu


def quartiles(times: list[float]) -> list[float]:
    return [1e3 * each for each in statistics.quantiles(times, n=4)[::2]]


def measured(registry: Registry, repeats: int) -> dict[str, Any]:
    """Times of copies, in turns with bare ones."""
    num_bytes = registry.take(Version(0, 0)).num_bytes
    source = torch.zeros(num_bytes, dtype=torch.uint8).random_(0, 255)
    target = torch.zeros_like(source)
    stands, bare, written = [], [], []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        schedule = MemorySchedule(MemoryCopies(Path(directory) / "job"), 1, Engine(), registry)
        for step in range(repeats + 3):
            bare.append(timed(lambda: target.copy_(source)))
            version = Version(0, step)
            stands.append(timed(lambda version=version: schedule.keep(version)))
            # The rest of the step, which is longer than the writing.
            written.append(timed(schedule.wait))
        schedule.close()
    figures: dict[str, Any] = {"megabytes": num_bytes / 1e6, "first_ms": 1e3 * stands[0][0]}
    for name, times in [("stands", stands), ("copy", bare), ("written", written)]:
        for kind, each in zip(("wall", "cpu"), zip(*times[3:], strict=True), strict=True):
            figures[f"{name}_{kind}_ms"] = 1e3 * statistics.median(each)
            figures[f"{name}_{kind}_ms_quartiles"] = quartiles(list(each))
    for kind in ("wall", "cpu"):
        figures[f"{kind}_over_copy"] = figures[f"stands_{kind}_ms"] / figures[f"copy_{kind}_ms"]
    return figures


def main() -> None:
    args = parse_args(__doc__ or "")
    repeats = 15 if args.quick else 41
    figures: dict[str, Any] = {"copies": repeats}
    for size, (width, layers) in SIZES.items():
        for name, optimizer_of in OPTIMIZERS.items():
            registry = trained(width, layers, optimizer_of)
            figures[f"{size}_{name}"] = measured(registry, repeats)
            resilin.reset_job()
    ratios = [each["wall_over_copy"] for each in figures.values() if isinstance(each, dict)]
    figures["worst_over_copy"] = max(ratios)
    finish("memory_copy", figures, {"worst_over_copy": LIMIT}, check=args.check)


if __name__ == "__main__":
    main()
