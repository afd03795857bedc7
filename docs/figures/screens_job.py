"""The job in the pictures of docs/guides/watching.md: digits, with a batch size that grows.

Replica 1 kills itself at a step, once, as a machine would take it away.
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
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--kill-at", type=int, default=None, metavar="STEP")
args = parser.parse_args()

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
# 300 images are kept apart to test with.
dataset, test = TensorDataset(inputs[:-300], targets[:-300]), (inputs[-300:], targets[-300:])
net = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 8, 8)),
    torch.nn.Conv2d(1, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(2048, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0004, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer, scheduler)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=16, shuffle=True, max_local_bsz=32)
# A schedule, and no autoscaling: the picture is to be the same on a machine that others use too.
sizes = (16, 32, 64, 128)
loader.set_batch_size(
    resilin.Schedule(
        lambda epoch: sizes[min(3, int(4 * epoch / args.epochs))], unit="epochs", clock="progress"
    )
)
resilin.checkpoint_to(os.environ.get("RESILIN_CHECKPOINT_DIR"), memory_every=5)
began = resilin.resume()
engine = resilin.current_job().engine

for _ in resilin.remaining_epochs_until(args.epochs):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
        if began is None and engine.membership.replica == 1 and model.clock.steps == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(test[0]).argmax(dim=1) == test[1]).float().mean()
    resilin.record(accuracy=right)
