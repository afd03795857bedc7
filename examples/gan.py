"""A GAN: two players that take turns, as two parameter groups of one optimizer.

    python examples/gan.py
    resilin run --nproc 2 examples/gan.py

Whose turn it is follows from the clock of the job, which survives restarts. The generator learns to
draw points of a ring.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import Dataset

import resilin

LATENT = 4


class Ring(Dataset):
    """Points of a ring, each with the noise that the generator turns into a point."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        angle = torch.tensor(2 * math.pi * index / len(self), dtype=torch.float64)
        # By the sample, not by the process: the run does not depend on the number of replicas.
        noise = torch.randn(LATENT, generator=resilin.sample_generator(), dtype=torch.float64)
        return torch.stack([angle.cos(), angle.sin()]), noise


class Players(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 32), nn.Tanh(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, real, noise, turn):
        fake = self.generator(noise)
        if turn == "discriminator":
            # The generator has no gradient in this step, so the optimizer leaves it alone.
            return self.discriminator(real), self.discriminator(fake.detach())
        # The generator learns through a discriminator that does not learn.
        fixed = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        return functional_call(self.discriminator, fixed, (fake,))


def loss_of(output, turn):
    if turn == "discriminator":
        real, fake = output
        return F.softplus(-real).mean() + F.softplus(fake).mean()
    return F.softplus(-output).mean()


def main():
    torch.manual_seed(0)
    players = Players().double()
    optimizer = torch.optim.Adam(
        [
            {"params": players.generator.parameters(), "lr": 0.002},
            {"params": players.discriminator.parameters(), "lr": 0.004},
        ],
        betas=(0.5, 0.999),
    )
    resilin.init_process_group()
    resilin.checkpoint_to(None, memory_every=1)
    # In each step, one of the players has no gradient.
    model = resilin.AdaptiveDataParallel(players, optimizer, find_unused_parameters=True)
    loader = resilin.AdaptiveDataLoader(Ring(), batch_size=100, shuffle=True, max_local_bsz=30)

    for epoch in resilin.remaining_epochs_until(10):
        for real, noise in loader:
            # Three steps of the discriminator, then one of the generator.
            turn = "generator" if model.clock.steps % 4 == 3 else "discriminator"
            loss_of(model(real, noise, turn), turn).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 9 and resilin.current_job().engine.membership.is_first:
            with torch.no_grad():
                noise = torch.randn(1000, LATENT, generator=torch.Generator().manual_seed(1))
                radius = players.generator(noise.double()).norm(dim=1)
            print(f"{model.clock.steps} steps, radius {radius.mean():.2f} +- {radius.std():.2f}")
    return players


if __name__ == "__main__":
    main()
