"""Elastic PyTorch training.

A job stretches to whatever accelerators exist right now, and batch size, learning rate, gradient
accumulation, data order and state follow. Names are loaded on first use, so that importing
`resilin` or `resilin.core` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilin.core.batch_schedule import BatchSchedule
    from resilin.core.clock import Schedule
    from resilin.core.plan import BatchBounds, BatchPlan
    from resilin.core.ramp import NoiseRamp
    from resilin.core.rules import PowerRule
    from resilin.core.trace import BatchTrace, CapacityTrace
    from resilin.engine.group import init_process_group
    from resilin.training.data.sampling import sample_generator, sample_rng
    from resilin.training.gates.describe import describe
    from resilin.training.gates.optimizer import accumulate
    from resilin.training.job import current_job, reset_job
    from resilin.training.loader import AdaptiveDataLoader
    from resilin.training.parallel import AdaptiveDataParallel
    from resilin.training.script.accumulator import Accumulator
    from resilin.training.script.checkpoints import (
        checkpoint_to,
        on_one_replica,
        register,
        resume,
        stop_when,
    )
    from resilin.training.script.ema import EMA
    from resilin.training.script.epochs import remaining_epochs_until
    from resilin.training.script.events import events_to, listen, record
    from resilin.training.script.plan import check_split, hints, plan
    from resilin.training.script.progress_bar import progress_bar

__version__ = "0.3.0.dev0"

_HOMES = {
    "Accumulator": "resilin.training.script.accumulator",
    "AdaptiveDataLoader": "resilin.training.loader",
    "AdaptiveDataParallel": "resilin.training.parallel",
    "BatchBounds": "resilin.core.plan",
    "BatchPlan": "resilin.core.plan",
    "BatchSchedule": "resilin.core.batch_schedule",
    "BatchTrace": "resilin.core.trace",
    "CapacityTrace": "resilin.core.trace",
    "EMA": "resilin.training.script.ema",
    "NoiseRamp": "resilin.core.ramp",
    "PowerRule": "resilin.core.rules",
    "Schedule": "resilin.core.clock",
    "accumulate": "resilin.training.gates.optimizer",
    "check_split": "resilin.training.script.plan",
    "checkpoint_to": "resilin.training.script.checkpoints",
    "current_job": "resilin.training.job",
    "describe": "resilin.training.gates.describe",
    "events_to": "resilin.training.script.events",
    "hints": "resilin.training.script.plan",
    "init_process_group": "resilin.engine.group",
    "listen": "resilin.training.script.events",
    "on_one_replica": "resilin.training.script.checkpoints",
    "plan": "resilin.training.script.plan",
    "progress_bar": "resilin.training.script.progress_bar",
    "record": "resilin.training.script.events",
    "register": "resilin.training.script.checkpoints",
    "remaining_epochs_until": "resilin.training.script.epochs",
    "reset_job": "resilin.training.job",
    "resume": "resilin.training.script.checkpoints",
    "sample_generator": "resilin.training.data.sampling",
    "sample_rng": "resilin.training.data.sampling",
    "stop_when": "resilin.training.script.checkpoints",
}

__all__ = [
    "EMA",
    "Accumulator",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "BatchBounds",
    "BatchPlan",
    "BatchSchedule",
    "BatchTrace",
    "CapacityTrace",
    "NoiseRamp",
    "PowerRule",
    "Schedule",
    "accumulate",
    "check_split",
    "checkpoint_to",
    "current_job",
    "describe",
    "events_to",
    "hints",
    "init_process_group",
    "listen",
    "on_one_replica",
    "plan",
    "progress_bar",
    "record",
    "register",
    "remaining_epochs_until",
    "reset_job",
    "resume",
    "sample_generator",
    "sample_rng",
    "stop_when",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use."""
    if name == "keras":
        # A module, and none of the names that are imported with a star: Keras is an extra.
        return import_module("resilin.keras")
    if name not in _HOMES:
        raise AttributeError(f"module 'resilin' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted([*globals(), *_HOMES])
