"""Clipping of gradients that are divided among processes, whatever their meshes.

`torch.nn.utils.clip_grad_norm_` stacks the norms of all parameters, which it cannot do for DTensors
on different meshes, or for some of them and plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.training.gradient.sharding import Sharding, is_sharded


def clip_sharded(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    sharding: Sharding,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Clips the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: The parameters; those without a gradient are left out.
        max_norm: Largest norm.
        norm_type: Order of the norm; may be infinite.
        sharding: The sharding of the model.
        group: All processes; None if there is only this one.

    Returns:
        The norm before, in the type of the gradients, the same on all processes.
    """
    grads: list[Tensor] = []
    shares: list[float] = []
    with torch.no_grad():
        for parameter in parameters:
            grad: Any = parameter.grad
            if grad is not None:
                grads.append(grad.to_local() if is_sharded(grad) else grad)
                shares.append(1 / sharding.copies(parameter))
        norm = _total_norm(grads, shares, float(norm_type), group)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


def _total_norm(
    grads: Sequence[Tensor],
    shares: Sequence[float],
    norm_type: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    kind, device = grads[0].dtype, grads[0].device
    filled = [pair for pair in zip(grads, shares, strict=True) if pair[0].numel()]
    norms = [torch.linalg.vector_norm(grad, norm_type).double().to(device) for grad, _ in filled]
    if math.isinf(norm_type):
        # An order of -inf is the smallest number of all.
        operation = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
        nothing = torch.tensor(0.0 if norm_type > 0 else math.inf, dtype=torch.float64)
        every = torch.stack([*norms, nothing.to(device)])
        total = every.max() if norm_type > 0 else every.min()
        if group is not None:
            dist.all_reduce(total, op=operation, group=group)
        return total.to(kind)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for norm, (_, share) in zip(norms, filled, strict=True):
        total += norm.pow(norm_type) * share
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.pow(1 / norm_type).to(kind)
