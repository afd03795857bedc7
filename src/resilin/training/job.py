"""The current job: the one thing that loader, model and epochs share without being told.

It is the only hidden global of resilin. Its parts answer one question each: `timeline` how far it
has come, `iterations` what the loop works on, `events` who hears of it, `registry` and `recovery`
what survives. `reset_job()` starts a new one, as tests and notebooks need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilin.core.clock import Clock
from resilin.engine.base import Engine
from resilin.engine.group import detect
from resilin.training.ballot import Voter
from resilin.training.data.iteration import Iterations
from resilin.training.events import Events
from resilin.training.records import Left, MicroBatch
from resilin.training.report.measured import Measured
from resilin.training.report.recorder import Recorder
from resilin.training.report.reporter import Reporter
from resilin.training.sizing.autoscale import Autoscaler
from resilin.training.sizing.batch_size import BatchSizes
from resilin.training.state.live import LiveState
from resilin.training.state.randomness import RandomStates
from resilin.training.state.recovery import Recovery
from resilin.training.state.registry import Registry
from resilin.training.state.settings import StateSettings
from resilin.training.step_timer import StepTimer
from resilin.training.timeline import Timeline

if TYPE_CHECKING:
    from resilin.training.step import Steps


@dataclass(slots=True)
class Job:
    """The parts of one training job.

    The parts meet here. The job itself does nothing.
    """

    timeline: Timeline = field(default_factory=Timeline)
    """Progress of the job."""
    timer: StepTimer = field(default_factory=StepTimer)
    """Durations of its steps on this replica."""
    iterations: Iterations = field(init=False)
    """The open iterations over loaders, and the micro-batch that the loop works on."""
    events: Events = field(init=False)
    """Its listeners."""
    registry: Registry = field(init=False)
    """Everything with state."""
    state_settings: StateSettings | None = None
    """Settings of its state, if the script sets any."""
    recovery: Recovery | None = None
    """Keeps and restores that state; None until the job has started."""
    live: LiveState | None = None
    """Follows changes of members without a restart; None where each change restarts the job."""
    random: RandomStates | None = None
    """The random generators of this replica; None until the job has started."""
    recorder: Recorder | None = None
    """Reports the steps; None until the job has started."""
    measured: Measured | None = None
    """Its speed, as it measures it for a scheduler; None while nobody asks for hints."""
    reporter: Reporter | None = None
    """Sends its hints to the scheduler of a cluster; None outside of one."""
    trained: Steps | None = None
    """The model that is being trained, with its gradient and its gates."""
    autoscaler: Autoscaler | None = None
    """Chooses the batch size of the loader that trains, if anything does."""
    sizes: BatchSizes | None = None
    """Batch sizes of the loader that trains; None before one of resilin's has begun."""
    sized_by_noise: bool = False
    """Whether the batch size of that loader depends on the noise, which is measured then."""
    voters: list[Voter] = field(default_factory=list)
    """Members of the ballots, in the same order on all replicas."""
    left: Left | None = None
    """What the last pass over the data that trains has left; None before its end."""
    torn: bool = False
    """Whether an error came out of the optimizer's step: it may have changed some parameters."""
    extensions: dict[str, Any] = field(default_factory=dict)
    """Objects that integrations of frameworks keep for the length of the job, by name."""
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        """Makes the parts that depend on others, and registers the job itself."""
        self.iterations = Iterations(self.timeline)
        self.events = Events(lambda: (self.timeline.clock.steps, self.engine.membership.generation))
        self.registry = Registry(lambda: self.timeline.clock.steps)
        self.registry.add("job", self)

    @property
    def engine(self) -> Engine:
        """The engine, which knows the members; detected on first use."""
        if self._engine is None:
            self._engine = detect()
        return self._engine

    # What scripts read ---------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """Steps, samples, tokens and progress committed so far."""
        return self.timeline.clock

    @property
    def epoch(self) -> int:
        """Epochs of the user's loop that are done."""
        return self.timeline.epoch

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch that the loop body works on; None outside a resilin loader."""
        return self.iterations.micro_batch

    @property
    def model(self) -> Any:
        """The `AdaptiveDataParallel` that is being trained; None if there is none."""
        return None if self.trained is None else self.trained.face

    @property
    def loader(self) -> Any:
        """The loader that handed it out; None outside a resilin loader."""
        current = self.iterations.current
        return None if current is None else current.loader

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Clocks, epoch and the number of replicas, for checkpoints."""
        state = self.timeline.state(self.engine.membership.num_replicas)
        if self.reporter is not None and self.measured is not None:
            # On all replicas, or none: the environment of the job says that there is a scheduler.
            state["measured"] = self.measured.state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.timeline.load(state)
        if self.measured is not None and (measured := state.get("measured")) is not None:
            self.measured.restore(measured)


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
    if _current.reporter is not None:
        _current.reporter.close()
    if _current.trained is not None:
        _current.model.release()
    _current.iterations.close()
    if _current._engine is not None:
        _current._engine.pulse.reset()
    _current = Job()
    return _current
