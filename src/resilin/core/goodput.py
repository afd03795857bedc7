"""Goodput: how fast a job learns at a batch size, and what more replicas would add.

Goodput is samples per second times statistical efficiency: the speed at which reference-batch
samples' worth of progress is made. The first factor comes from a model of the step time, the
second from the noise of the gradient. `fit` learns the model from measured steps; the functions
here only ask it, over whole arrays at once, so that a tuner may try every batch size in each
step and a scheduler every number of replicas of every job.

The step time is that of Pollux (Qiao et al., OSDI 2021) with one more term. A micro-batch of m
samples takes `compute_start + compute_per_sample * m`; reducing the gradient among K replicas
takes `sync * (1 + ring * (1 - 2/K)) + growth * (K - 2)`, with separate numbers within one node
and between nodes; the last micro-batch of a step hides part of the reduction, as much as
`overlap` says. The `ring` term is the gradient's traffic in an all-reduce, which doubles from two
replicas to many and no further; without it the first few replicas look like the start of a
straight line that never ends. `ring = 0` is the published form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resilin.core import _validate
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds, BatchPlan, PlanError

Floats = NDArray[np.float64]

MAX_OVERLAP = 10.0
"""Largest exponent of the overlap: from here on, the longer of the two times is all that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """Seconds of a step for any placement and micro-batch. It assumes replicas of equal speed."""

    compute_start: float
    """Seconds that each micro-batch takes apart from its samples; above 0."""
    compute_per_sample: float
    """Seconds per sample of a micro-batch."""
    local_sync: float
    """Seconds to reduce the gradient between two replicas on one node."""
    local_growth: float
    """Seconds that each replica beyond two adds to it."""
    node_sync: float
    """Seconds to reduce the gradient between two replicas on two nodes."""
    node_growth: float
    """Seconds that each replica beyond two adds to it."""
    overlap: float
    """Between 1, where backward hides nothing of the reduction, and 10, where all that it can."""
    ring: float = 0.0
    """Share of the reduction between two replicas that grows with the traffic of many; 0 to 1."""

    def __post_init__(self) -> None:
        _validate.real("compute_start", self.compute_start, above=0)
        for name in PARAMETERS[1:6]:
            _validate.real(name, getattr(self, name), at_least=0)
        if _validate.real("overlap", self.overlap, at_least=1) > MAX_OVERLAP:
            raise ValueError(f"overlap ({self.overlap}) must be at most {MAX_OVERLAP}")
        if _validate.real("ring", self.ring, at_least=0) > 1:
            raise ValueError(f"ring ({self.ring}) must be at most 1")

    @property
    def parameters(self) -> tuple[float, ...]:
        """All numbers, in the order of the fields."""
        return tuple(getattr(self, name) for name in PARAMETERS)

    def compute_seconds(self, local_bsz: ArrayLike) -> Floats:
        """Seconds of one micro-batch's forward and backward."""
        return self.compute_start + self.compute_per_sample * np.asarray(local_bsz, np.float64)

    def step_seconds(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_bsz: ArrayLike,
        accumulation_steps: ArrayLike = 1,
    ) -> Floats:
        """Seconds of one optimizer step; the arguments broadcast against each other.

        Args:
            nodes: Machines that the replicas are on.
            replicas: Data-parallel members; one of them has nothing to reduce.
            local_bsz: Samples of a micro-batch.
            accumulation_steps: Micro-batches that each replica runs in the step, at least 1.
        """
        compute, _, last = step_parts(self.parameters, nodes, replicas, local_bsz)
        return (np.asarray(accumulation_steps, np.float64) - 1) * compute + last


PARAMETERS = tuple(field.name for field in fields(ThroughputModel))
"""Names of the model's numbers, in the order that covariances and Jacobians use."""


