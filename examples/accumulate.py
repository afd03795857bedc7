"""Gradient accumulation for any loop: a plan says how, and the optimizer waits.

    python examples/accumulate.py

The recipe wants a batch of 256, and 64 samples fit. The loop below is an ordinary one. Trained with
and without accumulation, the model comes out the same.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilin


def train(data, batch_size, accumulation_steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    resilin.accumulate(optimizer, accumulation_steps)
    for _ in range(10):
        for images, labels in DataLoader(data, batch_size=batch_size):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()  # every so many calls; in between it waits
            optimizer.zero_grad()  # and so does this
    return model


def main():
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    data = TensorDataset(images[:1536], labels[:1536])

    plan = resilin.plan(256, max_local_bsz=64)
    print(f"{plan.global_batch_size} samples: {plan.steps} micro-batches of {plan.batch_size}")
    accumulated = train(data, plan.batch_size, plan.steps)
    whole = train(data, 256, 1)

    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(accumulated.parameters(), whole.parameters(), strict=True)
    )
    accuracy = (accumulated(images[1536:]).argmax(dim=1) == labels[1536:]).float().mean()
    print(f"test accuracy {100 * accuracy:.1f}%, largest difference of a weight {difference:.0e}")


if __name__ == "__main__":
    main()
