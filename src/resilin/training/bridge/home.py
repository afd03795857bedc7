"""`Home`: the job that a framework's loop trains, as the integration of that framework sees it.

An integration makes one where it needs the job and has neither a loader nor a model of resilin at
hand. It is the one place from which integrations look the current job up.
"""

from __future__ import annotations

from resilin.core.clock import Clock
from resilin.engine.base import Engine
from resilin.training.job import Job, current_job
from resilin.training.lifecycle import end_training
from resilin.training.records import MicroBatch, StepSizes
from resilin.training.state.registry import Registry


class Home:
    """The job that is current when this is made.

    It stays with that job: after `reset_job()`, make a new one.
    """

    __slots__ = ("job",)

    def __init__(self) -> None:
        self.job: Job = current_job()
        """The job itself, for what is not below."""

    @property
    def is_current(self) -> bool:
        """Whether no other job has been started since."""
        return self.job is current_job()

    @property
    def engine(self) -> Engine:
        """The engine of the job."""
        return self.job.engine

    @property
    def registry(self) -> Registry:
        """Everything with state."""
        return self.job.registry

    @property
    def clock(self) -> Clock:
        """Steps, samples, tokens and progress committed so far."""
        return self.job.clock

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The micro-batch that the loop body works on; None outside a resilin loader."""
        return self.job.micro_batch

    @property
    def last_step(self) -> StepSizes | None:
        """Sizes of the last step; None until this process has committed one."""
        return self.job.timeline.last_step

    def set_epoch(self, epoch: int) -> None:
        """Says how many epochs are done, without anything that is due between two epochs."""
        self.job.timeline.epoch = epoch

    def set_total_epochs(self, total: int | None) -> None:
        """Says how many epochs the whole job has; None if that is not known."""
        self.job.timeline.total_epochs = total

    def end_training(self) -> None:
        """Ends the last step, and with it the training."""
        end_training(self.job)
