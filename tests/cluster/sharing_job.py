"""An elastic job that shares a cluster with others, and writes down which samples it uses.

It is an ordinary script, in float64, on generated data. Each replica writes down the samples it is
about to train on and the steps it has completed, one line each, in a file of its own. Whatever
dies, these lines stay; `sharing.py` reads them. Checkpoints are where `resilin run
--checkpoint-dir` says, or in the folder of the job.

    python tests/cluster/sharing_job.py FOLDER --epochs 3 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

NUM_SAMPLES = 997
"""Samples in an epoch: no number of replicas divides it."""
BATCH_SIZE = 24
"""Global batch size, the same for any number of replicas."""
HURRY = "hurry"
"""File in the folder of the job that ends all pauses: a test is done with what it does to it."""
CHECKPOINT_EVERY = 20
"""Steps between two checkpoints."""


class Diary:
    """Lines that survive the process: each is one write to a file of this process alone."""

    def __init__(self, folder: Path, who: dict[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._who = who
        self._file = os.open(
            folder / f"{time.time_ns()}-{os.uname().nodename}-{os.getpid()}.jsonl",
            os.O_CREAT | os.O_WRONLY | os.O_APPEND,
        )

    def write(self, **facts: object) -> None:
        line = json.dumps({"time": time.time(), **self._who, **facts}) + "\n"
        os.write(self._file, line.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="makes one job differ from another")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--slow-while", type=Path, help="a file: 2 s are added while it is there")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    inputs = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()
    dataset = TensorDataset(inputs, targets, torch.arange(NUM_SAMPLES))
    layers = (torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    net = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    checkpoints = os.environ.get("RESILIN_CHECKPOINT_DIR", args.folder / "checkpoints")
    resilin.checkpoint_to(checkpoints, every=CHECKPOINT_EVERY, memory_every=1)
    began = resilin.resume()
    membership = resilin.current_job().engine.membership
    # A generation that dies at once may come twice; the port of its store tells them apart.
    life = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    run = f"{life}/{membership.generation}-{os.environ.get('MASTER_PORT')}"
    diary = Diary(
        args.folder / "diaries", {"life": life, "run": run, "replica": membership.replica}
    )
    diary.write(
        event="start",
        replicas=membership.num_replicas,
        pid=os.getpid(),
        step=0 if began is None else began.step,
    )
    completed: int | None = None
    for epoch in resilin.remaining_epochs_until(args.epochs):
        for x, y, indices in loader:
            if completed is not None:
                # The loader hands out a new step only when the last one is over.
                diary.write(event="done", step=completed)
                completed = None
            mine = indices.tolist() if loader.current_samples else []
            step = model.clock.steps
            diary.write(event="part", step=step + 1, epoch=epoch, samples=mine)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > step:
                completed = model.clock.steps
                if args.slow_while is not None and args.slow_while.exists():
                    time.sleep(2.0)
                elif not (args.folder / HURRY).exists():
                    time.sleep(args.pause)
    if membership.replica == 0:
        state = {"steps": model.clock.steps, "parameters": net.state_dict()}
        mine = args.folder / f"final-{os.getpid()}.tmp"
        torch.save(state, mine)
        mine.rename(args.folder / "final.pt")
    diary.write(event="end", step=model.clock.steps)


if __name__ == "__main__":
    main()
