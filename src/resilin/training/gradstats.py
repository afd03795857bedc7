"""Gradient statistics where they are cheap: squared norms of gradients that exist anyway.

With several replicas, each replica's gradient is one micro-batch of the estimator, read from
DDP's flat buckets just before and just after their reduction. On one replica that accumulates,
the micro-gradients are. `MeasureSchedule` decides which steps are measured at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilin.core import _validate


def _sqr_norm(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return torch.dot(flat, flat)


class GroupNorms:
    """Squared norms of gradients, added up per parameter group of the optimizer."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self.num_groups = len(optimizer.param_groups)
        self._group = {
            parameter: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        trained = [p for p in parameters if p.requires_grad]
        self._one_group = self.num_groups == 1 and all(p in self._group for p in trained)

    def of(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], flat: Tensor | None = None
    ) -> Tensor:
        """Squared norms per group, as a float64 tensor.

        Args:
            parameters: What the gradients belong to; those in no group are left out.
            grads: Their gradients.
            flat: All of the gradients as one tensor, if there is one: then it is read in one go.
        """
        if flat is not None and self._one_group:
            return _sqr_norm(flat).double().reshape(1)
        device = grads[0].device if len(grads) else torch.device("cpu")
        sums = torch.zeros(self.num_groups, dtype=torch.float64, device=device)
        for parameter, grad in zip(parameters, grads, strict=True):
            if (index := self._group.get(parameter)) is not None:
                sums[index] += _sqr_norm(grad)
        return sums


class MeasureSchedule:
    """Which steps are measured: every n-th, or as often as a budget of time allows.

    All replicas have to agree, so what it is told must be the same on each of them.
    """

    FIRST = 8
    """Steps at the start that are always measured: there is no estimate yet."""
    LONGEST = 256
    """Steps after which a measurement is due, whatever it costs."""

    def __init__(self, every: int | Literal["auto"], budget: float) -> None:
        if every != "auto":
            _validate.whole("stats_every", every, at_least=1)
        _validate.real("stats_budget", budget, above=0)
        self._every = every
        self._budget = budget
        self._interval = 1 if every == "auto" else int(every)
        self._since = 0
        self._measured = 0

    def due(self) -> bool:
        """Whether the step that begins now is to be measured."""
        return self._measured < (self.FIRST if self._every == "auto" else 1) or (
            self._since + 1 >= self._interval
        )

    def committed(self, *, measured: bool) -> None:
        """A step was made."""
        self._since = 0 if measured else self._since + 1
        self._measured += measured

    def observe(self, cost: float) -> None:
        """Learns what a measurement costs.

        Args:
            cost: Time of the measurement over time of the step, the same number on all replicas.
        """
        if self._every == "auto" and self._measured >= self.FIRST // 2:
            wanted = cost / self._budget
            self._interval = max(1, min(self.LONGEST, round(wanted + 0.5)))
