"""Gradient statistics where they are cheap: squared norms of gradients that exist anyway.

With several replicas, each replica's gradient is one micro-batch of the estimator, read from
DDP's flat buckets just before and just after their reduction. On one replica that accumulates,
the micro-gradients are. `MeasureSchedule` decides which steps are measured at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilin.compat.torch_names import norms_of_all
from resilin.core import _validate, time_share
from resilin.core.noise import NoiseSample, from_sums
from resilin.engine import devices

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


class GroupNorms:
    """Squared norms of gradients, added up per parameter group of the optimizer."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self.num_groups = len(optimizer.param_groups)
        # Parameters that the optimizer does not have go to a group of their own, which is dropped.
        self._group = {
            parameter: index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self.update(parameters)

    def update(self, parameters: Iterable[Tensor]) -> None:
        """Takes over which of the parameters are trained now."""
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
            return sqr_norms([flat])
        if not grads:
            return torch.zeros(self.num_groups, dtype=torch.float64)
        norms = sqr_norms(grads)
        if self._one_group:
            return norms.sum().reshape(1)
        groups = [self._group.get(parameter, self.num_groups) for parameter in parameters]
        sums = norms.new_zeros(self.num_groups + 1)
        return sums.index_add_(0, torch.tensor(groups, device=norms.device), norms)[:-1]


def noise_samples(
    weight: float, num: int, terms: Sequence[float], means: Sequence[float]
) -> tuple[NoiseSample, ...] | None:
    """Noise per parameter group; None if there is only one gradient."""
    if num < 2:
        return None
    return tuple(
        from_sums(
            batch_size=weight,
            num_micro_batches=num,
            weighted_sqr_norm=term / weight,
            mean_sqr_norm=mean,
        )
        for term, mean in zip(terms, means, strict=True)
    )


class MeasureSchedule:
    """Selects the measured steps: every n-th, or as often as a budget of time allows.

    All replicas have to agree, so what it is told must be the same on each of them.
    """

    FIRST = 8
    """Steps at the start that are always measured: there is no estimate yet."""
    LONGEST = 256
    """Steps after which a measurement is due, whatever it costs."""

    BUDGET = 0.02
    """Time for measuring, as a fraction of the step, where nobody says otherwise."""

    def __init__(self, every: int | Literal["auto"], budget: float | None = None) -> None:
        if every != "auto":
            _validate.whole("stats_every", every, at_least=1)
            if budget is not None:
                raise ValueError(
                    f"stats_budget ({budget}) is for stats_every='auto', which is {every}"
                )
        self._every = every
        self._budget = self.BUDGET if budget is None else budget
        _validate.real("stats_budget", self._budget, above=0)
        self.interval = 1 if every == "auto" else int(every)
        """Steps from one measurement to the next."""
        self._since = 0
        self._measured = 0

    @property
    def asked(self) -> bool:
        """Whether the user gave a number of steps: measured at any batch size and by any rule."""
        return self._every != "auto"

    def due(self) -> bool:
        """Whether the step that begins now is to be measured."""
        return self._measured < (self.FIRST if self._every == "auto" else 1) or (
            self._since + 1 >= self.interval
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
            self.interval = time_share.interval(cost, self._budget, longest=self.LONGEST)

    def state_dict(self) -> dict[str, int]:
        """State of the schedule, for checkpoints."""
        return {"interval": self.interval, "since": self._since, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what `state_dict` returned; a fixed interval stays that of this run."""
        if self._every == "auto":
            self.interval = int(state["interval"])
        self._since, self._measured = int(state["since"]), int(state["measured"])
