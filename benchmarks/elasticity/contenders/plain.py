"""The loop in one process, which survives nothing: what the others are compared with."""

import task
import torch
from torch.utils.data import DataLoader

net, optimizer, dataset = task.make()
ledger = task.Ledger(net, task.alone)
generator = torch.Generator().manual_seed(0)
loader = DataLoader(dataset, batch_size=task.BATCH, shuffle=True, generator=generator)
step = 0
for epoch in range(task.EPOCHS):
    for batch in loader:
        loss = net(**batch)["loss"]
        loss.backward()
        ledger.begin(epoch, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ledger.done(step)
task.finish(net)
