"""A script that leaves its loop at the fourth step, in the way that its first argument says."""

from __future__ import annotations

import os
import sys

import torch

import resilin

how, where = sys.argv[1:]
resilin.init_process_group()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = resilin.AdaptiveDataParallel(net, optimizer)
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
loader = resilin.AdaptiveDataLoader(data, batch_size=8)
if where != "nowhere":
    resilin.checkpoint_to(where, every=1000)


def train() -> None:
    for _ in resilin.remaining_epochs_until(3):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps == 4 and how == "exit":
                sys.exit(0)
            if model.clock.steps == 4 and how == "return":
                return
            if model.clock.steps == 4 and how == "alone" and os.environ["LOCAL_RANK"] == "0":
                return


print("begins at", model.clock.steps, flush=True)
train()
