"""Settings of Lightning that resilin does not support: rejected with both values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer

from resilin.compat.lightning_names import results_of
from resilin.training.bridge.home import Home

_OWN = {
    "ddp_comm_hook": "the reduction of the gradient weighs it",
    "ddp_comm_state": "the reduction of the gradient weighs it",
    "ddp_comm_wrapper": "the reduction of the gradient weighs it",
    "model_averaging_period": "replicas are the same after each step",
}
_TRAINER = {
    "accumulate_grad_batches": (1, "the loader accumulates: use max_local_bsz="),
    "overfit_batches": (0.0, "it needs a sampler of its own: train on a subset of the data"),
    "limit_train_batches": (1.0, "an epoch is the loader's: use max_steps="),
    "reload_dataloaders_every_n_epochs": (0, "the loader continues its order from epoch to epoch"),
    "val_check_interval": (
        1.0,
        "how many steps an epoch has is not known before: use 1.0, or a number of steps",
    ),
}
"""The value that a setting of the Trainer must have, and why."""


def check_strategy(arguments: Mapping[str, Any]) -> None:
    """Reject arguments of `DDPStrategy` that are not supported.

    Raises:
        ValueError: Names the argument, its value, and why it must be None.
    """
    for name, reason in _OWN.items():
        if (value := arguments.get(name)) is not None:
            raise ValueError(f"{name} ({value!r}) must be None: {reason}")


def check_sharded(arguments: Mapping[str, Any]) -> None:
    """Reject arguments of `ModelParallelStrategy` that are not supported.

    Raises:
        ValueError: Names the argument, its value, and the value that it must have.
    """
    data = arguments.get("data_parallel_size", "auto")
    if data != "auto":
        raise ValueError(
            f"data_parallel_size ({data!r}) must be left out: it is the number of processes, "
            "which may change"
        )
    tensor = arguments.get("tensor_parallel_size", 1)
    if tensor != 1:
        raise ValueError(
            f"tensor_parallel_size ({tensor!r}) must be left out or 1: all processes are "
            "data-parallel here; for tensor parallelism use AdaptiveDataParallel in a loop of your "
            "own"
        )


def refuse_strategy(strategy: object, own: str) -> NoReturn:
    """Reject a strategy that is not resilin's.

    Args:
        strategy: The strategy.
        own: What it must be instead.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"strategy ({type(strategy).__name__}) must be {own}; FSDP1 (FSDPStrategy) and DeepSpeed "
        "are not supported, since they reduce gradients that nobody can weigh"
    )


def check_trainer(trainer: Trainer, model: LightningModule) -> None:
    """Reject settings of a Trainer that are not supported.

    Raises:
        ValueError: Names the setting, its value, the value that it must have, and why.
    """
    if not model.automatic_optimization:
        raise ValueError(
            f"automatic_optimization (False) of {type(model).__name__} must be True: with manual "
            "optimization use Fabric, or a loop of your own"
        )
    for name, (wanted, reason) in _TRAINER.items():
        by_interval = name == "val_check_interval"
        # A Trainer that validates by time has none.
        value = getattr(trainer, name, "a time") if by_interval else getattr(trainer, name)
        steps = by_interval and isinstance(value, int)
        # Beside it, fast_dev_run sets max_steps to the same number.
        quick = name == "limit_train_batches" and bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if value != wanted and not (steps or quick):
            raise ValueError(f"{name} ({value}) must be {wanted}: {reason}")


def check_accumulation(trainer: Trainer) -> None:
    """Reject accumulation that a callback has switched on during training."""
    if trainer.accumulate_grad_batches != 1:
        wanted, reason = _TRAINER["accumulate_grad_batches"]
        raise ValueError(
            f"accumulate_grad_batches ({trainer.accumulate_grad_batches}) must be {wanted}: "
            f"{reason}"
        )


def check_synced_logs(trainer: Trainer) -> None:
    """Reject synced logging in `training_step`, in a step that has several micro-batches.

    It communicates in each of them, and replicas may run different numbers of micro-batches.

    Raises:
        ValueError: Names the logged value, the size of the step, the rule, and the alternatives.
    """
    results = results_of(trainer)
    if trainer.world_size == 1 or results is None:
        return
    for metric in results.values():
        meta = metric.meta
        if meta.fx == "training_step" and meta.on_step and meta.sync.should:
            micro_batch = Home().micro_batch
            assert micro_batch is not None
            raise ValueError(
                f"self.log({meta.name!r}, on_step=True, sync_dist=True) was called in "
                f"training_step(), in a step of {micro_batch.samples} samples on "
                f"{trainer.world_size} replicas that has several micro-batches per replica. It "
                "communicates in each micro-batch, so every replica would have to run the same "
                "number of them, and replicas may run different numbers. Pass on_step=False, "
                "on_epoch=True, or raise max_local_bsz of the loader to one micro-batch per step"
            )
