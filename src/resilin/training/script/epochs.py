"""The loop over epochs: resilin's own goes on where a job was; others say which epoch it is."""

from __future__ import annotations

from collections.abc import Iterator

from resilin.core import _validate
from resilin.core.hang import Phase
from resilin.training.job import current_job
from resilin.training.lifecycle import start


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Yields the epochs that are left, from the current one on.

    The job starts here: state that a memory copy or a checkpoint holds is restored before the
    first epoch. In a new job these are all of them; in one that was resumed, the first is the
    epoch that was under way. An epoch counts as done when the loop asks for the next one.

    Args:
        num_epochs: How many epochs the whole job has.
    """
    job = current_job()
    job.timeline.total_epochs = _validate.whole("num_epochs", num_epochs, at_least=0)
    recovery = start(job)
    try:
        while job.epoch < num_epochs:
            job.timeline.epoch_is_new = True
            job.iterations.cursors.begin_epoch()
            yield job.epoch
            job.timeline.epoch += 1
            job.engine.pulse.beat(Phase.BETWEEN, job.clock.steps)
            recovery.between_epochs()
    finally:
        job.iterations.cursors.end_epochs()
    recovery.finish()
    job.engine.pulse.beat(Phase.DONE, job.clock.steps)


def begin_epoch(epoch: int) -> None:
    """Says which epoch begins, in a loop over epochs that another framework runs.

    The first call starts the job. The epoch before counts as done when the next one begins.

    Args:
        epoch: Epochs that are done.
    """
    job = current_job()
    recovery = start(job)
    if epoch != job.epoch:
        job.timeline.epoch = epoch
        recovery.between_epochs()
    job.timeline.epoch_is_new = True
