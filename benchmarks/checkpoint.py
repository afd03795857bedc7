"""Cost of a checkpoint for a training loop: the time for which `begin_save` blocks it.

    python benchmarks/checkpoint.py [--quick] [--check]

One process saves about 300 MB of tensors, as large and as small as a model with Adam has them, to
a local directory. Prints the blocked time with warm buffers next to a memcpy of the same bytes and
to torch's own copy, which uses all cores, taken in turns; the time until a save was committed; and
the time to load it with all checks. The limit is on the ratio to the faster one of the two copies.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from typing import Any

import torch
from harness import finish, parse_args, seconds

from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.snapshot import Snapshot, Version


def tensors(num_bytes: int) -> dict[str, torch.Tensor]:
    """Layers of a weight and a bias, each with its two averages of Adam."""
    width = 512
    found: dict[str, torch.Tensor] = {}
    layer = 0
    while sum(tensor.nbytes for tensor in found.values()) < num_bytes:
        for part in ("model", "exp_avg", "exp_avg_sq"):
            found[f"{part}.{layer}.weight"] = torch.randn(4 * width, width)
            found[f"{part}.{layer}.bias"] = torch.randn(width)
        layer += 1
    return found


def memcpy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def blocked(num_bytes: int, repeats: int) -> dict[str, Any]:
    state = tensors(num_bytes)
    targets = [torch.empty_like(tensor).fill_(0) for tensor in state.values()]
    memcpys, copies, blocking, committing = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpoints(directory, keep=1)
        for step in range(repeats + 1):
            snapshot = Snapshot(Version(0, step), {}, state)
            memcpys += seconds(lambda: memcpy(list(state.values()), targets), 1)
            copies += seconds(lambda: copy(list(state.values()), targets), 1)
            start = time.perf_counter()
            checkpoints.begin_save(snapshot)
            blocking.append(time.perf_counter() - start)
            checkpoints.wait()
            committing.append(time.perf_counter() - start)
        loading = seconds(checkpoints.newest, 3)
    figures: dict[str, Any] = {
        "megabytes": sum(tensor.nbytes for tensor in state.values()) / 1e6,
        "num_tensors": len(state),
        "saves": repeats,
        # The first save allocates its buffers.
        "blocked_first_ms": 1e3 * blocking[0],
        "load_ms": 1e3 * statistics.median(loading),
    }
    for name, times in [
        ("memcpy", memcpys),
        ("torch_copy", copies),
        ("blocked", blocking),
        ("committed", committing),
    ]:
        warm = [1e3 * each for each in times[1:]]
        figures[f"{name}_ms"] = statistics.median(warm)
        figures[f"{name}_ms_range"] = [min(warm), max(warm)]
    figures["blocked_over_copy"] = figures["blocked_ms"] / min(
        figures["memcpy_ms"], figures["torch_copy_ms"]
    )
    return figures


def main() -> None:
    args = parse_args(__doc__ or "")
    figures = blocked(60_000_000 if args.quick else 300_000_000, 11 if args.quick else 21)
    finish("checkpoint", figures, {"blocked_over_copy": 3.0}, check=args.check)


if __name__ == "__main__":
    main()
