"""Hints in the life of a job: measured from when somebody asks for them, sent if a scheduler does.

Without a scheduler, and without a call of `resilin.hints()`, nothing is measured: a step then asks
whether `Job.measured` is None, and no more.
"""

from __future__ import annotations

from resilin.core.hints import JobHints
from resilin.core.plan import BatchPlan
from resilin.training.job import Job
from resilin.training.report.job_hints import accelerator, job_hints
from resilin.training.report.measured import Measured, plan_of
from resilin.training.report.reporter import from_settings


def begin(job: Job) -> None:
    """Measures from the first step on, if the environment names a scheduler."""
    if job.reporter is None and (reporter := from_settings()) is not None:
        job.reporter = reporter
        measure(job)


def measure(job: Job) -> Measured:
    """Measures steps from now on."""
    if job.measured is None:
        job.measured = Measured(job.engine, accelerator())
    return job.measured


def describe(job: Job) -> JobHints:
    """The hints of a job.

    Raises:
        ValueError: Nothing has trained yet.
    """
    measured = measure(job)
    if job.sizes is None and job.timeline.last_step is None:
        raise ValueError("there is nothing to tell before a loader of the job has begun to train")
    return job_hints(job, measured)


# In the life of a step, called only while there are measurements ------------------------------


def step_begins(job: Job, measured: Measured) -> None:
    """Measures the step before this one, and reports if that is due."""
    trained = job.trained
    measured.step_begins(None if trained is None else trained.gradient.sync.seconds())
    me = job.engine.membership
    # The first step after a change shows what the change has cost.
    if job.reporter is not None and me.is_first and measured.generation == me.generation:
        job.reporter.between_steps(measured, lambda: describe(job))


def committed(job: Job, measured: Measured, plan: BatchPlan | None) -> None:
    """Takes in that a step was committed."""
    last = job.timeline.last_step
    assert last is not None
    if plan is None:
        plan = plan_of(last.samples, last.accumulation_steps, job.engine.membership)
    measured.committed(plan, job.timer.usual)


def epoch_over(job: Job, measured: Measured) -> None:
    """Takes in that an epoch is over."""
    by_progress = job.trained is None or job.trained.scaling.clock == "progress"
    measured.epoch_over(job.epoch, job.clock.progress if by_progress else job.clock.sample_steps)


def finish(job: Job) -> None:
    """Sends the last hints of the training, if there is a scheduler."""
    if job.reporter is not None and job.engine.membership.is_first and job.timeline.last_step:
        job.reporter.finish(lambda: describe(job))
