"""A run that survives the loss of a worker.

    resilin run --nproc 2 examples/survive.py --kill-at 40

Replica 1 kills itself at step 40, as a machine would take it away. torchrun starts the workers
again, and they go on behind the last step that all of them had completed, from the memory of the
host. Without a launcher, and without `--kill-at`, it is a plain run of one process.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=None, metavar="STEP")
parser.add_argument("--checkpoint-dir", default=None)
args = parser.parse_args()

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=32, shuffle=True)
resilin.checkpoint_to(args.checkpoint_dir, memory_every=1)
began = resilin.resume()
engine = resilin.current_job().engine

for epoch in resilin.remaining_epochs_until(4):
    stats = resilin.Accumulator()
    for inputs, targets in loader:
        output = model(inputs)
        F.cross_entropy(output, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats["samples"] += loader.current_samples
        stats["correct"] += (output.argmax(1) == targets).sum().item()
        if began is None and engine.replica == 1 and model.clock.steps == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    with stats.synchronized():
        if engine.replica == 0:
            accuracy = stats["correct"] / stats["samples"]
            print(f"epoch {epoch}: {stats['samples']:.0f} samples, accuracy {accuracy:.3f}")
