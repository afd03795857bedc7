"""The script of `resilin sched demo`: it counts its samples, and fails if one is lost or repeated.

It is an ordinary script, on generated data. Each sample has a random number; their sum over an
epoch shows whether each was used once, on however many replicas, and with whatever interruptions.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

SAMPLES, CLASSES, FEATURES = 1800, 10, 64


def main() -> None:
    """Train with any number of processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    targets = torch.arange(SAMPLES) % CLASSES
    inputs = torch.randn(SAMPLES, FEATURES) + torch.randn(CLASSES, FEATURES)[targets] / 2
    numbers = torch.randint(1 << 31, (SAMPLES,))
    dataset = TensorDataset(inputs, targets, torch.arange(SAMPLES))
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(dataset, batch_size=32, shuffle=True)
    sums = resilin.Accumulator()
    for epoch in resilin.remaining_epochs_until(args.epochs):
        for x, y, indices in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if loader.current_samples:
                sums[f"samples {epoch}"] += loader.current_samples
                sums[f"numbers {epoch}"] += int(numbers[indices].sum())
            time.sleep(args.pause)
    with sums.synchronized():
        found = {name: sums[name] for name in sorted(sums)}
    wanted = {f"samples {epoch}": float(SAMPLES) for epoch in range(args.epochs)}
    wanted |= {f"numbers {epoch}": float(numbers.sum()) for epoch in range(args.epochs)}
    if found != wanted:
        raise RuntimeError(f"samples were lost or repeated: {found} instead of {wanted}")
    if resilin.current_job().engine.membership.replica == 0:
        print(f"{args.epochs} epochs of {SAMPLES} samples, each used once", flush=True)


if __name__ == "__main__":
    main()
