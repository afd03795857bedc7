"""The ends in the life of a job: of a pass over the data, of an epoch, of the training."""

from __future__ import annotations

from resilin.training import hints
from resilin.training.job import Job
from resilin.training.leaving import finish
from resilin.training.step import end_body


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
    recovery, recorder = end_body(job, asked_by)
    recorder.epoch_over()
    if job.measured is not None:
        hints.epoch_over(job, job.measured)
    if at_once:
        recovery.between_steps()


def end_training(job: Job) -> None:
    """Ends the last step of a loop that need not end where an epoch does."""
    job.iterations.end_epoch()
    recovery, _ = end_body(job)
    recovery.between_steps()
    recovery.finish()
    finish(job)


def leave_out_pass(job: Job) -> None:
    """Takes the place of a pass over the data that was complete before a restart."""
    assert job.random is not None
    job.random.leave_out_pass()
