"""The best model of a run by its test accuracy, kept in a file over restarts and resizes.

    python examples/best_model.py --out best.pt
    resilin run --nproc 2 examples/best_model.py --out best.pt

What is tested and kept are the averaged weights. What the best accuracy was is part of the state of
the job; the file is written by one process, and is whole at any moment.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import resilin


def write(path, content):
    """Writes a file so that it is whole at any moment: the old one, or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def accuracy_of(model, loader):
    model.eval()
    stats = resilin.Accumulator()
    with torch.no_grad():
        for x, y in loader:
            stats["correct"] += (model(x).argmax(dim=1) == y).sum()
            stats["count"] += len(y)
    model.train()
    with stats.synchronized():
        return stats["correct"] / stats["count"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="Default: a file in a temporary directory.")
    path = parser.parse_args().out or Path(tempfile.mkdtemp()) / "best.pt"

    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16), torch.tensor(labels)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.3, momentum=0.9)

    resilin.init_process_group()
    resilin.checkpoint_to(None, memory_every=1)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    ema = resilin.EMA(model, decay=0.98)
    train, test = (TensorDataset(images[i], targets[i]) for i in (slice(1440), slice(1440, None)))
    loader = resilin.AdaptiveDataLoader(train, batch_size=48, shuffle=True)
    test_loader = resilin.AdaptiveDataLoader(test, batch_size=100)
    best = {"accuracy": 0.0, "epoch": -1}
    resilin.register("best", best)

    for epoch in resilin.remaining_epochs_until(6):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with ema.applied():
            accuracy = accuracy_of(model, test_loader)
            if accuracy > best["accuracy"]:
                found = {"accuracy": accuracy, "epoch": epoch}
                content = {**found, "weights": net.state_dict()}
                resilin.on_one_replica(lambda content=content: write(path, content))
                best.update(found)
    if resilin.current_job().engine.membership.is_first:
        print(f"best: {100 * best['accuracy']:.1f}% in epoch {best['epoch']}, in {path}")
    return net


if __name__ == "__main__":
    main()
