"""The step time as a function of placement and micro-batch: a model with eight parameters.

It is the form of Pollux (Qiao et al., OSDI 2021) with one more term. A micro-batch of m samples
takes `compute_start + compute_per_sample * m`; reducing the gradient among K replicas takes
`sync * (1 + ring * (1 - 2/K)) + growth * (K - 2)`, with separate numbers within one host and
between hosts; the last micro-batch of a step hides a part of the reduction that depends on
`overlap`. The `ring` term is the traffic of an all-reduce, which at most doubles from two replicas
to many; without it the first few replicas look like the start of a line without end. `ring = 0` is
the published form. `fit` estimates the parameters from measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from resilin.core import _validate

Floats = NDArray[np.float64]
"""Type of the arrays in this module and related ones."""
MAX_OVERLAP = 10.0
"""Largest exponent of the overlap: from here on, only the longer of the two times matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """Seconds of a step for any placement and micro-batch. It assumes replicas of equal speed."""

    compute_start: float
    """Seconds that each micro-batch takes apart from its samples; above 0."""
    compute_per_sample: float
    """Seconds per sample of a micro-batch."""
    local_sync: float
    """Seconds to reduce the gradient between two replicas on one host."""
    local_growth: float
    """Seconds that each replica beyond two adds to it."""
    host_sync: float
    """Seconds to reduce the gradient between two replicas on two hosts."""
    host_growth: float
    """Seconds that each replica beyond two adds to it."""
    overlap: float
    """From 1, where backward hides nothing of the reduction, to 10, where it hides all it can."""
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
        hosts: ArrayLike,
        replicas: ArrayLike,
        local_bsz: ArrayLike,
        accumulation_steps: ArrayLike = 1,
    ) -> Floats:
        """Seconds of one optimizer step; the arguments broadcast against each other.

        Args:
            hosts: Machines that the replicas run on.
            replicas: Data-parallel members; one of them has nothing to reduce.
            local_bsz: Samples of a micro-batch.
            accumulation_steps: Micro-batches that each replica runs in the step, at least 1.
        """
        compute, _, last = step_parts(
            self.parameters, SyncShape.of(hosts, replicas), np.asarray(local_bsz, np.float64)
        )
        return (np.asarray(accumulation_steps, np.float64) - 1) * compute + last


PARAMETERS = tuple(field.name for field in fields(ThroughputModel))
"""Names of the model's numbers, in the order that covariances and Jacobians use."""


class SyncShape(NamedTuple):
    """The properties of a placement that its reduction depends on."""

    any: Floats
    """1 where there is something to reduce, 0 for a single replica."""
    traffic: Floats
    """Traffic of an all-reduce beyond that between two replicas, relative to it."""
    beyond_two: Floats
    """Replicas beyond two."""
    within: NDArray[np.bool_]
    """Whether all replicas are on one host."""

    @classmethod
    def of(cls, hosts: ArrayLike, replicas: ArrayLike) -> SyncShape:
        """The shape of each placement."""
        count = np.asarray(replicas, np.float64)
        beyond_two = np.maximum(count - 2, 0.0)
        several = np.asarray(count > 1, np.float64)
        return cls(several, beyond_two / np.maximum(count, 1), beyond_two, np.asarray(hosts) <= 1)


def step_parts(
    parameters: Sequence[float] | Floats, shape: SyncShape, local_bsz: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds of a micro-batch, of the reduction, and of both where they overlap.

    Args:
        parameters: One entry per name of `PARAMETERS`; entries may be arrays that broadcast.
        shape: Placements.
        local_bsz: Samples of a micro-batch.
    """
    start, per_sample, local, local_growth, host, host_growth, overlap, ring = parameters
    compute = start + per_sample * local_bsz
    sync = np.where(shape.within, local, host) * (shape.any + ring * shape.traffic)
    sync = sync + np.where(shape.within, local_growth, host_growth) * shape.beyond_two
    # Scaled by the longer one: powers of seconds alone would overflow or vanish.
    longer = np.maximum(compute, sync)
    last = longer * (1 + (np.minimum(compute, sync) / longer) ** overlap) ** (1 / overlap)
    return compute, sync, last
