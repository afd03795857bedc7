"""A small conv net on images of CIFAR's shape, in a plain loop, on any number of processes.

    python examples/cifar_shaped.py
    resilin run --nproc 2 examples/cifar_shaped.py

The images are made on the spot: ten patterns, each behind as much noise. The global batch is 256,
and a process runs at most 64 samples at once; the plan says how often it accumulates.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin


def make_images(num, seed):
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (num,), generator=generator)
    images = patterns[labels] + 3 * torch.randn(num, 3, 32, 32, generator=generator)
    return TensorDataset(images, labels)


resilin.init_process_group()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2),
    nn.ReLU(),
    nn.BatchNorm2d(8),
    nn.Conv2d(8, 16, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(16 * 7 * 7, 10),
)
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
model = resilin.AdaptiveDataParallel(net, optimizer)
loader = resilin.AdaptiveDataLoader(
    make_images(2048, seed=1), batch_size=256, max_local_bsz=64, shuffle=True
)

plan = resilin.plan(256, max_local_bsz=64)
if plan.master:
    print(f"{plan.gpus} processes x {plan.steps} micro-batches of at most {plan.batch_size}")

for _ in resilin.remaining_epochs_until(3):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

model.eval()
test, stats = make_images(512, seed=2), resilin.Accumulator()
with torch.no_grad():
    for images, labels in resilin.AdaptiveDataLoader(test, batch_size=128):
        stats["correct"] += int((model(images).argmax(1) == labels).sum())
        stats["count"] += len(labels)
with stats.synchronized():
    accuracy = stats["correct"] / stats["count"]
if plan.master:
    print(f"{model.clock.steps} steps, test accuracy {accuracy:.3f}")
