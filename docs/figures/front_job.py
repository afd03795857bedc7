"""The job in the picture of the README: digits, with 16 samples for each replica there is.

With `--fixed` the batch is that of one replica, whatever there is: the run to compare with.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=120)
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
net = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 8, 8)),
    torch.nn.Conv2d(1, 64, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(64, 64, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(4096, 10),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.00008, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer, scheduler)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=16, shuffle=True)
if not args.fixed:
    loader.set_batch_size(lambda clock: 16 * resilin.current_job().engine.membership.num_replicas)
resilin.register("scheduler", scheduler)

for _ in resilin.remaining_epochs_until(args.epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
    scheduler.step()
