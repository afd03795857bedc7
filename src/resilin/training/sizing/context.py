"""The parts of a job that sizing reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from resilin.core.noise import Noise
from resilin.engine.base import Engine
from resilin.training.events import Events
from resilin.training.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingContext:
    """The parts of the job that sizing reads, and those that it writes events to."""

    engine: Engine
    """The engine of the job."""
    timeline: Timeline
    """The timeline of the job."""
    events: Events
    """The events, to which decisions are reported."""
    has_model: Callable[[], bool]
    """Returns whether a model is being trained: it counts the steps then."""
    tokens_per_step: Callable[[], float | None]
    """Returns the tokens in one reference step, if the model was told."""
    noise: Callable[[], Noise | None]
    """Returns the noise of the gradient, per sample; None until it was measured."""
    sync_seconds: Callable[[], float | None]
    """Returns how long the newest step that is known waited for the reduction of its gradient."""
    has_started: Callable[[], bool]
    """Returns whether the job has started: what a loop sets from then on is a part of the state."""


class KeptSizes(Protocol):
    """The part of a loader's batch sizes that survives a new loader, or a restart of the job."""

    chosen: int | str | None
    """The batch size that the loop has set, or in words what else it has set."""
    sizes: object
    """The `BatchSizes` of the loader that has trained before."""
