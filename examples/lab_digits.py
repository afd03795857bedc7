"""Digits for the trace lab: a small network, and its accuracy after each epoch.

    python examples/lab_digits.py
    resilin compare --rules constant,linear,sqrt,adascale --trace batches.csv --seeds 5 \
        examples/lab_digits.py

Nothing in it knows of traces, and it sets no seed: the lab does both from outside. What is compared
is what it records. docs/guides/lab.md shows what comes out.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--max-local-bsz", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

# 1280 images of 8 x 8 pixels to train on, and 517 to test on: always the same ones.
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
train, test = order[:1280], order[1280:]

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
resilin.init_process_group()
model = resilin.AdaptiveDataParallel(net, optimizer)
loader = resilin.AdaptiveDataLoader(
    TensorDataset(inputs[train], targets[train]),
    batch_size=args.batch_size,
    shuffle=True,
    max_local_bsz=args.max_local_bsz,
)

for epoch in resilin.remaining_epochs_until(args.epochs):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
    model.eval()
    with torch.no_grad():
        correct = net(inputs[test]).argmax(dim=1) == targets[test]
    accuracy = 100 * correct.double().mean().item()
    resilin.record(accuracy=accuracy)
    print(f"epoch {epoch}: accuracy {accuracy:.1f}%", flush=True)
