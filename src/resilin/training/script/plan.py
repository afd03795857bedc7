"""`plan`: the split of a global batch over the replicas that are present."""

from __future__ import annotations

from resilin.core.plan import BatchPlan
from resilin.training.job import current_job


class PresentPlan(BatchPlan):
    """A `BatchPlan` for the current replicas, as seen by one of them."""

    __slots__ = ()

    @property
    def master(self) -> bool:
        """Whether this is replica 0."""
        return current_job().engine.membership.replica == 0


def plan(
    global_batch_size: int,
    max_local_bsz: int | None = None,
    *,
    min_local_bsz: int = 0,
    gradient_accumulation: bool = True,
) -> PresentPlan:
    """Plans one global batch for the replicas that are in the job now.

    Args:
        global_batch_size: Samples in one optimizer step, over all replicas.
        max_local_bsz: Largest number of samples that fit on one replica; more are accumulated.
        min_local_bsz: Smallest number of samples in a micro-batch.
        gradient_accumulation: Whether a replica may run more than one micro-batch in a step.

    Returns:
        The plan, with `steps`, `batch_size`, `global_batch_size`, `gpus` and `master`.

    Raises:
        PlanError: The batch cannot be split over the present replicas within these bounds.

    Examples:
        >>> plan(256, max_local_bsz=64).steps
        4
    """
    return PresentPlan(
        global_batch_size,
        current_job().engine.membership.num_replicas,
        max_local_bsz=max_local_bsz,
        min_local_bsz=min_local_bsz,
        gradient_accumulation=gradient_accumulation,
    )
