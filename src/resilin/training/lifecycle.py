"""The places between two steps: where a job starts, goes on, and is told of.

All replicas come by here at the same steps, whoever asks: the loader before each step, or the model
where the loader is not one of resilin's.
"""

from __future__ import annotations

import torch

from resilin.core.hang import Phase
from resilin.engine import environment, lost
from resilin.training.job import Job
from resilin.training.report.recorder import Recorder, log_directory
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
    pulse.follow(lambda: job.model is not None and not job.model.training)

    def forward_begins(module: torch.nn.Module, _: object) -> None:
        trains = module.training and torch.is_grad_enabled()
        pulse.beat(Phase.STEP if trains else Phase.BETWEEN, job.clock.steps)

    if isinstance(job.model, torch.nn.Module):
        # So that a long evaluation is seen to get on, and a step of many micro-batches, too.
        job.model.register_forward_pre_hook(forward_begins)


def start(job: Job) -> Recovery:
    """Starts the job, once: restores the newest state there is."""
    if job.recovery is None:
        environment.log_to_stderr()
        if job.engine.restartable:
            lost.tell_briefly(job.engine.replica)
        job.random = RandomStates(job.timeline, job.engine)
        job.registry.add_own(NAME, job.random)
        job.recovery = Recovery(job, job.state_settings or from_environment())
        job.recovery.start()
        job.recorder = Recorder(job, log_directory(job), job.recovery.resumed_from)
        if job.engine.pulse.shown:
            _show(job)
    assert isinstance(job.recovery, Recovery)
    job.recovery.listen()
    return job.recovery


def _step_over(job: Job, asked_by: object = None) -> tuple[Recovery, Recorder]:
    """The last step is over, if there was one: it is told of before anything else is done."""
    recovery = start(job)
    if job.model is not None:
        job.model.body_over()
    job.engine.pulse.beat(Phase.BETWEEN, job.clock.steps)
    assert isinstance(job.recorder, Recorder)
    if job.model is not None:
        job.model.close_step(asked_by)
    job.recorder.step_over()
    return recovery, job.recorder


def begin_step(job: Job, asked_by: object = None) -> None:
    """Called before each step of training: the last one is over, and the next may begin."""
    recovery, recorder = _step_over(job, asked_by)
    recovery.between_steps()
    job.engine.begin_step()
    assert job.random is not None
    job.random.begin_step()
    recorder.step_begins()
    job.engine.pulse.begin_step()


def leave_out_pass(job: Job) -> None:
    """Called in place of a pass over the data that was complete before a restart."""
    assert job.random is not None
    job.random.leave_out_pass()


def end_epoch(job: Job, asked_by: object = None) -> None:
    """Called behind the last step of an epoch."""
    recovery, recorder = _step_over(job, asked_by)
    recorder.epoch_over()
    recovery.between_steps()


def end_training(job: Job) -> None:
    """Called behind the last step of a loop that need not end where an epoch does."""
    recovery, _ = _step_over(job)
    recovery.between_steps()
    recovery.finish()
    job.engine.pulse.beat(Phase.DONE, job.clock.steps)
