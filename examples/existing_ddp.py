"""AdaScale for a DDP script that exists: stock DataLoader, DistributedSampler, and one line.

    python examples/existing_ddp.py
    torchrun --nproc-per-node 2 examples/existing_ddp.py

Each process has a batch of 32, and the learning rate was tuned for one process. On two, the global
batch is 64: the model measures what such a step is worth, and scales the learning rate by it. It
is worth less than two steps, so the loop continues until the progress of 8 epochs is made.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilin


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDataset(images[:1440], labels[:1440])
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # This stood here before: model = DistributedDataParallel(model)
    model = resilin.AdaptiveDataParallel(model, optimizer, batch_size=32)

    epoch, goal = 0, 8 * len(data) / 32
    while model.progress < goal:
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        accuracy = (model(images[1440:]).argmax(dim=1) == labels[1440:]).float().mean()
        if rank == 0:
            print(
                f"epoch {epoch}: progress {model.progress:.0f} of {goal:.0f}, "
                f"gain {model.gain:.2f}, test accuracy {100 * accuracy:.1f}%",
                flush=True,
            )
        epoch += 1


if __name__ == "__main__":
    main()