def step_parts(
    parameters: Sequence[float] | Floats, nodes: ArrayLike, replicas: ArrayLike, local_bsz: ArrayLike
) -> tuple[Floats, Floats, Floats]:
    """Seconds of a micro-batch, of the reduction, and of both where they overlap.

    Args:
        parameters: One entry per name of `PARAMETERS`; entries may be arrays that broadcast.
        nodes: As in `ThroughputModel.step_seconds`.
        replicas: As there.
        local_bsz: As there.
    """
    start, per_sample, local, local_growth, node, node_growth, overlap, ring = parameters
    replicas = np.asarray(replicas, np.float64)
    traffic, beyond_two, within = sync_shape(nodes, replicas)
    compute = start + per_sample * np.asarray(local_bsz, np.float64)
    sync = (replicas > 1) * (
        np.where(within, local, node) * (1 + ring * traffic)
        + np.where(within, local_growth, node_growth) * beyond_two
    )
    # Scaled by the longer one: powers of seconds alone would overflow or vanish.
    longer = np.maximum(compute, sync)
    last = longer * (1 + (np.minimum(compute, sync) / longer) ** overlap) ** (1 / overlap)
    return compute, sync, last


def sync_shape(nodes: ArrayLike, replicas: ArrayLike) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """What the reduction depends on: traffic beyond that of two, replicas beyond two, one node?"""
    replicas = np.asarray(replicas, np.float64)
    beyond_two = np.maximum(replicas - 2, 0.0)
    return beyond_two / np.maximum(replicas, 1.0), beyond_two, np.asarray(nodes) <= 1


def efficiency(noise: Noise | None, batch_size: ArrayLike, reference: float) -> Floats:
    """Progress per sample relative to the reference batch: gain over scale, also below it.

    Without an estimate of the noise it is the lowest that any noise could give, as for
    `noise.gain`: a larger batch is then worth no more than the reference batch.
    """
    if noise is not None:
        return noise.efficiency(batch_size, reference)
    # A gradient without noise is the worst case above the reference batch. Below it, noise is.
    return np.minimum(1.0, Noise(sqr_norm=1.0, trace=0.0).efficiency(batch_size, reference))


def goodput(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    nodes: ArrayLike,
    replicas: ArrayLike,
    local_bsz: ArrayLike,
    accumulation_steps: ArrayLike = 1,
) -> Floats:
    """Reference samples per second: throughput times efficiency. All arrays broadcast.

    It counts progress in the noise's own terms, so it holds where the learning rate follows the
    gain; a fixed rate at a larger batch learns less.
    """
    seconds = model.step_seconds(nodes, replicas, local_bsz, accumulation_steps)
    samples = np.asarray(replicas, np.float64) * local_bsz * accumulation_steps
    return samples * efficiency(noise, samples, reference) / seconds


class Candidate(NamedTuple):
    """One way to run the next steps, and what it would bring."""

    global_batch_size: int
    """Samples in the step, over all replicas."""
    local_bsz: int
    """Largest micro-batch of the plan."""
    accumulation_steps: int
    """Micro-batches per replica."""
    step_seconds: float
    """Predicted seconds of a step."""
    goodput: float
    """Predicted reference samples per second."""


class Choice(NamedTuple):
    """The best plan for one placement, and what it was chosen from."""

    plan: BatchPlan
    """The plan of the highest goodput."""
    goodput: float
    """Its predicted reference samples per second."""
    candidates: tuple[Candidate, ...]
    """All that were compared, by global batch size."""


def best_plan(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    nodes: int,
    replicas: int,
    *,
    min_batch_size: int | None = None,
) -> Choice:
    """The global batch and its split that learn fastest on this placement.

    Candidates lie on a geometric grid between the smallest and the largest batch allowed, both
    included, each also rounded down to micro-batches of one size. Of equal ones the smallest batch
    wins.

    Args:
        model: Step times.
        noise: Noise of the gradient now; None while it is unknown.
        reference: The reference batch size.
        bounds: What the user allows. Something in it must limit the batch.
        nodes: Machines that the replicas are on.
        replicas: Data-parallel members.
        min_batch_size: Smallest global batch; None means the reference batch, or the largest one
            allowed if that is less.

    Raises:
        PlanError: No batch within the bounds can be split over this many replicas.
    """
    bounds.check_replicas(replicas)
    table = _candidates(model, noise, reference, bounds, [nodes], [replicas], min_batch_size)
    sizes, local, steps, seconds, values = (column[0] for column in table)
    if not values.any():
        raise PlanError(
            f"no global batch from {sizes.min():.0f} to {sizes.max():.0f} can be split over "
            f"{replicas} replicas within {bounds}"
        )
    _, first = np.unique(sizes, return_index=True)
    candidates = tuple(
        Candidate(int(sizes[i]), int(local[i]), int(steps[i]), float(seconds[i]), float(values[i]))
        for i in first
        if values[i] > 0
    )
    best = max(candidates, key=lambda candidate: candidate.goodput)
    return Choice(bounds.plan(best.global_batch_size, replicas), best.goodput, candidates)


