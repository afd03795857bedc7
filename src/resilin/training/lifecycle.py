"""The life of a step, in one file: a job starts, steps begin, are made and committed, epochs end.

All replicas come by here at the same steps, whoever asks: the loader before each step, or the model
where the loader is not one of resilin's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from resilin.core.hang import Phase
from resilin.core.membership import Membership
from resilin.engine import environment, lost, pulse
from resilin.engine.changes import Changes
from resilin.training import hints
from resilin.training.gradient.step import StepGradient
from resilin.training.job import Job
from resilin.training.leaving import finish, save_at_end
from resilin.training.model import TrainedModel
from resilin.training.records import StepOutcome
from resilin.training.report.recorder import Recorder, log_directory
from resilin.training.state.body import Body
from resilin.training.state.live import LiveState, Parts
from resilin.training.state.randomness import NAME, RandomStates
from resilin.training.state.recovery import Recovery
from resilin.training.state.settings import from_environment

logger = logging.getLogger("resilin")


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


def show_forward(job: Job, model: TrainedModel) -> None:
    """Shows the agent that a forward pass begins.

    A long evaluation then counts as progress, and so does a step of many micro-batches.

    Args:
        job: The job that the model belongs to.
        model: The model; one that was released shows nothing.
    """
    if job.recovery is not None and job.trained is model:
        phase = Phase.STEP if model.trains else Phase.BETWEEN
        job.engine.pulse.beat(phase, job.clock.steps)


def _recovery(job: Job) -> Recovery:
    """Restores the newest state there is."""

    def close_log() -> None:
        if job.recorder is not None:
            job.recorder.close()

    def flush_log() -> None:
        if job.recorder is not None:
            job.recorder.flush()

    recovery = Recovery(
        job.state_settings or from_environment(),
        job.engine,
        job.registry,
        job.timeline,
        job.events,
        close_log=close_log,
        flush_log=flush_log,
    )
    if job.live is None:
        recovery.start()
    else:
        job.live.start(recovery, close_log)
        job.voters.append(job.live)
    if recovery.active:
        job.voters.append(recovery)
    return recovery


def _live(job: Job, changes: Changes) -> LiveState:
    """Follows changes of members, in a job that none of them restarts."""

    def module() -> nn.Module | None:
        return None if job.trained is None else job.model.module

    def gradient() -> StepGradient | None:
        return None if job.trained is None else job.trained.gradient

    body = Body(job.registry, module)
    return LiveState(Parts(job.engine, job.registry, job.timeline, body, gradient), changes)


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
            job.live = _live(job, job.engine.changes)
        job.recovery = _recovery(job)
        job.recorder = Recorder(
            job.timeline,
            job.events,
            job.engine,
            job.timer,
            directory=log_directory(job.events, job.state_settings),
            resumed=job.recovery.resumed_from,
        )
        if job.live is not None:
            job.live.report = job.recorder.reformed
        if job.engine.pulse.shown:
            _show(job)
        save_at_end()
    job.recovery.listen()
    return job.recovery


# One step, in the order of its life ------------------------------------------------------------


def begin_step(job: Job, asked_by: object = None) -> Membership:
    """Ends the last step and begins the next one. Called by all replicas before each step.

    Args:
        job: The job.
        asked_by: The iteration that asks for the step; None for a loader that is not resilin's.

    Returns:
        Who takes part in the step.
    """
    begins = job.iterations.begins_step(asked_by)
    recovery, recorder = _end_body(job, asked_by, ends_step=begins)
    recovery.between_steps()
    assert job.random is not None
    job.random.begin_step()
    if not begins:
        # Another loader has begun the step: within it nobody joins or leaves.
        return job.engine.membership
    membership = job.engine.begin_step()
    job.timer.begin()
    if job.measured is not None:
        hints.step_begins(job, job.measured)
    recorder.step_begins()
    job.engine.pulse.begin_step()
    if job.live is not None:
        job.live.step_begins()
    return membership


def make_step(job: Job, own: Callable[[], Any]) -> Any:
    """Makes a step whose gradient is complete; called by `optimizer.step`.

    The engine is asked before anything is changed: the parameters of a step that a lost replica
    took part in stay as they were, and it can be issued again.

    Args:
        job: The job.
        own: The optimizer's own `step`.

    Returns:
        Its result; None if the step failed.
    """
    model = job.trained
    assert model is not None
    job.iterations.check_unused(told=model.scaling.reference.is_told)
    model.prepare()
    if not job.engine.all_committed():
        commit_step(job, StepOutcome.FAILED)
        return None
    model.check_replicas()
    try:
        result = model.step_optimizer(own)
    except BaseException:
        job.torn = True
        raise
    job.torn = False
    commit_step(job, StepOutcome.COMMITTED)
    return result


def commit_step(job: Job, outcome: StepOutcome) -> None:
    """Ends a step with this outcome: the one place where clock, cursor and scheduler move.

    - committed: clock, averages, report, votes, cursor and scheduler move, in this order;
    - skipped: votes count, and the cursor moves when the loader is asked for the next step;
    - failed: nothing moves, and the loader issues the step again. Buffers and random generators
      keep what the failed attempt did to them. A loader that is not one of resilin's cannot issue
      it again: its samples are lost.
    """
    model, timeline = job.trained, job.timeline
    assert model is not None
    if outcome is StepOutcome.FAILED:
        model.fail_step()
        reissued = job.iterations.fail()
        if job.live is not None:
            job.live.step_lost()
        # A member that is lost is reported by the launcher, and the step is not lost.
        level = logging.DEBUG if job.live is not None and reissued else logging.WARNING
        logger.log(
            level,
            "step %d failed: not all replicas took part in it. %s",
            timeline.clock.steps,
            "It is issued again" if reissued else "Its loader cannot issue its samples again",
        )
        return
    if outcome is StepOutcome.SKIPPED:
        model.end_step(measured=False)
        return
    before = model.read_schedule()
    plan, clock = job.iterations.plan, timeline.clock
    timeline.clock, timeline.last_step = model.advance(clock, plan)
    model.made_step(clock, timeline.clock)
    timeline.committed_in = job.engine.membership.generation
    job.engine.committed()
    if job.measured is not None:
        hints.committed(job, job.measured, plan)
    if job.recorder is not None:
        samples = timeline.last_step.samples
        job.recorder.committed(model.scaling, model.optimizer, samples, plan)
    model.end_step(measured=model.gradient.step.measure)
    job.iterations.commit(timeline.clock.progress - clock.progress)
    model.advance_schedule(before)


def end_lost_step(job: Job) -> None:
    """Ends a step that was lost with a member, when the loop asks for what follows it."""
    if job.trained is not None and job.trained.gradient.step.lost:
        commit_step(job, StepOutcome.FAILED)


def end_pass(job: Job) -> None:
    """Ends a pass over the data for all replicas: none leaves it while another lacks its last step.

    What a script does after it, such as a step of a scheduler, must not be done twice.
    """
    if job.live is not None:
        job.engine.ask(lambda members: members.gather(None), between_steps=True)


def end_epoch(job: Job, asked_by: object = None, *, at_once: bool = True) -> None:
    """Ends the last step of an epoch.

    Args:
        job: The job.
        asked_by: The iteration that asks.
        at_once: Whether the script has done nothing since; else a copy would have it done twice.
    """
    recovery, recorder = _end_body(job, asked_by)
    recorder.epoch_over()
    if job.measured is not None:
        hints.epoch_over(job, job.measured)
    if at_once:
        recovery.between_steps()


def end_training(job: Job) -> None:
    """Ends the last step of a loop that need not end where an epoch does."""
    job.iterations.end_epoch()
    recovery, _ = _end_body(job)
    recovery.between_steps()
    recovery.finish()
    finish(job)


def leave_out_pass(job: Job) -> None:
    """Takes the place of a pass over the data that was complete before a restart."""
    assert job.random is not None
    job.random.leave_out_pass()


def _end_body(
    job: Job, asked_by: object = None, *, ends_step: bool = True
) -> tuple[Recovery, Recorder]:
    """Ends the loop body of the last step, if there was one; it is reported before all else."""
    recovery = start(job)
    if job.trained is not None:
        job.trained.end_body()
        job.trained.flow.close(asked_by)
    assert job.recorder is not None
    if ends_step:
        job.engine.pulse.beat(Phase.BETWEEN, job.clock.steps)
        job.timer.end()
        job.recorder.step_over()
    return recovery, job.recorder
