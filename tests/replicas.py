"""Who this process is, as the job under test sees it, and what all replicas have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.training.job import current_job


def num_replicas() -> int:
    return current_job().engine.membership.num_replicas


def replica() -> int:
    return current_job().engine.membership.replica


def gathered(values: Iterable[Any]) -> list[Any]:
    """The values of all replicas, in one list."""
    if not dist.is_initialized():
        return list(values)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(values))
    return [value for part in parts for value in part]


def assert_identical(mine: Tensor) -> None:
    """All replicas hold this tensor, bit for bit."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(everyone[0], other) for other in everyone)
