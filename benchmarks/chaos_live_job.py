"""The job that `chaos_live.py` disturbs: it counts in its own parameters what it has trained on.

`seen` has one number per sample. Its loss is the mean of those of the batch, its learning rate 1,
and all batches are of one size B: so `-B * seen` says in how many committed steps each sample was,
whoever made them and whoever is gone since. Each process writes down what it does, one line each,
in a file of its own. Whatever dies, these lines stay.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path

import torch
from chaos_job import Diary, last_epoch
from chaos_live_figures import footprint_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

NUM_SAMPLES, BATCH = 960, 48


class Net(nn.Module):
    """A small network, and the counters of the samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
        self.seen = nn.Parameter(torch.zeros(NUM_SAMPLES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.mse_loss(self.layers(x), y) + self.seen[indices].mean()


def checksum(net: nn.Module) -> int:
    found = 0
    for parameter in net.parameters():
        found = zlib.crc32(parameter.detach().numpy().tobytes(), found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--name", default="", help="that of the launcher")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(x, y, torch.arange(NUM_SAMPLES))
    net = Net()
    groups = [
        {"params": net.layers.parameters(), "lr": 0.02, "momentum": 0.9},
        {"params": [net.seen], "lr": 1.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.02)

    diary = Diary(args.folder / "diaries")
    member = os.environ.get("RESILIN_MEMBER", "alone")
    diary.write(event="process", pid=os.getpid(), member=member)
    resilin.init_process_group()
    engine = resilin.current_job().engine

    def write(event: str, **facts: object) -> None:
        now = engine.membership
        diary.write(
            event=event,
            member=member,
            pid=os.getpid(),
            generation=now.generation,
            replica=now.replica,
            replicas=now.num_replicas,
            launcher=args.name,
            **facts,
        )

    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(dataset, BATCH, shuffle=True, seed=3, max_local_bsz=9)
    stats = resilin.Accumulator()
    write("built")
    for epoch in resilin.remaining_epochs_until(10**6):
        if epoch > last_epoch(args.folder):
            break
        for inputs, targets, indices in loader:
            before = model.clock.steps
            model(inputs, targets, indices).backward()
            optimizer.step()
            optimizer.zero_grad()
            stats["samples"] += loader.current_samples
            step = model.clock.steps
            if step > before:
                more = footprint_of(os.getpid()) if step % 10 == 0 else {}
                write("done", step=step, epoch=epoch, checksum=checksum(net), **more)
                time.sleep(args.pause)
        write("epoch ends", epoch=epoch)
        time.sleep(args.pause)
        with stats.synchronized():
            write("evaluated", epoch=epoch, samples=stats["samples"])
        stats.clear()
        time.sleep(args.pause)
    write("end", step=model.clock.steps, checksum=checksum(net))
    target = args.folder / f"final-{member}.pt"
    torch.save({"steps": model.clock.steps, "parameters": net.state_dict()}, target)


if __name__ == "__main__":
    main()
