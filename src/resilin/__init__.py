"""Elastic PyTorch training.

A job stretches to whatever accelerators exist right now, and batch size, learning rate, gradient
accumulation, data order and state follow. Names are loaded on first use, so that importing
`resilin` or `resilin.core` never loads torch by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilin.core.plan import BatchBounds, BatchPlan
    from resilin.core.rules import PowerRule
    from resilin.core.trace import BatchTrace, CapacityTrace

__version__ = "0.1.0.dev0"

_HOMES = {
    "BatchBounds": "resilin.core.plan",
    "BatchPlan": "resilin.core.plan",
    "BatchTrace": "resilin.core.trace",
    "CapacityTrace": "resilin.core.trace",
    "PowerRule": "resilin.core.rules",
}

__all__ = ["BatchBounds", "BatchPlan", "BatchTrace", "CapacityTrace", "PowerRule"]


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'resilin' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted([*globals(), *_HOMES])
