"""The two jobs that `rescale.py` disturbs: one with resilin, one a bare script under torchrun.

Both train the same model on the same data, and write down when they have come how far. The time of
the first line is taken before anything is imported that takes time. A member of a live job also
writes when it has noticed a change (`noticed`), when members have come together (`formed`), when
all have the newest state (`healed`), and when its next step begins (`wrapped`).
"""

from __future__ import annotations

import time

FIRST_LINE = time.time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, nn

Mark = Callable[..., None]

HOST = "RESCALE_HOST"
"""Number of the host that an agent and its workers stand for."""
SIZES = {"small": (512, 8), "large": (1024, 24)}
"""Width and number of layers: about 25 and 300 MB with the averages of AdamW."""
CHECKPOINT_EVERY = {"small": 1, "large": 10}
"""Steps between two checkpoints of the bare script. It is small enough to lose no step, or as large
as to lose some."""
OUR_CHECKPOINT_EVERY = 10
"""The same of ours, which has its copies in memory besides."""
BATCH = 64
"""Samples in a step, over all replicas."""
NUM_SAMPLES = 1024


def diary(folder: Path) -> Mark:
    """Lines that survive the process: each is one write to a file of this process alone."""
    name = folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
    file = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    who = {
        "pid": os.getpid(),
        "host": int(os.environ[HOST]),
        "rank": int(os.environ.get("RANK", os.environ["LOCAL_RANK"])),
    }

    def write(event: str, when: float | None = None, **facts: object) -> None:
        line = {"event": event, "time": when or time.time(), **who, **facts}
        os.write(file, (json.dumps(line) + "\n").encode())

    return write


def make(size: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Model, optimizer, inputs and targets."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, depth = SIZES[size]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return net, optimizer, torch.randn(NUM_SAMPLES, width), torch.randint(10, (NUM_SAMPLES,))


def follow(engine: Any, mark: Mark) -> list[bool]:
    """Write changes of members down, and keep in the list that one has happened."""
    changed: list[bool] = []
    if engine.changes is None:
        return changed
    begin, formed = engine.begin, engine.formed

    def begin_marked(training: Any) -> None:
        let_go, heal = training.let_go, training.heal

        def let_go_marked() -> None:
            mark("noticed")
            let_go()

        def heal_marked() -> Any:
            mark("formed")
            return heal()

        training.let_go, training.heal = let_go_marked, heal_marked
        begin(training)

    def formed_marked(state: Any) -> None:
        formed(state)
        mark("healed")
        changed.append(True)

    engine.begin, engine.formed = begin_marked, formed_marked
    return changed


def ours(folder: Path, size: str, mark: Mark) -> None:
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import resilin

    # Names are loaded on first use.
    _ = (resilin.AdaptiveDataParallel, resilin.AdaptiveDataLoader, resilin.checkpoint_to)
    mark("import")
    resilin.init_process_group("gloo")
    mark("group")
    changed = follow(resilin.current_job().engine, mark)
    net, optimizer, inputs, targets = make(size)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True
    )
    resilin.checkpoint_to(folder / "checkpoints", every=OUR_CHECKPOINT_EVERY)
    mark("build")
    resilin.resume()
    mark("restore")
    for _ in resilin.remaining_epochs_until(10**6):
        for x, y in loader:
            if changed:
                mark("wrapped")
                changed.clear()
            step = model.clock.steps
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > step:
                # A replica that is alone makes some steps in two parts, to measure noise.
                mark("step", step=step + 1)


def bare(folder: Path, size: str, mark: Mark) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    mark("import")
    dist.init_process_group("gloo")
    mark("group")
    net, optimizer, inputs, targets = make(size)
    model = DistributedDataParallel(net)
    mark("build")
    path, step = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location="cpu", mmap=False, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        del state
    mark("restore")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    while True:
        first = step * BATCH % NUM_SAMPLES
        mine = slice(first + rank, first + BATCH, replicas)
        F.cross_entropy(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mark("step", step=step)
        if rank == 0 and step % CHECKPOINT_EVERY[size] == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            temporary = path.with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=("ours", "bare"))
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    mark = diary(args.folder / "diaries")
    mark("launch", FIRST_LINE)
    {"ours": ours, "bare": bare}[args.contender](args.folder, args.size, mark)


if __name__ == "__main__":
    main()
