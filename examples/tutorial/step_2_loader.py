"""Step 2: load the data by the sample stream.

    python examples/tutorial/step_2_loader.py
    torchrun --nproc-per-node 2 examples/tutorial/step_2_loader.py

docs/tutorial.md says why.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import resilin


def digits():
    """1437 images of 8 x 8 pixels to train on, and 360 to test on."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32) / 16
    data = TensorDataset(images.view(-1, 1, 8, 8), torch.tensor(labels))
    return random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test(model, loader, epoch):
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(dim=1) == labels).sum().item()
            count += len(labels)
    print(f"epoch {epoch}: test accuracy {100 * correct / count:.1f}%", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    resilin.init_process_group()

    train_set, test_set = digits()
    train_loader = resilin.AdaptiveDataLoader(
        train_set, batch_size=args.batch_size, shuffle=True, drop_last=True, seed=args.seed
    )
    test_loader = resilin.AdaptiveDataLoader(test_set, batch_size=120)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[5, 7], gamma=0.1)
    model = resilin.AdaptiveDataParallel(model, optimizer, scheduler)

    for epoch in range(args.epochs):
        train(model, train_loader, optimizer)
        test(model, test_loader, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
