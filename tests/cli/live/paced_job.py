"""A job that takes its time until a file is there: `python paced_job.py GO RESULT`."""

import os
import sys
import time
from pathlib import Path

import torch

import resilin

go, result = map(Path, sys.argv[1:])
while "NEVER_BUILT" in os.environ:
    time.sleep(1)
resilin.init_process_group()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 4).double(), torch.randn(96, 1).double())
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model = resilin.AdaptiveDataParallel(model, optimizer)
loader = resilin.AdaptiveDataLoader(data, batch_size=24)
name = os.environ.get("RESILIN_MEMBER", "alone")
for epoch in resilin.remaining_epochs_until(500):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if not go.exists():
            time.sleep(0.05)
    print(f"{name}: {len(inputs)} samples in epoch {epoch}", flush=True)
result.with_name(f"{result.name}-{name}").write_text(repr(model.module.weight.tolist()))
