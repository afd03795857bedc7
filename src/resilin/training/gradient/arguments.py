"""Checks of the module to train, and of what a script combines with it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from resilin.compat.torch_names import (
    first_bucket_bytes,
    is_compiled,
    splits_graph_by_buckets,
)
from resilin.engine.base import Engine
from resilin.training.gates.optimizer import name_of, parameters_of
from resilin.training.gates.others import SECOND_MODEL
from resilin.training.gradient.copies import check_live
from resilin.training.gradient.sharding import Sharding, find_sharding

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
        raise ValueError(SECOND_MODEL)
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


def divide_replicas(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    mesh: DeviceMesh | None,
    ddp_kwargs: Mapping[str, Any],
    engine: Engine,
    *,
    scaled: bool,
) -> Sharding | None:
    """Finds the sharding of a model; its data-parallel members are the replicas from then on.

    Args:
        model: The model.
        optimizers: Its optimizers.
        mesh: The data-parallel mesh, if the user names it.
        ddp_kwargs: Arguments for DistributedDataParallel.
        engine: Who is in the job.
        scaled: Whether there is a GradScaler.

    Returns:
        The sharding; None if the model is not sharded.

    Raises:
        ValueError: It cannot be trained like this.
        SystemExit: It cannot be live, and the launcher runs the job without `--live`.
    """
    sharding = find_sharding(model, mesh, engine.membership)
    if sharding is not None:
        parameters = model.parameters()
        check_sharded(sharding, optimizers, parameters, ddp_kwargs, scaled=scaled)
    if engine.live:
        check_live(model, sharding, engine.processes_per_copy)
    elif sharding is not None:
        engine.form_replicas(sharding.replica, sharding.num_replicas)
    elif engine.processes_per_replica > 1:
        # After a sharded model that was released.
        engine.form_replicas(engine.membership.process, engine.membership.num_processes)
    return sharding


def check_sharded(
    sharding: Sharding,
    optimizers: Sequence[Optimizer],
    parameters: Iterable[Tensor],
    ddp_kwargs: Mapping[str, Any],
    *,
    scaled: bool,
) -> None:
    """Refuses what a sharded model cannot be trained with.

    Args:
        sharding: The sharding of the model.
        optimizers: Its optimizers.
        parameters: All parameters of the model.
        ddp_kwargs: Arguments for DistributedDataParallel.
        scaled: Whether there is a GradScaler.

    Raises:
        ValueError: One of these cannot be honoured.
    """
    if ddp_kwargs:
        name = min(ddp_kwargs)
        text = (
            f"{name} ({ddp_kwargs[name]!r}) is an argument of DistributedDataParallel, and a model "
            "that is sharded with fully_shard is not wrapped in it: leave it out"
        )
        if name == "find_unused_parameters":
            text += ", and call set_reduce_scatter_unused_params(True) on the sharded model"
        raise ValueError(text)
    if scaled:
        raise ValueError(
            "scaler: a GradScaler finds infinite gradients in its own shards alone, so members "
            "would skip different steps; train a sharded model in bfloat16, without it"
        )
    _check_optimizers(sharding, optimizers, parameters)


def _check_optimizers(
    sharding: Sharding, optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]
) -> None:
    """Refuses optimizers of the parameters that `fully_shard` has replaced."""
    stepped = set(parameters_of(*optimizers))
    foreign = stepped - set(parameters)
    sharded = {p for unit in sharding.units for p in unit.parameters if p.requires_grad}
    for optimizer in optimizers:
        kind = type(optimizer)
        is_muon = kind.__name__ == "Muon" and kind.__module__.startswith("torch.")
        if is_muon and not sharded.isdisjoint(parameters_of(optimizer)):
            raise ValueError(
                "torch.optim.Muon makes whole matrices orthogonal, and each process has a part of "
                "those that fully_shard divides: train the model replicated, or choose another "
                "optimizer for its sharded parameters"
            )
    missing = sharded - stepped
    if foreign and missing:
        raise ValueError(
            f"{name_of(optimizers)} lacks {len(missing)} of {len(sharded)} sharded parameters and "
            f"has {len(foreign)} that the model does not have: fully_shard replaces parameters, so "
            "make the optimizer after it"
        )
