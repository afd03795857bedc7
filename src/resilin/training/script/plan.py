"""`plan`, `check_split` and `hints`: the split of a global batch, and the speed at other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from resilin.core import _validate
from resilin.core.plan import BatchPlan
from resilin.training.gradient.split_check import SplitCheck, compare_pieces
from resilin.training.hints import describe
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


def check_split(
    loss: Callable[[Any], Tensor],
    batch: Any,
    *,
    pieces: int = 2,
    weight: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-3,
) -> SplitCheck:
    """Compares the gradient of a batch in pieces with that of the whole batch.

    Call it once, before or within the training loop; it costs three passes forward and back.
    It changes nothing: gradients, buffers and random numbers are afterwards what they were. With
    several replicas each checks its own batch, and all of them have to call it if the model
    communicates in its forward pass. `nn.Dropout` modules are switched off for the check.

    It assumes that `loss` has no side effects but those, and cannot tell a split that matters
    for other data. Reentrant gradient checkpointing is an error: it has no `torch.autograd.grad`.

    Args:
        loss: Computes the loss of a collated batch with the `AdaptiveDataParallel` of this job, as
            the loop does: `lambda batch: F.cross_entropy(model(batch[0]), batch[1])`.
        batch: A batch as the loader yields it.
        pieces: Into how many pieces of nearly equal size it is split.
        weight: The weight of a collated batch, as `batch_weight` of the loader; None weighs by
            samples, or by what the loss says with `model.weight()`.
        tolerance: The largest relative difference that counts as rounding.

    Returns:
        The relative difference; `print` it for a sentence.

    Raises:
        ValueError: The batch cannot be split so.
        RuntimeError: There is no model, or it is not in training mode.
    """
    model = current_job().model
    if model is None:
        raise RuntimeError("check_split() needs an AdaptiveDataParallel, which was not made yet")
    if not model.training:
        raise RuntimeError("check_split() needs the model in training mode: call model.train()")
    return compare_pieces(model, loss, batch, pieces=pieces, weight=weight, tolerance=tolerance)


def hints(max_replicas: int = 64) -> dict[str, Any]:
    """Speed of this job with other numbers of replicas. Works on any replica.

    `resilin.core.hints.JobHints.from_json` reads it, without torch. With a batch size that stays
    the same, steps are timed from the first call on, or from the beginning in a job that has a
    scheduler (`RESILIN_SCHEDULER`): before that, a step does nothing for it.

    Args:
        max_replicas: Largest number of replicas in the speedup, at powers of two.

    Returns:
        A dict that `json.dumps` takes. `version`; `job` (id in the cluster or None, generation,
        unix time, accelerator, median rescale_seconds or None); `placement` (hosts, replicas,
        accelerators_per_replica); `sizes` (min and max number of accelerators, multiple, largest
        profiled); `batch` (reference, current, fixed, max_batch_size, local_bsz_bounds,
        gradient_accumulation); `progress` (steps, samples, progress in reference steps, total if
        known, end: declared, estimated or unknown); `noise` (sqr_norm, and trace per sample) or
        None; `throughput` (the fields of `resilin.core.throughput.ThroughputModel`) or None while
        no step was measured; `speedup` (replicas, and best goodput over that of one replica on one
        host; 0 where the bounds allow no plan) or None without a throughput; `goodput` (tables over
        the menu of the scheduler, by kind of accelerator; empty without one).

    Raises:
        ValueError: No loader of the job has begun to train.
    """
    _validate.whole("max_replicas", max_replicas, at_least=1)
    return describe(current_job()).with_speedup(max_replicas).to_json()
