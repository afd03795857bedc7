"""Goodput: learning speed of a job at a batch size, and the benefit of more replicas.

Goodput is samples per second times statistical efficiency: progress, counted in samples of the
reference batch, per second. The first factor comes from a `ThroughputModel`, the second from the
noise of the gradient. All functions take whole arrays, so that a tuner can evaluate every batch
size in each step, and a scheduler every number of replicas of every job.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resilin.core import _validate
from resilin.core.events import Candidate
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds, BatchPlan, PlanError
from resilin.core.throughput import Floats, ThroughputModel

GRID = 64
"""Global batch sizes compared for a placement: neighbours differ by 6.8% over a range of 64x."""


def efficiency(noise: Noise | None, batch_size: ArrayLike, reference: float) -> Floats:
    """Progress per sample relative to the reference batch: gain over scale, also below it.

    Without an estimate of the noise it is the lowest that any noise could give, as for
    `noise.gain`: a larger batch is then worth no more than the reference batch.
    """
    if noise is not None:
        return noise.efficiency(batch_size, reference)
    # The worst case is a gradient without noise above the reference batch, and pure noise below.
    return np.minimum(1.0, Noise(sqr_norm=1.0, trace=0.0).efficiency(batch_size, reference))


def goodput(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    hosts: ArrayLike,
    replicas: ArrayLike,
    local_bsz: ArrayLike,
    accumulation_steps: ArrayLike = 1,
) -> Floats:
    """Reference samples per second: throughput times efficiency. All arrays broadcast.

    Progress is computed from the noise, so it assumes that the learning rate follows the gain; a
    fixed learning rate at a larger batch makes less progress.
    """
    seconds = model.step_seconds(hosts, replicas, local_bsz, accumulation_steps)
    count, local, steps = (
        np.asarray(part, np.float64) for part in (replicas, local_bsz, accumulation_steps)
    )
    samples = count * local * steps
    return samples * efficiency(noise, samples, reference) / seconds


class Choice(NamedTuple):
    """The best plan for one placement, and the candidates."""

    plan: BatchPlan
    """The plan of the highest goodput."""
    goodput: float
    """Its predicted reference samples per second."""
    candidates: tuple[Candidate, ...]
    """All candidates, by global batch size."""


class Candidates(NamedTuple):
    """Global batches that are compared, and their splits: a row for each number of replicas.

    They depend on the bounds alone: whoever asks again, for other noise or another model, keeps
    them.
    """

    reference: float
    """The reference batch."""
    replicas: Floats
    """Data-parallel members, in one column."""
    sizes: Floats
    """Global batch sizes."""
    local_bsz: Floats
    """Largest micro-batch of each."""
    steps: Floats
    """Micro-batches that each replica runs in a step."""
    possible: NDArray[np.bool_]
    """Whether the bounds allow it."""

    @classmethod
    def of(
        cls,
        reference: float,
        bounds: BatchBounds,
        replicas: ArrayLike,
        min_batch_size: int | None = None,
    ) -> Candidates:
        """The candidates for each of these numbers of replicas; see `best_plan`."""
        count = np.asarray(replicas, np.float64)[:, None]
        if not (count >= 1).all():
            raise ValueError(f"replicas ({replicas!r}) must be at least 1")
        lower, upper = bounds.local_bsz_bounds or (0, np.inf)
        per_step = count * upper
        largest = np.full_like(
            count, np.inf if bounds.max_batch_size is None else bounds.max_batch_size
        )
        if not bounds.gradient_accumulation:
            largest = np.minimum(largest, per_step)
        if not np.isfinite(largest).all():
            raise ValueError(
                f"max_batch_size ({bounds.max_batch_size}) must be set: nothing else in {bounds} "
                "limits the batch"
            )
        wanted = reference if min_batch_size is None else min_batch_size
        name = "min_batch_size" if min_batch_size is not None else "reference"
        _validate.real(name, wanted, above=0)
        smallest = np.minimum(np.maximum(np.ceil(wanted), count * lower), largest)
        grid = smallest * (largest / smallest) ** np.linspace(0.0, 1.0, GRID)
        # Powers are not exact: round, and keep to the bounds.
        grid = np.clip(np.rint(grid), smallest, largest)
        # A last micro-batch that is half empty costs as much as a full one: try even splits too.
        full = count * np.maximum(1.0, np.ceil(grid / per_step))
        even = np.clip(np.floor(grid / full) * full, smallest, largest)
        sizes = np.concatenate([grid, even], axis=1)
        share = np.ceil(sizes / count)
        steps = np.maximum(1.0, np.ceil(share / upper))
        local = np.ceil(share / steps)
        possible = np.floor(np.floor(sizes / count) / steps) >= lower
        if not bounds.gradient_accumulation:
            possible &= steps == 1
        return cls(float(reference), count, sizes, local, steps, possible)

    def seconds(self, model: ThroughputModel, hosts: ArrayLike) -> Floats:
        """Predicted seconds of a step of each, on so many machines for each row."""
        column = np.asarray(hosts, np.float64)[:, None]
        return model.step_seconds(column, self.replicas, self.local_bsz, self.steps)

    def goodput(self, noise: Noise | None, seconds: Floats) -> Floats:
        """Goodput of each, from its seconds; 0 where it is not possible."""
        value = self.sizes * efficiency(noise, self.sizes, self.reference) / seconds
        return np.where(self.possible, value, 0.0)


def best_plan(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    hosts: int,
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
        bounds: Bounds set by the user. They must limit the batch size.
        hosts: Machines that the replicas run on.
        replicas: Data-parallel members.
        min_batch_size: Smallest global batch; None means the reference batch, or the largest one
            allowed if that is less.

    Raises:
        PlanError: No batch within the bounds can be split over this many replicas.
    """
    bounds.check_replicas(replicas)
    table = Candidates.of(reference, bounds, [replicas], min_batch_size)
    sizes, local, steps = table.sizes[0], table.local_bsz[0], table.steps[0]
    values = table.goodput(noise, table.seconds(model, [hosts]))[0]
    if not values.any():
        raise PlanError(
            f"no global batch from {sizes.min():.0f} to {sizes.max():.0f} can be split over "
            f"{replicas} replicas within {bounds}"
        )
    _, first = np.unique(sizes, return_index=True)
    candidates = tuple(
        Candidate(
            batch_size=int(sizes[i]),
            local_bsz=int(local[i]),
            accumulation_steps=int(steps[i]),
            goodput=float(values[i]),
        )
        for i in first
        if values[i] > 0
    )
    best = max(candidates, key=lambda candidate: candidate.goodput)
    return Choice(bounds.plan(best.batch_size, replicas), best.goodput, candidates)


