"""Joining the other replicas, whoever launched them.

torchrun and everything that speaks its environment (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
`MASTER_PORT`) start a job of many; a plain `python script.py` is a job of one, with no group and
no server. Nothing is remembered here: who is present is asked of torch.distributed each time,
because it may change between any two steps.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

LAUNCHER_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for each of its processes."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a collective may wait before the job is taken to be stuck."""

# How often this process has joined. torch names groups anew after each teardown, and finds the
# addresses of the last one in the store: a name of our own for each time keeps them apart.
_attempts = itertools.count()


def init_process_group(backend: str | None = None, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Joins the job that this process was launched into.

    Under torchrun or a compatible launcher this initialises torch.distributed; in a process of
    its own it does nothing, and the job has one replica. Calling it again changes nothing. After
    `torch.distributed.destroy_process_group()` on all replicas it can be called anew, as often on
    each of them.

    Args:
        backend: `nccl`, `gloo` or another one of torch.distributed; None takes nccl where CUDA
            is available, else gloo.
        timeout: How long a collective may wait.

    Raises:
        ValueError: Only a part of the launcher's environment is set, or the group that exists
            has another backend than the one asked for.
    """
    if dist.is_initialized():
        if backend is not None and backend not in str(dist.get_backend()):
            raise ValueError(
                f"the process group already exists with backend {dist.get_backend()!r}, but "
                f"{backend!r} was asked for"
            )
        return
    present = [name for name in LAUNCHER_ENV if name in os.environ]
    if not present:
        return
    if missing := [name for name in LAUNCHER_ENV if name not in os.environ]:
        raise ValueError(
            f"the launcher's environment is incomplete: {', '.join(present)} set, "
            f"{', '.join(missing)} missing; start the job with torchrun, or set none of them"
        )
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    attempt = next(_attempts)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=PrefixStore(f"resilin/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def num_replicas() -> int:
    """How many replicas are in the job now."""
    return dist.get_world_size() if dist.is_initialized() else 1


def replica() -> int:
    """Which of them this process is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0
