"""Gradients that FSDP does not reduce: of unsharded parameters, and of penalties on sharded ones.

Parameters that are in no unit, or that the user has told FSDP to ignore, get the gradient of their
own process from autograd. It is weighed here per micro-batch, and added up over the data-parallel
members at the end of the step.

A penalty on the parameters themselves, such as `p.square().sum()`, reaches a sharded parameter past
FSDP, on all members alike. It does not depend on samples, so it has no weight: it is put aside, and
its mean over the micro-batches of this process is added to the mean gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from resilin.compat.torch_names import multiply_all
from resilin.engine.collectives import Wait
from resilin.training.gradient.exchange import Exchange
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.sharding import Sharding


class Unsharded:
    """Trained parameters that are whole on each process.

    Args:
        parameters: The parameters.
        sharding: The sharding of the rest.
        norms: Norms per parameter group.
        wait: Waits for a collective.
    """

    def __init__(
        self, parameters: Sequence[Tensor], sharding: Sharding, norms: GroupNorms, wait: Wait
    ) -> None:
        self._parameters = parameters
        self._sharding = sharding
        self._norms = norms
        self._wait = wait
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._sums: dict[Tensor, Tensor] = {}

    def take(self, factor: float, *, measure: bool) -> Tensor | None:
        """Takes the gradients of the micro-batch that is over.

        Args:
            factor: Number that they are multiplied by; 0 if they must not count.
            measure: Whether to measure them.

        Returns:
            Squared norms per parameter group of the multiples, this process's part of them; None if
            there is nothing to measure.
        """
        grads = {p: p.grad for p in self._parameters if p.grad is not None}
        for parameter in grads:
            parameter.grad = None
        if not factor:
            # A gradient that must not count may be infinite. Its parameter was used all the same.
            grads = {p: torch.zeros_like(grad) for p, grad in grads.items()}
        elif grads:
            multiply_all(list(grads.values()), factor)
        for parameter, grad in grads.items():
            known = self._sums.get(parameter)
            self._sums[parameter] = grad if known is None else known.add_(grad)
        if not (measure and factor and grads):
            return None
        return self._norms.of(list(grads), list(grads.values())) / (
            self._sharding.processes_per_replica
        )

    def reduce(self, exchange: Exchange, everyone: dist.ProcessGroup | None = None) -> None:
        """Adds the gradients up over all members; `.grad` is the sum then. Collective.

        Args:
            exchange: The way to the other members.
            everyone: The group of all members; None takes those of the mesh, one after the other.
        """
        if not self._parameters:
            return
        mesh = self._sharding.mesh
        groups = [everyone] if everyone is not None else list(map(mesh.get_group, range(mesh.ndim)))
        # A parameter that no member used keeps no gradient, so that the optimizer leaves it alone.
        used = exchange.add_up([float(parameter in self._sums) for parameter in self._parameters])
        chosen = [p for p, count in zip(self._parameters, used, strict=True) if count]
        for kind in dict.fromkeys((p.dtype, p.device) for p in chosen):
            alike = [p for p in chosen if (p.dtype, p.device) == kind]
            parts = [self._sums.get(p, torch.zeros_like(p)).reshape(-1) for p in alike]
            flat = torch.cat(parts).detach()
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            for group in groups:
                self._wait(dist.all_reduce(real, group=group, async_op=True))
            grads = torch.split(flat, [p.numel() for p in alike])
            for parameter, grad in zip(alike, grads, strict=True):
                parameter.grad = grad.view(parameter.shape)
        self._sums = {}


class Penalties:
    """Gradients that autograd itself gives to sharded parameters.

    Args:
        parameters: The sharded parameters that are trained.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(self._taker(parameter)) for parameter in parameters
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._sums: dict[Tensor, Tensor] = {}
        self._num = 0

    def __bool__(self) -> bool:
        """Whether there are any in this step."""
        return bool(self._sums)

    def _taker(self, parameter: Any) -> Any:
        def take(grad: Any) -> Any:
            if grad.placements != parameter.placements:
                grad = grad.redistribute(parameter.device_mesh, parameter.placements)
            with torch.no_grad():
                own, known = grad.to_local(), self._sums.get(parameter)
                self._sums[parameter] = own.clone() if known is None else known.add_(own)
            return torch.zeros_like(grad)

        return take

    def end_micro_batch(self) -> None:
        """Counts a micro-batch."""
        self._num += 1

    def add(self) -> None:
        """Adds the mean over the micro-batches to the gradients."""
        for parameter, penalty in self._sums.items():
            grad: Any = parameter.grad
            assert grad is not None
            with torch.no_grad():
                grad.to_local().add_(penalty, alpha=1 / max(1, self._num))

    def release(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
