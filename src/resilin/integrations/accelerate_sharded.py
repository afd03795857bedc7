"""Accelerate with FSDP2: `accelerator.prepare` shards the model, and the step stays resilin's.

Accelerate shards, keeps mixed precision and writes its checkpoint folders. What it would do to the
gradient of a sharded model does not fit a step whose micro-batches are unequal, so these methods of
the accelerator are replaced: `no_sync`, which would leave micro-batches unreduced, and clipping,
which counts every shard once. FSDP1, DeepSpeed and further dimensions of a mesh are refused.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from resilin.compat import accelerate_names
from resilin.training.bridge.carried import own_step
from resilin.training.bridge.home import refuse_sharded
from resilin.training.parallel import AdaptiveDataParallel

logger = logging.getLogger("resilin")

_USE_FSDP = "ACCELERATE_USE_FSDP"
"""Variable that Accelerate sets for a plugin, whether or not it then shards."""


def refuse_kind(accelerator: Any) -> None:
    """Reject ways to divide a model that resilin does not train, and warn if none is used.

    Raises:
        ValueError: The accelerator uses one of them.
    """
    kind = accelerator.distributed_type.value
    config = getattr(accelerator, "parallelism_config", None)  # accelerate 1.10 and later have it
    if kind == "DEEPSPEED":
        raise ValueError(
            f"distributed_type ({kind}) is not supported: the engine of DeepSpeed reduces, clips "
            "and steps on its own; shard with FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if kind == "FSDP" and not accelerate_names.uses_fsdp2(accelerator):
        raise ValueError(
            f"fsdp_version ({accelerate_names.fsdp_version(accelerator)}) must be 2: FSDP1 puts "
            "parameters into flat ones, whose gradients an elastic step cannot weigh"
        )
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise ValueError(
            f"distributed_type ({kind}) is not supported; an elastic step needs one whole model "
            "per process, NO or MULTI_..., or one that is sharded with fsdp_version=2"
        )
    if config is not None and not accelerate_names.uses_fsdp2(accelerator):
        raise ValueError(
            f"parallelism_config ({config}) must be None, or divide a model that is sharded with "
            "fsdp_version=2: each process is a replica"
        )
    for name in () if config is None else ("tp_size", "cp_size", "sp_size"):
        if getattr(config, name, 1) != 1:
            raise ValueError(
                f"{name} ({getattr(config, name)}) of the parallelism_config must be 1: only "
                "dp_shard_size and dp_replicate_size are supported here"
            )
    if kind != "FSDP" and os.environ.get(_USE_FSDP, "").lower() == "true":
        logger.warning(
            "the accelerator has an FSDP plugin and does not shard (distributed_type %s): each "
            "process holds the whole model",
            kind,
        )


def shard(accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Let the accelerator shard a model, and replace the parameters of its optimizer.

    Args:
        accelerator: The Accelerator, with FSDP2.
        model: The model; one that this accelerator has sharded stays as it is.
        optimizer: Its optimizer.

    Returns:
        The model and the optimizer as the accelerator has prepared them.

    Raises:
        ValueError: The model is sharded, and not by the accelerator.
    """
    if accelerate_names.is_prepared(model):
        return accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    refuse_sharded(model, "let the accelerator shard it: pass it as it was before fully_shard")
    sharded, prepared = accelerator.prepare(model, optimizer)
    return sharded, prepared


def sharded_methods(accelerator: Any, trained: AdaptiveDataParallel) -> dict[str, Any]:
    """The methods of an accelerator that a sharded model needs otherwise, by name."""
    kind = type(accelerator)

    def no_sync(model: Any) -> AbstractContextManager[None]:
        # Each micro-batch is reduced with its weight, also those that do not complete a step.
        return nullcontext() if model is trained else kind.no_sync(accelerator, model)

    def prepare(*things: Any, **kwargs: Any) -> Any:
        if len(things) == 1 and getattr(things[0], "optimizer", things[0]) is trained.optimizer:
            return accelerator.prepare_optimizer(things[0])
        return kind.prepare(accelerator, *things, **kwargs)

    def get_state_dict(model: Any, unwrap: bool = True) -> Any:
        inner = model.module if model is trained else model
        return kind.get_state_dict(accelerator, inner, unwrap)

    def save_state(*args: Any, **kwargs: Any) -> Any:
        with own_step(trained.optimizer, loads=False):
            return kind.save_state(accelerator, *args, **kwargs)

    def load_state(*args: Any, **kwargs: Any) -> Any:
        with own_step(trained.optimizer, loads=True):
            return kind.load_state(accelerator, *args, **kwargs)

    return {
        "no_sync": no_sync,
        "prepare": prepare,
        "get_state_dict": get_state_dict,
        "save_state": save_state,
        "load_state": load_state,
    }
