"""A training loop on the counting device, as users write it, and what the host read meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.counted.device import Counted, Told

WARM_UP = 4
"""Steps before anything is counted: buckets, optimizer states and plans are made in them, and the
contents of gradients are compared (`gradient/seal.py`), which reads them."""
STEPS = 6
"""Steps that are counted."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the script uses."""

    measured: bool = False
    """Whether the noise is measured in each step, or in none of those that are counted."""
    micro_batches: int = 1
    """Micro-batches that a replica has in a step."""
    scaler: bool = False
    tokens: bool = False
    """Whether micro-batches are weighted by tokens, with model.weight()."""
    clip: bool = False
    groups: bool = False
    """Whether there are several parameter groups."""
    record: bool = False
    accumulator: bool = False
    autoscale: bool = False
    cross_check: int | str = "auto"
    rule: str = "adascale"
    events: Path | None = None
    checkpoints: Path | None = None
    memory_every: int | None = None
    prefetch: bool = False
    """Whether the loader copies batches to the device, and not the loop."""

    def but(self, **changes: Any) -> Setup:
        return replace(self, **changes)

    def within(self, directory: Path) -> Setup:
        """The same, with its directories in this one."""
        places = {"events": self.events, "checkpoints": self.checkpoints}
        return self.but(**{name: directory / at for name, at in places.items() if at is not None})


@dataclass(frozen=True)
class Run:
    """A finished run."""

    told: list[Told]
    """What the device noticed in the steps that were counted."""
    model: resilin.AdaptiveDataParallel
    parameters: torch.Tensor

    def of(self, *whats: str) -> list[Told]:
        return [told for told in self.told if told.what in whats]


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, by a copy that does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True)


def train(counted: Counted, setup: Setup, replicas: int = 1) -> Run:
    """Train for `WARM_UP + STEPS` steps.

    While they are counted, the device is a step behind: what was queued in a step is not done
    before the loop body of the next one begins.
    """
    torch.manual_seed(0)
    batch = 8 * replicas * setup.micro_batches
    inputs = torch.randn(4 * batch * (WARM_UP + STEPS + 1), 6)  # batches may grow
    data = TensorDataset(inputs, torch.randint(4, (len(inputs),)))
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(counted.device)
    chosen = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(chosen if setup.groups else net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(counted.device.type, enabled=setup.scaler, init_scale=8.0)
    if setup.events is not None:
        resilin.events_to(setup.events)
    if setup.checkpoints is not None:
        resilin.checkpoint_to(setup.checkpoints, every=None, memory_every=setup.memory_every)
    model = resilin.AdaptiveDataParallel(
        net,
        optimizer,
        rule=setup.rule,
        stats_every=1 if setup.measured else 10**6,
        scaler=scaler if setup.scaler else None,
        cross_check=setup.cross_check,
    )
    loader = resilin.AdaptiveDataLoader(data, batch_size=batch, shuffle=True, max_local_bsz=8)
    if setup.autoscale:
        loader.autoscale_batch_size(4 * batch, local_bsz_bounds=(2, 32))
    stats = resilin.Accumulator() if setup.accumulator else None
    started, ticks = False, 0
    for _ in resilin.remaining_epochs_until(1):
        for x, y in loader.prefetch(counted.device.type) if setup.prefetch else loader:
            if model.clock.steps == WARM_UP + STEPS:
                break  # all that follows the last step, up to the next one, has been done
            if model.clock.steps >= WARM_UP and not started:
                started = True
                counted.set_delay(1)
                counted.clear()
            if model.clock.steps > ticks:
                ticks = model.clock.steps
                counted.tick()
            if not setup.prefetch:
                x, y = pinned(x, counted.device), pinned(y, counted.device)
            if setup.tokens:
                with model.weight(float(x.shape[0] + model.clock.steps % 3)):
                    loss = nn.functional.cross_entropy(model(x), y)
            else:
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if setup.clip:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if setup.record:
                resilin.record(loss=loss)
            if stats is not None:
                stats["loss"] += loss * len(x)
        told = counted.told()
        break
    with counted.unseen():
        parameters = torch.cat([p.detach().flatten().cpu() for p in net.parameters()])
    return Run(told, model, parameters)
