"""Accelerate: the flag for the micro-batch that completes a step. Loads no Accelerate."""

from __future__ import annotations

from typing import Any

from resilin.compat.names import Package

ACCELERATE = Package("accelerate", tested=("1.3.0", "1.15.0"))
"""Accelerate, and the names of it that resilin uses."""

_SCHEDULERS = ACCELERATE.name(
    "accelerate:Accelerator._schedulers", "saves the scheduler in checkpoints", instance=True
)
_DO_SYNC = ACCELERATE.name(
    "accelerate:Accelerator._do_sync", "sets which micro-batch completes a step"
)
_SET_SYNC = ACCELERATE.name(
    "accelerate.state:GradientState._set_sync_gradients", "sets which micro-batch completes a step"
)
SYNC = _DO_SYNC.attribute
"""Method that `accelerator.accumulate` calls to know whether a micro-batch completes a step."""
_PREPARED = "_is_accelerate_prepared"
"""Mark of a model that `accelerator.prepare` has seen."""


def check(accelerator: Any) -> None:
    """Check that an accelerator has all names that the functions below use.

    Raises:
        MissingNameError: One is gone.
    """
    _SCHEDULERS.of(accelerator)
    _DO_SYNC.of(accelerator)
    _SET_SYNC.of(accelerator.gradient_state)


def uses_fsdp2(accelerator: Any) -> bool:
    """Whether it shards models by FSDP2, which Accelerate 1.6 and later can."""
    return bool(getattr(accelerator, "is_fsdp2", False))


def fsdp_version(accelerator: Any) -> int:
    """Version of the FSDP that it shards models by."""
    return int(getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1))


def add_scheduler(accelerator: Any, scheduler: Any) -> None:
    """Make the accelerator save and load a scheduler."""
    _SCHEDULERS.of(accelerator).append(scheduler)


def mark_prepared(model: Any) -> None:
    """Mark a model as prepared, so that `accelerator.prepare` leaves it alone."""
    setattr(model, _PREPARED, True)


def is_prepared(model: Any) -> bool:
    """Whether `accelerator.prepare` has seen a model."""
    return bool(getattr(model, _PREPARED, False))


def set_completes(accelerator: Any, completes: bool) -> None:
    """Set whether the current micro-batch completes a step."""
    accelerator.gradient_state._set_sync_gradients(completes)