def best_goodput(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    nodes: ArrayLike,
    replicas: ArrayLike,
    *,
    min_batch_size: int | None = None,
) -> Floats:
    """Goodput of `best_plan` for each entry of `nodes` and `replicas`; 0 where there is no plan."""
    node_counts, counts = np.broadcast_arrays(nodes, replicas)
    flat = (node_counts.reshape(-1), counts.reshape(-1))
    values = _candidates(model, noise, reference, bounds, *flat, min_batch_size)[-1]
    return values.max(axis=1).reshape(counts.shape)


def speedup(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    nodes: ArrayLike,
    replicas: ArrayLike,
    *,
    min_batch_size: int | None = None,
) -> Floats:
    """Best goodput over the best goodput of one replica, for each entry; 0 where there is no plan.

    Raises:
        PlanError: One replica cannot run any allowed batch; compare `best_goodput` instead.
    """
    one = best_plan(model, noise, reference, bounds, 1, 1, min_batch_size=min_batch_size)
    many = best_goodput(
        model, noise, reference, bounds, nodes, replicas, min_batch_size=min_batch_size
    )
    return many / one.goodput


def _candidates(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    nodes: ArrayLike,
    replicas: ArrayLike,
    min_batch_size: int | None,
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Batch size, micro-batch, steps, seconds and goodput: a row per placement; 0 is impossible."""
    node = np.asarray(nodes, np.float64)[:, None]
    count = np.asarray(replicas, np.float64)[:, None]
    if not (count >= 1).all():
        raise ValueError(f"replicas ({replicas!r}) must be at least 1")
    lower, upper = bounds.local_bsz_bounds or (0, np.inf)
    per_step = count * upper
    largest = np.full_like(count, np.inf if bounds.max_batch_size is None else bounds.max_batch_size)
    if not bounds.gradient_accumulation:
        largest = np.minimum(largest, per_step)
    if not np.isfinite(largest).all():
        raise ValueError(
            f"max_batch_size ({bounds.max_batch_size}) must be set: nothing else in {bounds} "
            "limits the batch"
        )
    wanted = reference if min_batch_size is None else min_batch_size
    _validate.real("min_batch_size" if min_batch_size is not None else "reference", wanted, above=0)
    smallest = np.minimum(np.maximum(np.ceil(wanted), count * lower), largest)
    grid = smallest * (largest / smallest) ** np.linspace(0.0, 1.0, GRID)
    # Powers are not exact: round, and keep to the bounds.
    grid = np.clip(np.rint(grid), smallest, largest)
    # A last micro-batch that is half empty costs as much as a full one: try even splits as well.
    full = count * np.maximum(1.0, np.ceil(grid / per_step))
    sizes = np.concatenate([grid, np.clip(np.floor(grid / full) * full, smallest, largest)], axis=1)
    share = np.ceil(sizes / count)
    steps = np.maximum(1.0, np.ceil(share / upper))
    local = np.ceil(share / steps)
    possible = np.floor(np.floor(sizes / count) / steps) >= lower
    if not bounds.gradient_accumulation:
        possible &= steps == 1
    seconds = model.step_seconds(node, count, local, steps)
    value = sizes * efficiency(noise, sizes, reference) / seconds
    return sizes, local, steps, seconds, np.where(possible, value, 0.0)


GRID = 64
"""Global batch sizes compared for a placement: neighbours differ by 6.8% over a range of 64x."""
