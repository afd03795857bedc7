"""`remaining_epochs_until`: the loop over epochs that goes on where a job was."""

from __future__ import annotations

from collections.abc import Iterator

from resilin.core import _validate
from resilin.training.job import current_job
from resilin.training.recovery import start


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Yields the epochs that are left, from the current one on.

    The job starts here: state that a memory copy or a checkpoint holds is restored before the
    first epoch. In a new job these are all of them; in one that was resumed, the first is the
    epoch that was under way. An epoch counts as done when the loop asks for the next one.

    Args:
        num_epochs: How many epochs the whole job has.
    """
    job = current_job()
    job.total_epochs = _validate.whole("num_epochs", num_epochs, at_least=0)
    recovery = start(job)
    while job.epoch < num_epochs:
        job.epoch_is_new = True
        yield job.epoch
        job.epoch += 1
        recovery.between_epochs()
    recovery.finish()
