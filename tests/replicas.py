"""Who this process is, as the job under test sees it, and what all replicas have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
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


both_reducers = pytest.mark.parametrize("reducer", ["ddp", "buckets"], indirect=True)
"""Runs a test with each class that reduces over several replicas."""


def _sized(*values: Any, size: int, gate: bool) -> Any:
    marks = [pytest.mark.world_size(size)]
    return pytest.param(
        *values, marks=marks if gate else [*marks, pytest.mark.nightly(part="jobs")]
    )


def worlds(*sizes: int, gate: Collection[int] = (2,)) -> list[Any]:
    """Numbers of processes for a test to be run in; the gate tries some of them."""
    return [_sized(size, size=size, gate=size in gate) for size in sizes]


def on_replicas(*sizes: int, buckets: Collection[int] = (2, 3)) -> pytest.MarkDecorator:
    """Runs a test with these numbers of replicas, as `world`, and with each class that reduces.

    The gate tries one number with each: 2 with DistributedDataParallel, 3 with buckets, where
    these are among them.

    Args:
        sizes: Numbers of replicas that go through DistributedDataParallel; 1 goes without.
        buckets: Numbers of replicas that have buckets of their own.
    """
    asked = [(size, "ddp", size <= 2) for size in sizes]
    asked += [(size, "buckets", size == max(buckets)) for size in buckets]
    return pytest.mark.parametrize(
        ("world", "reducer"),
        [_sized(size, reducer, size=size, gate=gate) for size, reducer, gate in asked],
        indirect=["reducer"],
    )
