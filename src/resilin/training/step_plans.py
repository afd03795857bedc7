"""The sizes of steps, as they are run: a step may be split once more to measure its noise."""

from __future__ import annotations

from resilin.core.clock import Clock, step_scale
from resilin.core.plan import BatchPlan
from resilin.training.job import Job
from resilin.training.sizing.batch_size import BatchSizes


class StepPlans:
    """The sizes of the steps of one loader.

    Args:
        job: The job that the loader belongs to.
        sizes: Its batch sizes.
        reference: The reference batch.
    """

    def __init__(self, job: Job, sizes: BatchSizes, reference: int) -> None:
        self._job = job
        self.sizes = sizes
        """The next batch size and its split."""
        self._reference = reference

    def batch_size(self, clock: Clock | None = None) -> int:
        """The global batch size of the next step, or of one that begins at a later clock."""
        return self.sizes.now(clock)

    def pieces(self, samples: int, batch_size: int, *, training: bool) -> BatchPlan:
        """The split of a step as it is run.

        Args:
            samples: Samples in the step.
            batch_size: The global batch size; the remainder of an epoch has fewer samples.
            training: Whether the step trains.
        """
        plan = self.sizes.plan(samples, batch_size, training=training)
        return self.split(plan, batch_size, training=training)

    def split(self, plan: BatchPlan, batch_size: int, *, training: bool) -> BatchPlan:
        """Splits a step of one replica in two if its noise is to be measured.

        Losses that couple samples change with the split, so the reference batch is left whole
        unless somebody needs its noise. No piece has one sample, unless the reference batch has.

        Args:
            plan: The plan of the step.
            batch_size: The global batch size.
            training: Whether the step trains.
        """
        job, samples = self._job, plan.global_batch_size
        pieces = samples // 2 >= min(2, self._reference)
        alone = plan.replicas == 1 and plan.steps == 1 and samples > 1
        if alone and pieces and training and job.trained is not None:
            scale = step_scale(samples, batch_size, self._reference)
            estimates = job.trained.scaling.estimates
            if estimates.due(autoscaled=job.sized_by_noise, split_at=scale):
                return BatchPlan(samples, 1, max_local_bsz=-(-plan.batch_size // 2))
        return plan
