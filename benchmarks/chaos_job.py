"""The job that `chaos.py` disturbs: digits in float64, with a fixed schedule of batch sizes.

Each replica writes down which samples it is about to train on, and which steps it has completed,
one line each, in files of its own. Whatever dies, these lines stay.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

BATCH_SIZES = (48, 31, 96, 64, 17, 80)
"""The global batch size goes around through these, ten steps each; none of them divides well."""
CHECKPOINT_EVERY = 25
"""Steps between two checkpoints."""


class Diary:
    """Lines that survive the process: each is one write to a file of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(
            folder / f"{time.time_ns()}-{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND
        )

    def write(self, **facts: object) -> None:
        line = json.dumps({"time": time.time(), **facts}) + "\n"
        os.write(self._file, line.encode())


def batch_size(clock: resilin.core.clock.Clock) -> int:
    return BATCH_SIZES[clock.steps // 10 % len(BATCH_SIZES)]


def last_epoch(folder: Path) -> int:
    """The driver says, two epochs ahead, when the job is to end."""
    told = folder / "last_epoch"
    return int(told.read_text()) if told.exists() else 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(
        torch.tensor(pixels / 16), torch.tensor(labels), torch.arange(len(labels))
    )
    layers = (torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    net = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(net, optimizer, scheduler, rule="linear")
    loader = resilin.AdaptiveDataLoader(dataset, batch_size=48, shuffle=True, max_local_bsz=30)
    loader.set_batch_size(batch_size)
    resilin.checkpoint_to(args.folder / "checkpoints", every=CHECKPOINT_EVERY, memory_every=1)
    began = resilin.resume()
    engine = resilin.current_job().engine
    diary = Diary(args.folder / "diaries")
    # A generation that dies at once may come twice; the port of its store tells them apart.
    run = f"{engine.membership.generation}-{os.environ.get('MASTER_PORT')}"
    who = {"run": run, "replica": engine.membership.replica}
    diary.write(
        event="start",
        **who,
        replicas=engine.membership.num_replicas,
        pid=os.getpid(),
        agent=os.getppid(),
        step=0 if began is None else began.step,
    )
    completed: int | None = None
    for epoch in resilin.remaining_epochs_until(10**6):
        if epoch > last_epoch(args.folder):
            break
        for inputs, targets, indices in loader:
            if completed is not None:
                # The loader hands out a new step only when the last one is over.
                diary.write(event="done", **who, step=completed, epoch=epoch)
                completed = None
            mine = indices.tolist() if loader.current_samples else []
            step = model.clock.steps
            diary.write(event="part", **who, step=step + 1, epoch=epoch, samples=mine)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > step:
                scheduler.step()
                completed = model.clock.steps
                time.sleep(args.pause)
    if engine.membership.replica == 0:
        state = {"steps": model.clock.steps, "parameters": net.state_dict()}
        torch.save(state, args.folder / "final.tmp")
        (args.folder / "final.tmp").rename(args.folder / "final.pt")
    diary.write(event="end", **who, step=model.clock.steps)


if __name__ == "__main__":
    main()
