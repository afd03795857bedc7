"""The numbers that replicas add up in each step: what they have to agree on before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Report of one replica about its part of a step, or the sums over all replicas."""

    weight: float
    """Weight of its micro-batches that had a backward pass."""
    samples: float
    """Samples in them."""
    members: float
    """1 if it has any; counts those that have."""
    seconds: float
    """Time spent on measuring so far."""
    step_seconds: float
    """Usual duration of a step."""
    steps: float
    """Steps made so far."""
    assumed: float
    """Total weight that it divided by."""
    skips: float
    """1 if it left the step without the backward pass of its last micro-batch."""
    changes: float
    """1 if it has other trained parameters than in the step before."""
    signature: float
    """Hash of the parameters it trains."""


LENGTH = len(fields(Head))
"""Numbers in a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One ballot, of a replica or summed: the head, the votes, and terms of the noise."""

    head: Head
    votes: tuple[float, ...]
    terms: tuple[float, ...]


def pack(head: Head, votes: Sequence[float], terms: Tensor) -> Tensor:
    """A ballot as one tensor, on the device of `terms`."""
    numbers = [getattr(head, field.name) for field in fields(Head)] + list(votes)
    return torch.cat([torch.tensor(numbers, dtype=torch.float64, device=terms.device), terms])


def unpack(sums: Sequence[float], num_votes: int) -> Said:
    """The inverse of `pack`, after the reduction."""
    names = [field.name for field in fields(Head)]
    head = Head(**dict(zip(names, sums, strict=False)))
    return Said(
        head=head,
        votes=tuple(sums[LENGTH : LENGTH + num_votes]),
        terms=tuple(sums[LENGTH + num_votes :]),
    )


def check(own: Head, sums: Head, replicas: int) -> None:
    """Refuses a step that replicas do not make alike.

    Raises:
        RuntimeError: They are at different steps, train different parameters, or have different
            totals of the weights.
    """
    if sums.steps != replicas * own.steps:
        raise RuntimeError(
            f"replicas are not in the same step: this one has made {own.steps:.0f} steps, the mean "
            f"over all {replicas} is {sums.steps / replicas:g}; each replica has to make, or to "
            "leave, the same steps"
        )
    if sums.signature != replicas * own.signature or 0 < sums.changes < replicas:
        state = "has changed" if own.changes else "has not changed"
        raise RuntimeError(
            f"requires_grad differs between replicas: {sums.changes:.0f} of {replicas} have frozen "
            f"or unfrozen parameters since the last step, and this replica {state} any; all "
            "replicas have to change requires_grad of the same parameters between the same steps"
        )
    apart = abs(sums.assumed - replicas * own.assumed) > 1e-9 * abs(sums.assumed)
    if apart and not sums.skips and not sums.changes:
        raise RuntimeError(
            f"replicas divide by different total weights: this one by {own.assumed:g}, the mean "
            f"over all is {sums.assumed / replicas:g}; surround the forward pass with "
            "model.weight() on all replicas, or on none"
        )
