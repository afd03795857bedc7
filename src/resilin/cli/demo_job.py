"""The script of `resilin demo`: a run that survives the loss of a worker.

It is an ordinary script, on generated data. At step `--kill-at` the last replica kills itself, as
if its machine had been taken away. The workers are restarted and resume after the last step that
all of them had completed, from the copy in the memory of the machine. With `resilin run --live` the
others continue, and a new worker joins them.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

SAMPLES, CLASSES, FEATURES, EPOCHS = 1800, 10, 64, 4


def main() -> None:
    """Train with any number of processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int, default=None, metavar="STEP")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()

    torch.manual_seed(0)
    targets = torch.arange(SAMPLES) % CLASSES
    inputs = torch.randn(SAMPLES, FEATURES) + torch.randn(CLASSES, FEATURES)[targets] / 2
    net = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    resilin.checkpoint_to(None, memory_every=1)
    began = resilin.resume()
    engine = resilin.current_job().engine
    last = engine.membership.replica == engine.membership.num_replicas - 1

    for epoch in resilin.remaining_epochs_until(EPOCHS):
        stats = resilin.Accumulator()
        for x, y in loader:
            output = model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            resilin.record(loss=loss)
            stats["samples"] += loader.current_samples
            stats["correct"] += (output.argmax(1) == y).sum().item()
            time.sleep(args.pause)
            if began is None and last and model.clock.steps == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        with stats.synchronized():
            samples, accuracy = stats["samples"], stats["correct"] / stats["samples"]
        if samples != SAMPLES:
            raise RuntimeError(f"epoch {epoch} had {samples:.0f} samples instead of {SAMPLES}")
        if engine.membership.replica == 0:
            print(f"epoch {epoch}: {samples:.0f} samples, accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
