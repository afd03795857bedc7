"""A model whose gradient is its data, and processes that forget that they were launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import resilin
from resilin.engine.group import LAUNCHER_ENV

SAMPLES = 96
LR = 0.5


class Mean(nn.Module):
    """Its gradient is the mean of its inputs, of which the first is always 1: their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.ids: list[int] = []
        self.largest = 0

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.largest = max(self.largest, len(ids))
            micro = resilin.current_job().micro_batch
            if micro is None or micro.weight:
                self.ids += ids.tolist()
        return {"loss": (x @ self.w).mean(), "logits": x[:, :2]}


class Numbers(torch.utils.data.Dataset):
    def __init__(self, num: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 3, generator=generator)
        self.x[:, 0] = 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "ids": index}


def everywhere(value: Any) -> list[Any]:
    """What each replica says."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole_steps(steps: list[list[int]]) -> list[list[int]]:
    """The samples of each step, over all replicas."""
    return [
        [sample for part in parts for sample in part]
        for parts in zip(*everywhere(steps), strict=True)
    ]


@contextmanager
def alone() -> Iterator[None]:
    """As a plain `python script.py`: no launcher, and nothing left of an earlier one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LAUNCHER_ENV, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        forget()
        yield
    forget()


def forget() -> None:
    """Accelerate and the job find out anew who is there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    resilin.reset_job()


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"
