"""The current job: the one thing that loader, model and epochs share without being told.

It is the only hidden global of resilin. It holds the clocks, and what is being trained on right
now: the loader sets `micro_batch` before it hands out data, the model reads it to know what its
gradient weighs. `reset_job()` starts a new one, as tests and notebooks need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict

from torch import Tensor
from torch.optim import Optimizer

from resilin.core.clock import Clock, Reference
from resilin.core.events import Event
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.profile import StepProfile
from resilin.core.rules import Factors, ScalingRule
from resilin.engine.base import Engine
from resilin.engine.group import detect
from resilin.training.ballot import Voter
from resilin.training.data.cursor import Cursors
from resilin.training.state.randomness import RandomStates
from resilin.training.state.registry import Registry
from resilin.training.state.settings import StateSettings

logger = logging.getLogger("resilin")

Number = float | Tensor
"""What users record: a number, or a tensor with one element."""
Listener = Callable[[Event], None]
"""Who is told of events."""


class Stamp(TypedDict):
    """What every event says."""

    time: float
    step: int
    generation: int


class TrainedModel(Protocol):
    """What the rest of the job may ask of the model."""

    training: bool
    rule: ScalingRule
    optimizer: Optimizer
    tokens_per_step: float | None

    @property
    def gain(self) -> float:
        """Reference steps that the last step was worth."""
        ...

    @property
    def scale(self) -> float:
        """Global batch over reference batch, in the last step."""
        ...

    @property
    def factors(self) -> Sequence[Factors]:
        """What the rule applied to each parameter group in the last step."""
        ...

    def splits_next(self, scale: float) -> bool:
        """Whether one replica splits the next step, of this scale, to measure its noise."""
        ...

    @property
    def sample_noise(self) -> Noise | None:
        """Noise of the gradient, per sample; None until it was measured."""
        ...

    def sync_seconds(self) -> float | None:
        """How long the newest step that is known waited for the reduction of its gradient."""
        ...

    def body_over(self) -> None:
        """The loop body of a step is over."""
        ...

    def drop_step(self) -> bool:
        """Forgets the step that is under way, with its gradient; whether it could."""
        ...

    def close_step(self, asked_by: object = None) -> None:
        """Called when an iteration over a loader asks for the next step: the last one is over."""
        ...

    def release(self) -> None:
        """Gives optimizer, scheduler and scaler their own methods back."""
        ...


class CommittingLoader(Protocol):
    """What model and recorder may ask of the loader."""

    @property
    def current_local_bsz(self) -> int:
        """The largest micro-batch of the current step."""
        ...

    @property
    def accumulation_steps(self) -> int:
        """The most micro-batches that a replica runs in the current step."""
        ...

    def commit(self) -> None:
        """Moves the cursor behind the current step."""
        ...

    def measured_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of the current micro-batch."""
        ...


class BatchChooser(Protocol):
    """What chooses the batch size."""

    @property
    def reference(self) -> int:
        """The reference batch."""
        ...

    @property
    def bounds(self) -> BatchBounds:
        """What the user allows."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch size now."""
        ...

    @property
    def profile(self) -> StepProfile:
        """What is known of step times; the same on all replicas."""
        ...


class JobRecovery(Protocol):
    """What keeps the state of the job, and restores it."""

    def between_steps(self) -> None:
        """Called by all replicas when a step is over and the next one has not begun."""
        ...

    def between_epochs(self) -> None:
        """Called by all replicas between two epochs of the user's loop."""
        ...

    def close(self) -> None:
        """Gives signals their handlers back and ends what runs beside the training."""
        ...


class StepRecorder(Protocol):
    """What tells of the steps."""

    def committed(self, model: TrainedModel, samples: int) -> None:
        """The optimizer has stepped."""
        ...

    def flush(self) -> None:
        """Writes out what is in a buffer."""
        ...

    def close(self) -> None:
        """Tells of the last step, and writes out what is in a buffer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What the loader says about the micro-batch that it has just handed out."""

    index: int
    """Its place among this replica's micro-batches of the step, from 0."""
    last: bool
    """Whether it completes this replica's part of the step."""
    weight: float
    """Samples (or tokens) by which its gradient counts; 0 if none of them are its own."""
    total_weight: float | None
    """The same over all micro-batches of all replicas; None if only a reduction can tell."""
    count: int
    """Samples in it that count."""
    samples: int
    """Samples in the step, over all replicas."""
    scale: float
    """Scale of the step."""
    sample_steps: float
    """Reference steps that the reference run made with these samples."""
    training: bool = True
    """Whether the model may train on it; not if the loop began as an evaluation."""


class StepSizes(NamedTuple):
    """How large a step was."""

    samples: int
    """Samples in it, over all replicas."""
    accumulation_steps: int
    """The most micro-batches that a replica ran."""


