"""The start of a job: its state is restored, and everything that follows its steps is made."""

from __future__ import annotations

from resilin.core.hang import Phase
from resilin.engine import environment, lost, pulse
from resilin.training import hints
from resilin.training.job import Job
from resilin.training.leaving import save_at_end
from resilin.training.report.recorder import Recorder, log_directory
from resilin.training.state.live import LiveState
from resilin.training.state.randomness import NAME, RandomStates
from resilin.training.state.recovery import Recovery
from resilin.training.state.settings import from_environment


class _Arrivals:
    """Shows the agent that this replica waits for the others, and when it does so no more.

    It votes for nothing: it is asked when the replica's own part of the gradient is complete.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def votes(self) -> tuple[float, ...]:
        """Nothing."""
        self._job.engine.pulse.beat(Phase.WAITING, self._job.clock.steps)
        return ()

    def counted(self, votes: tuple[float, ...]) -> None:
        """The reduction is over."""
        self._job.engine.pulse.beat(Phase.AFTER, self._job.clock.steps)


def _show(job: Job) -> None:
    """Shows the agent from now on what this replica does."""
    pulse = job.engine.pulse
    job.voters.append(_Arrivals(job))
    pulse.start(job.clock.steps)
    pulse.follow(lambda: job.trained is not None and not job.trained.training)


def _recovery(job: Job) -> Recovery:
    """Restores the newest state there is."""
    recovery = Recovery(job, job.state_settings or from_environment())
    if job.live is None:
        recovery.start()
    else:
        job.live.start(recovery)
        job.voters.append(job.live)
    if recovery.active:
        job.voters.append(recovery)
    return recovery


def start(job: Job) -> Recovery:
    """Starts the job, once: restores the newest state there is."""
    if job.recovery is None:
        environment.log_to_stderr()
        if job.engine.restartable:
            lost.shorten_traceback(job.engine.membership.replica, pulse.tell_error)
        job.random = RandomStates(job.timeline, job.engine)
        job.registry.add_own(NAME, job.random)
        hints.begin(job)
        if job.engine.changes is not None:
            job.live = LiveState(job, job.engine.changes)
        job.recovery = _recovery(job)
        job.recorder = Recorder(
            job.timeline,
            job.events,
            job.engine,
            job.timer,
            directory=log_directory(job.events, job.state_settings),
            resumed=job.recovery.resumed_from,
        )
        if job.engine.pulse.shown:
            _show(job)
        save_at_end()
    job.recovery.listen()
    return job.recovery
