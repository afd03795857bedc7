"""Gradient statistics where they are cheap: squared norms of gradients that exist anyway.

With several replicas, each replica's gradient is one micro-batch of the estimator, read from
DDP's flat buckets just before and just after their reduction. On one replica that accumulates,
the micro-gradients are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resilin.compat.torch_names import norms_of_all
from resilin.core.noise import NoiseSample, from_sums
from resilin.engine import devices
from resilin.engine.devices import Fetched

_HALF = (torch.float16, torch.bfloat16)


def _flat(tensor: Tensor) -> Tensor:
    """All real numbers of a gradient in one dimension, in a precision that can hold squares."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).float() if tensor.dtype in _HALF else tensor.reshape(-1)


def sqr_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Squared norm of each of these tensors, at least one, in float64."""
    flat = [_flat(tensor.detach()) for tensor in tensors]
    if devices.of(flat[0].device).batches_kernels:
        # Two kernels for all of them; on the CPU a dot product each is several times faster.
        return torch.stack([norm.double() for norm in norms_of_all(flat)]).square()
    norms = [torch.dot(tensor, tensor) for tensor in flat]
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.double() for norm in norms]
    return torch.stack(norms).double()


def total(norms: Sequence[Tensor]) -> Tensor:
    """The sum over buckets, which all replicas send in the same order."""
    found = norms[0]
    for more in norms[1:]:
        found = found + more
    return found


class GroupNorms:
    """Squared norms of gradients, added up per parameter group of the optimizers."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], parameters: Iterable[Tensor]) -> None:
        self.num_groups = len(groups)
        # Parameters that no optimizer has go to a group of their own, which is dropped.
        self._group = {
            parameter: index for index, group in enumerate(groups) for parameter in group["params"]
        }
        self.update(parameters)

    def update(self, parameters: Iterable[Tensor]) -> None:
        """Takes over which of the parameters are trained now."""
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        trained = [p for p in parameters if p.requires_grad]
        self.one_group = self.num_groups == 1 and all(p in self._group for p in trained)
        """Whether all of them are in one group, so that a flat tensor of them is read in one go."""

    def group_of(self, parameter: Tensor) -> int:
        """The parameter group of a parameter; one past the last group if it has none."""
        return self._group.get(parameter, self.num_groups)

    def of(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor],
        flat: Tensor | None = None,
        *,
        shares: Sequence[float] | None = None,
    ) -> Tensor:
        """Squared norms per group, as a float64 tensor.

        Args:
            parameters: What the gradients belong to; those in no group are left out.
            grads: Their gradients.
            flat: All of the gradients as one tensor, if there is one: then it is read in one go.
            shares: Number that the squared norm of each is multiplied by; None if it is 1.
        """
        if flat is not None and self.one_group:
            return sqr_norms([flat])
        if not grads:
            return torch.zeros(self.num_groups, dtype=torch.float64)
        norms = sqr_norms(grads)
        if shares is not None:
            norms = norms * norms.new_tensor(shares)
        if self.one_group:
            return norms.sum().reshape(1)
        sums = norms.new_zeros(self.num_groups + 1)
        return sums.index_add_(0, self._index(parameters, norms.device), norms)[:-1]

    def _index(self, parameters: Sequence[Tensor], device: torch.device) -> Tensor:
        """The groups of these parameters, on their device."""
        groups = tuple(self._group.get(p, self.num_groups) for p in parameters)
        index = self._indices.get((groups, device))
        if index is None:
            # Kept: to copy it would make the host wait for the device, in each step.
            index = self._indices[groups, device] = torch.tensor(groups, device=device)
        return index


class Measured:
    """Noise of one step that was measured: the numbers may still be on the device.

    Reading them right away would make the host wait for the device. A step later the device has
    long passed them, and other work is queued for it.

    Args:
        norms: Weighted squared norms of the measured gradients per parameter group, and after
            them those of their mean.
        weight: Weight of all micro-batches of the step.
        num: Number of gradients that were measured.
    """

    def __init__(self, norms: Fetched, *, weight: float, num: int) -> None:
        self._norms = norms
        self._weight = weight
        self._num = num

    def read(self) -> tuple[NoiseSample, ...] | None:
        """Noise per parameter group; None if there is only one gradient. Waits if it must."""
        if self._num < 2:
            return None
        norms = self._norms.read()
        groups = len(norms) // 2
        return tuple(
            from_sums(
                batch_size=self._weight,
                num_micro_batches=self._num,
                weighted_sqr_norm=term / self._weight,
                mean_sqr_norm=mean,
            )
            for term, mean in zip(norms[:groups], norms[groups:], strict=True)
        )
