"""The parts of a job that sizing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    lower_phi: Callable[[float], float | None]
    """Returns the lower bound of the noise scale at this confidence, in samples, if known."""
    optimizer: Callable[[], str | None]
    """Returns the name of the optimizer's class, if there is a model."""
    sync_seconds: Callable[[], float | None]
    """Returns how long the newest step that is known waited for the reduction of its gradient."""
    has_started: Callable[[], bool]
    """Returns whether the job has started: what a loop sets from then on is a part of the state."""


class SizePart(Protocol):
    """A part of the batch sizes of a loader that votes and has state."""

    def votes(self) -> tuple[float, ...]:
        """Numbers of this replica for the ballot of a step."""
        ...

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes the sums of these numbers over all replicas."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints; the same on all replicas."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        ...


class KeptSizes(Protocol):
    """The part of a loader's batch sizes that survives a new loader, or a restart of the job."""

    chosen: int | str | None
    """The batch size that the loop has set, or in words what else it has set."""
    sizes: object
    """The `BatchSizes` of the loader that has trained before."""
