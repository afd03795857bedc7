"""A small network that frameworks shard, beside one whole process that trains it bare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from resilin.core.stream import SampleStream

REFERENCE = 8
SIZES = (8, 21, 9, 13, 30, 11)
"""Global batch sizes, none below the reference: a threshold for clipping is then the same."""
SAMPLES = 203
SEED = 5
CLIP = 0.4
LOCAL = 4
"""Largest micro-batch: steps are accumulated, and the shares of two processes are unequal."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two layers, a norm, and a head with 3 rows; Accelerate makes norm and head one unit."""

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = x * self.scale
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Data(Dataset):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


def make_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(2)
    return Net().to(dtype)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW; decayed parameters are a group of their own, as Trainers make it."""
    decayed = [p for n, p in net.named_parameters() if n.endswith("weight") and "norm" not in n]
    rest = [p for n, p in net.named_parameters() if not (n.endswith("weight") and "norm" not in n)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def size_of(clock: Any) -> int:
    """The batch size of the next step."""
    return SIZES[clock.steps % len(SIZES)]


class Bare:
    """One process that trains a whole model with bare torch, on the batches of the stream."""

    def __init__(self, dtype: torch.dtype = torch.float64, clip: float | None = CLIP) -> None:
        self.net, self.data, self.clip = make_net(dtype), Data(dtype), clip
        self.optimizer = make_optimizer(self.net)
        self.stream, self.cursor = SampleStream(SAMPLES, seed=SEED), 0
        self.norms: list[float] = []

    def train(self, steps: int) -> Bare:
        """Trains up to this many steps in all."""
        for step in range(len(self.norms), steps):
            span = self.stream.batch(self.cursor, SIZES[step % len(SIZES)])
            indices = torch.from_numpy(self.stream.indices(span))
            self.net(self.data.x[indices], self.data.y[indices])["loss"].backward()
            norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip or float("inf"))
            self.norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.cursor = span.stop
        return self


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor. Collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor


def worst_error(net: nn.Module, bare: Bare) -> float:
    """The largest relative error of a parameter. Collective."""
    own = dict(net.named_parameters())
    expected = dict(bare.net.named_parameters())
    assert own.keys() == expected.keys()
    return max(
        float((full(own[name]) - full(value)).norm() / full(value).norm())
        for name, value in expected.items()
    )


def num_sharded(net: nn.Module) -> int:
    """Parameters of which this process holds less than the whole."""
    return sum(
        hasattr(p, "device_mesh") and p.to_local().numel() < p.numel() for p in net.parameters()
    )


@contextmanager
def single_process(path: Any) -> Iterator[None]:
    """As `torchrun --nproc-per-node 1`: a group of this process alone, after another one."""
    one = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in one.items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
