"""Checks of the module to train, and of the arguments of DDP."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilin.compat.torch_names import (
    first_bucket_bytes,
    is_compiled,
    splits_graph_by_buckets,
)

logger = logging.getLogger("resilin")

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters


def check_model(model: nn.Module, ddp_kwargs: dict[str, Any], *, taken: bool) -> None:
    """Refuses what cannot be trained, and warns of what is trained inexactly.

    Args:
        model: The module to train.
        ddp_kwargs: Arguments for DistributedDataParallel.
        taken: Whether the job trains a model already.
    """
    if unknown := set(ddp_kwargs) - set(_DDP_ARGUMENTS):
        raise TypeError(
            f"unknown argument {', '.join(sorted(unknown))}: neither AdaptiveDataParallel nor "
            "DistributedDataParallel takes it"
        )
    if taken:
        raise ValueError(
            "the job has an AdaptiveDataParallel already, and one is all it can train: call "
            "release() on it, or resilin.reset_job() to begin another job"
        )
    if sharded := [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]:
        raise ValueError(
            f"{len(sharded)} parameters are sharded ({sharded[0]} is a DTensor): models under "
            "fully_shard or tensor parallelism cannot be trained here yet"
        )
    if ddp_kwargs.get("static_graph"):
        raise ValueError(
            "static_graph (True) must be False: DDP then expects each backward pass to be like the "
            "first one, and the micro-batches of a step that is accumulated do not reduce alike"
        )
    _check_buckets(model, ddp_kwargs)
    # A job of one replica may grow, so this does not depend on their number.
    if synced := [n for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]:
        logger.warning(
            "%s is a SyncBatchNorm: with several replicas, its gradient is that of one process "
            "only where all replicas have equally many samples and a step is one micro-batch",
            synced[0] or "the model",
        )


def _check_buckets(model: nn.Module, ddp_kwargs: dict[str, Any]) -> None:
    """Refuses buckets that torch.compile cannot split a graph for.

    torch raises an assertion when it compiles in the forward pass of DDP. A job of one replica has
    no DDP, so that without this check it would train until it grows. Functions that are compiled
    within the model cannot be seen here.
    """
    caps = ddp_kwargs.get("bucket_cap_mb_list") or [ddp_kwargs.get("bucket_cap_mb")]
    first = first_bucket_bytes()
    if None in caps or int(max(caps) * 2**20) >= first or not splits_graph_by_buckets():
        return
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(
            f"bucket_cap_mb ({max(caps)}) must be at least {first / 2**20:g} for a compiled "
            "module: torch splits its graph by the buckets of DDP, and takes no smaller ones; "
            "leave bucket_cap_mb out, or set torch._dynamo.config.optimize_ddp = False before"
        )