class Best(NamedTuple):
    """The best plan for each of several placements, as arrays."""

    goodput: Floats
    """Reference samples per second; 0 where there is no plan."""
    batch_size: Floats
    """Samples of a step."""
    local_bsz: Floats
    """Samples of a micro-batch."""
    accumulation_steps: Floats
    """Micro-batches of each replica in a step."""


def best_goodput(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    hosts: ArrayLike,
    replicas: ArrayLike,
    *,
    min_batch_size: int | None = None,
) -> Floats:
    """Goodput of `best_plan` for each entry of `hosts` and `replicas`; 0 where there is no plan."""
    return best_of_each(
        model, noise, reference, bounds, hosts, replicas, min_batch_size=min_batch_size
    ).goodput


def best_of_each(
    model: ThroughputModel,
    noise: Noise | None,
    reference: float,
    bounds: BatchBounds,
    hosts: ArrayLike,
    replicas: ArrayLike,
    *,
    min_batch_size: int | None = None,
) -> Best:
    """The same as `best_goodput`, with the split of each."""
    host_counts, counts = np.broadcast_arrays(hosts, replicas)
    table = Candidates.of(reference, bounds, counts.reshape(-1), min_batch_size)
    values = table.goodput(noise, table.seconds(model, host_counts.reshape(-1)))
    best = values.argmax(axis=1)[:, None]
    columns = (values, table.sizes, table.local_bsz, table.steps)
    chosen = (np.take_along_axis(each, best, axis=1) for each in columns)
    return Best(*(np.asarray(each.reshape(counts.shape)) for each in chosen))
