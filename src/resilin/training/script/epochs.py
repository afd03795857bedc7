"""The loop over epochs: resilin's own resumes where a job was; others report their epoch."""

from __future__ import annotations

from collections.abc import Iterator

from resilin.compat.python_names import leaves_by_exception
from resilin.core import _validate
from resilin.core.hang import Phase
from resilin.training.job import current_job
from resilin.training.leaving import finish, leave
from resilin.training.start import start


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Iterate over the remaining epochs, from the current one on.

    The job starts here: state in a memory copy or a checkpoint is restored before the first epoch.
    In a new job these are all epochs; in a resumed one, the first is the epoch that was
    interrupted. An epoch counts as completed when the loop asks for the next one. A loop that is
    left before, by `break` or `return`, saves the last committed step.

    Args:
        num_epochs: Number of epochs of the whole job.
    """
    job = current_job()
    job.timeline.total_epochs = _validate.whole("num_epochs", num_epochs, at_least=0)
    recovery = start(job)
    pulse = job.engine.pulse
    try:
        while job.epoch < num_epochs:
            pulse.epochs(job.epoch, num_epochs)
            job.timeline.epoch_is_new = True
            job.iterations.cursors.begin_epoch()
            yield job.epoch
            job.iterations.end_epoch()
            job.timeline.epoch += 1
            pulse.beat(Phase.BETWEEN, job.clock.steps)
            recovery.between_epochs()
    except GeneratorExit:
        if not leaves_by_exception():
            leave(job)
        raise
    finally:
        job.iterations.cursors.end_epochs()
    recovery.finish()
    pulse.epochs(job.epoch, num_epochs)
    finish(job)


def begin_epoch(epoch: int) -> None:
    """Report the start of an epoch, in a loop over epochs that another framework runs.

    The first call starts the job. An epoch counts as completed when the next one begins.

    Args:
        epoch: Number of completed epochs.
    """
    job = current_job()
    recovery = start(job)
    if epoch != job.epoch:
        job.iterations.end_epoch()
        job.timeline.epoch = epoch
        recovery.between_epochs()
    job.timeline.epoch_is_new = True
