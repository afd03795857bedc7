"""Plain DDP under torchrun, with `torch.save`: PyTorch's tutorial on fault-tolerant training.

The tutorial saves at the end of an epoch. This saves within epochs as well, and skips the batches
that are done. The batch of a worker follows the number of workers, so the global batch stays.
"""

import os

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
net, optimizer, dataset = task.make()
ledger = task.Ledger(net, task.in_group())
model = DistributedDataParallel(net)
sampler = DistributedSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=task.BATCH // dist.get_world_size(), sampler=sampler)
step = 0
path = task.FOLDER / "checkpoint.pt"
if path.exists():
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
first, skip = divmod(step, len(loader))
for epoch in range(first, task.EPOCHS):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader):
        if epoch == first and number < skip:
            continue
        loss = model(**batch)["loss"]
        loss.backward()
        ledger.begin(epoch, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ledger.done(step)
        if step % task.SAVE_EVERY == 0 and dist.get_rank() == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
if dist.get_rank() == 0:
    task.finish(net)
dist.destroy_process_group()
