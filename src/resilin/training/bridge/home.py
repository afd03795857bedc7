"""`Home`: the job that a framework's loop trains, as the integration of that framework sees it.

An integration makes one where it needs the job and has neither a loader nor a model of resilin at
hand. It is the one place from which integrations look the current job up.
"""

from __future__ import annotations

import os

from torch import Tensor, nn

from resilin.core.clock import Clock
from resilin.engine import environment
from resilin.engine.base import Engine
from resilin.engine.live.refusal import refuse_live
from resilin.training.gradient.sharding import is_sharded
from resilin.training.job import Job, current_job
from resilin.training.lifecycle import end_training
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.records import MicroBatch, StepSizes
from resilin.training.state.registry import Registry


def refuse_live_framework() -> None:
    """Refuse a live job to a framework; integrations call this when they are imported.

    A framework may start process groups as soon as it is configured, before it needs a job.

    Raises:
        ValueError: The job is live, over several machines.
        SystemExit: The job is live: its launcher runs it again without `--live`.
    """
    if environment.LIVE in os.environ:
        refuse_live(
            "a live job needs a loop of your own: a framework starts its own process groups, and "
            "cannot be told that a step is issued again"
        )


def refuse_sharded(model: nn.Module, instead: str) -> None:
    """Refuse a model that is divided among processes, where a framework is not told how.

    A framework clips, saves and restores a model on its own, and for sharded parameters it has to
    do that in another way.

    Args:
        model: The model.
        instead: What to do instead.

    Raises:
        ValueError: The model has sharded parameters.
    """
    if found := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ValueError(
            f"{len(found)} parameters are sharded ({found[0]} is a DTensor), which this framework "
            f"does not know of: {instead}"
        )


def refuse_stream(loader: AdaptiveDataLoader, framework: str) -> None:
    """Refuse data without an index, where a framework counts the steps of an epoch beforehand.

    Args:
        loader: The loader.
        framework: Name of the framework.

    Raises:
        ValueError: The loader has no length.
    """
    if not loader.has_index:
        raise ValueError(
            f"{framework} counts the steps of an epoch beforehand, and nobody knows how many "
            f"samples the stream {type(loader.dataset).__qualname__} has: take data with "
            "__len__ and __getitem__, or a loop of your own"
        )


class Home:
    """The job that is current when this is made.

    It stays with that job: after `reset_job()`, make a new one.

    Raises:
        ValueError: The job is live, over several machines.
        SystemExit: The job is live: its launcher runs it again without `--live`.
    """

    __slots__ = ("job",)

    def __init__(self) -> None:
        refuse_live_framework()
        self.job: Job = current_job()
        """The job itself, for what is not below."""
        self.job.iterations.in_framework = True

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

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the complete gradient of a step, at this threshold whatever the step is worth.

        Only where the model allows changes of the gradient (`change_gradient`). Collective if the
        model is sharded.

        Args:
            max_norm: Largest norm; infinite if only the norm is asked for.
            norm_type: Order of the norm.

        Returns:
            The norm before.
        """
        trained = self.job.trained
        assert trained is not None
        trained.prepare()  # completes the gradient, if nobody has
        return trained.gradient.clip(max_norm, norm_type)

    def set_epoch(self, epoch: int) -> None:
        """Says how many epochs are done, without anything that is due between two epochs."""
        self.job.timeline.epoch = epoch

    def set_total_epochs(self, total: int | None) -> None:
        """Says how many epochs the whole job has; None if that is not known."""
        self.job.timeline.total_epochs = total

    def end_training(self) -> None:
        """Ends the last step, and with it the training."""
        end_training(self.job)
