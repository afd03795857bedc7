"""The batch sizes of a loader, as users and the model see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from resilin.core.events import FaultEvent
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.telemetry.tensorboard import PREFIX, SummaryWriter, write_scalars
from resilin.training.data.iteration import Iteration
from resilin.training.job import Job
from resilin.training.sizing.autoscale import Autoscaler
from resilin.training.sizing.batch_size import BatchSize, BatchSizes
from resilin.training.sizing.memory_limit import Room


class SizedLoader:
    """A loader whose batch size may change between any two steps.

    Args:
        job: The job that it belongs to.
        batch_size: The reference batch.
        sizes: The next size and its split.
    """

    def __init__(self, job: Job, batch_size: int, sizes: BatchSizes) -> None:
        self.job = job
        """The job that it belongs to: the one that was current when it was made."""
        self.batch_size = batch_size
        """The reference batch."""
        self._sizes = sizes
        self._failed: str | None = None
        self._iteration: Iteration | None = None
        self._current_samples = 0

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Sets the global batch size from the next step on.

        A number that is set while the job runs is part of its state. Anything else that is set
        then has to be set again by a resumed job, or its first step is an error: set it before the
        loop over epochs, or at the beginning of every epoch.

        Args:
            batch_size: A number, a `BatchTrace` (by optimizer step), a `Schedule`, or a function
                of the clock. The learning rate follows by the rule of the model.
        """
        self._sizes.set(batch_size)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = True,
    ) -> None:
        """Let resilin choose the global batch size during training, within bounds.

        It chooses the size that learns fastest: measured samples per second times progress per
        sample, which follows from the noise of the gradient. It starts at `batch_size` and may
        change between any two steps, at most doubling each time. Decisions are events, with all
        candidates.

        Args:
            max_batch_size: Upper limit of the global batch; at least `batch_size`.
            local_bsz_bounds: Smallest and largest micro-batch; `max_local_bsz` still holds.
            gradient_accumulation: Whether a replica may run more than one micro-batch in a step.
        """
        bounds = BatchBounds(max_batch_size, local_bsz_bounds, gradient_accumulation)
        self._sizes.autoscale(bounds)

    @property
    def autoscaler(self) -> Autoscaler | None:
        """The autoscaler, if the batch size is chosen automatically."""
        return self._sizes.autoscaler

    @property
    def current_batch_size(self) -> int:
        """The global batch size of the next step."""
        return self._sizes.now()

    @property
    def current_local_bsz(self) -> int:
        """The largest micro-batch of the current step."""
        return self._current_plan().batch_size

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches that each replica runs in the current step."""
        return self._current_plan().steps

    @property
    def current_samples(self) -> int:
        """Number of samples of the current micro-batch that count; 0 for a filler batch."""
        return self._current_samples

    def to_tensorboard(self, writer: SummaryWriter, step: int, prefix: str = PREFIX) -> None:
        """Writes the sizes of the current step.

        Args:
            writer: A SummaryWriter, of torch or tensorboardX.
            step: Its position on the axis.
            prefix: Prefix of the tags.
        """
        values = {
            "batch_size": self._current_plan().global_batch_size,
            "local_bsz": self.current_local_bsz,
            "accumulation_steps": self.accumulation_steps,
            "replicas": self._engine.membership.num_replicas,
        }
        write_scalars(writer, values, step, prefix)

    def _current_plan(self) -> BatchPlan:
        if self._iteration is None or self._iteration.plan is None:
            return self._sizes.plan(self.current_batch_size, self.current_batch_size)
        return self._iteration.plan

    @property
    def _engine(self) -> Engine:
        return self.job.engine

    # Memory --------------------------------------------------------------------------------

    def measured_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of the current micro-batch, to learn what it takes."""
        room = self._sizes.memory.room
        if room is None or not self._current_samples:
            return nullcontext()
        return room.measure(self._current_samples)

    @contextmanager
    def retry_smaller(self) -> Iterator[None]:
        """Surround the body of the training loop with it, and running out of memory is no end.

        This replica's part of the step is then repeated with micro-batches of half the size, from
        now on; the global batch stays. It cannot help when other replicas have received a part of
        the gradient already, late in the backward pass, or in the optimizer: then the error is
        raised, as without this. The repeated step has more micro-batches on this replica than on
        the others, so a module with collectives in its forward pass cannot repeat one.
        """
        job = self.job
        try:
            yield
        except torch.OutOfMemoryError as error:
            size = self._current_samples
            if job.trained is None or size < 2 or not job.trained.drop_step():
                raise
            self._failed = str(error).partition("\n")[0]
        if self._failed is None:
            return
        # Out of the handler: the traceback holds on to what has to be freed.
        devices.here().release_memory()
        memory = self._sizes.memory
        if memory.room is None:
            memory.room = Room(2**62, start=self.batch_size)
        limit = memory.room.failed(size)
        job.events.emit(
            FaultEvent(
                **job.events.stamp(),
                kind="out_of_memory",
                detail=f"a micro-batch of {size} samples did not fit: {self._failed}; the step is "
                f"repeated with at most {limit}",
                replica=job.engine.membership.replica,
            )
        )