@dataclass(slots=True)
class Job:
    """What is being trained, and how far it has come."""

    clock: Clock = field(default_factory=Clock)
    """Steps, samples, tokens and progress committed so far."""
    epoch: int = 0
    """Epochs of the user's loop that are done."""
    total_epochs: int | None = None
    """How many there will be, once `remaining_epochs_until` was told."""
    reference: Reference | None = None
    """The run that the learning rate was tuned for."""
    micro_batch: MicroBatch | None = None
    """What the loop body is working on; None outside a resilin loader."""
    last_step: StepSizes | None = None
    """Sizes of the last step; None until this process has made one."""
    loader: CommittingLoader | None = None
    """The loader that is being iterated."""
    model: TrainedModel | None = None
    """The model that is being trained."""
    registry: Registry = field(init=False)
    """Everything with state."""
    state_settings: StateSettings | None = None
    """How that state is to be kept, if the script says it."""
    recovery: JobRecovery | None = None
    """What keeps that state; None until the job has started."""
    voters: list[Voter] = field(default_factory=list)
    """Who takes part in the ballots, in the same order on all replicas."""
    autoscaler: BatchChooser | None = None
    """What chooses the batch size of the loader that trains, if anything does."""
    listeners: list[Listener] = field(default_factory=list)
    """Who is told of events, as they happen, on this replica."""
    log: Listener | None = None
    """What writes this replica's events down, if anything does."""
    events_dir: Path | None = None
    """Where the script wants them written."""
    recorder: StepRecorder | None = None
    """What tells of the steps; None until the job has started."""
    replays: str = ""
    """Where the batch-size trace comes from that is being replayed, if one is."""
    carried_from: str = ""
    """Which state another framework's checkpoint has brought, in words, if one has."""
    replicas_before: int | None = None
    """How many replicas there were when the state was taken that the job goes on from."""
    cursors: Cursors = field(default_factory=Cursors)
    """How far the loaders that train have come."""
    iteration: Any = None
    """The `Iteration` over a loader that handed out the latest micro-batch."""
    training_passes: list[Any] = field(default_factory=list)
    """The open iterations that train, in the order in which they began."""
    random: RandomStates | None = None
    """The random generators of this replica; None until the job has started."""
    seeded_at: int | None = None
    """The step at which they were seeded anew on all replicas, if that was done."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """What integrations of frameworks keep for the length of the job, by their own names."""
    epoch_is_new: bool = False
    """Whether the loop has begun an epoch and not yet asked a loader for its data."""
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        """Registers itself."""
        self.registry = Registry(lambda: self.clock.steps)
        self.registry.add("job", self)

    @property
    def engine(self) -> Engine:
        """Who is in the job; found out on first use."""
        if self._engine is None:
            self._engine = detect()
        return self._engine

    def measured_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of a micro-batch, for whoever has to know what it takes."""
        return nullcontext() if self.loader is None else self.loader.measured_forward()

    @property
    def is_heard(self) -> bool:
        """Whether anybody would be told of an event of replica 0."""
        return self.log is not None or bool(self.listeners)

    def stamp(self) -> Stamp:
        """When it is: what an event says that happens now."""
        return {
            "time": time.time(),
            "step": self.clock.steps,
            "generation": self.engine.generation,
        }

    def emit(self, event: Event) -> None:
        """Tells of an event. A listener that fails is told of no more; training goes on."""
        if self.log is not None:
            self.log(event)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:  # noqa: PERF203
                logger.exception("%r failed, and is told of no more events", listener)
                self.listeners.remove(listener)

    def state_dict(self) -> dict[str, Any]:
        """Clocks, epoch, and how many replicas there are, for checkpoints."""
        return {
            "clock": self.clock.state(),
            "epoch": self.epoch,
            "replicas": self.engine.num_replicas,
            "seeded_at": self.seeded_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.clock = Clock.from_state(state["clock"])
        self.epoch = int(state["epoch"])
        self.replicas_before = int(state["replicas"])
        self.seeded_at = state.get("seeded_at")

    @property
    def total_steps(self) -> float | None:
        """Length of the run in reference steps, if it is known."""
        if self.total_epochs is None or self.reference is None:
            return None
        if self.reference.steps_per_epoch is None:
            return None
        return self.total_epochs * self.reference.steps_per_epoch


_current = Job()


def current_job() -> Job:
    """The job of this process."""
    return _current


def reset_job() -> Job:
    """Forgets the current job and begins a new one. Models and loaders of the old one are stale."""
    global _current
    if _current.recovery is not None:
        _current.recovery.close()
    if _current.recorder is not None:
        _current.recorder.close()
    if _current.model is not None:
        _current.model.release()
    _current = Job()
    return _current
