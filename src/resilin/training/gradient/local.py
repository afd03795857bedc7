"""The gradient of one replica: its micro-batches added up, each by its weight."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from resilin.compat.torch_names import interpolate_all, multiply_all
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.parameters import Parameters

_GRAD = operator.attrgetter("grad")
_WIDEST = {torch.float16: 2.0}
"""Largest ratio of the unit of `.grad` to the new weight, so that no conversion overflows."""
_WIDE = 2.0**16
"""The same for other types."""


class LocalGradient:
    """Contents and unit of `.grad` of the trained parameters during a step.

    `.grad` is kept in units of a micro-batch's weight, so equal micro-batches cost nothing. Where
    that of the next micro-batch is so much smaller that the conversion might overflow, the gradient
    so far is put aside, and the next one is added by its share.
    """

    def __init__(self, parameters: Parameters, norms: GroupNorms) -> None:
        self._parameters = parameters
        self._norms = norms
        self._widest = min((_WIDEST.get(p.dtype, _WIDE) for p in parameters.all), default=_WIDE)
        self.reset()

    def reset(self) -> None:
        """Forgets the step. Gradients are left as they are."""
        self.unit = 0.0
        """Factor that `.grad` has to be multiplied by; 0 while it is empty."""
        self.weight = 0.0
        """Weight of all micro-batches so far."""
        self.held: dict[Tensor, Tensor] | None = None
        """The gradient so far, while it is put aside."""
        self.share = 1.0
        """Weight of the micro-batch at hand, in units, while the others are put aside."""
        self._mean: dict[Tensor, Tensor] = {}
        self._mean_weight = 0.0
        self._terms: Tensor | None = None
        self.num_measured = 0
        """Micro-gradients that were measured one by one."""

    def grads(self) -> dict[Tensor, Tensor]:
        """The gradients that are there."""
        return {p: p.grad for p in self._parameters.trained if p.grad is not None}

    def tensors(self) -> list[Tensor]:
        """The same without their parameters."""
        return [grad for grad in map(_GRAD, self._parameters.trained) if grad is not None]

    def scale(self, factor: float) -> None:
        """Multiplies the gradient."""
        if factor != 1 and (grads := self.tensors()):
            multiply_all(grads, factor)

    def clear(self) -> None:
        """Takes the gradient away."""
        for parameter in self._parameters.trained:
            parameter.grad = None

    def take(self) -> dict[Tensor, Tensor]:
        """Takes the gradient away, and returns it."""
        grads = self.grads()
        self.clear()
        return grads

    @property
    def empty(self) -> bool:
        """Whether nothing is here but what `.grad` may hold."""
        return not self._mean and self.held is None

    # One micro-batch -----------------------------------------------------------------------

    def align(self, weight: float, *, copy: bool) -> None:
        """Prepares for a micro-batch of this weight.

        Args:
            weight: By how much it counts.
            copy: Whether a gradient that is put aside has to be copied.
        """
        self.share = 1.0
        if weight == 0:
            self.hold(0.0, copy=copy)
        elif self.unit > self._widest * weight:
            self.hold(weight / self.unit, copy=copy)
        elif self.unit:
            self.scale(self.unit / weight)
            self.unit = weight

    def add_weight(self, weight: float) -> None:
        """The backward pass of the micro-batch has begun."""
        self.weight += weight
        self.unit = self.unit or weight

    def hold(self, share: float, *, copy: bool) -> None:
        """Set the gradient so far aside, so that the next one can be weighted separately."""
        self.share = share
        if not copy:
            self.held = self.take()
            return
        # They may be views of DDP's buckets, which the reduction writes to. And DDP expects a
        # gradient where an earlier micro-batch had one: zeros, to which the next one is added.
        self.held = {parameter: grad.clone() for parameter, grad in self.grads().items()}
        for grad in self.tensors():
            grad.zero_()

    def merge(self, *, trained: bool) -> None:
        """Puts the gradient that was put aside back, with its share of the new one.

        Args:
            trained: Whether there is a new one.
        """
        if self.held is None:
            return
        held, self.held = self.held, None
        new = self.take() if trained and self.share else {}
        self.clear()
        for parameter, grad in held.items():
            parameter.grad = grad
        for parameter, grad in new.items():
            grad.mul_(self.share)
            parameter.grad = held[parameter].add_(grad) if parameter in held else grad

    def restore_unused(self) -> None:
        """Gives parameters that no replica used the gradient back that was put aside."""
        for parameter, grad in (self.held or {}).items():
            if parameter.grad is None:
                parameter.grad = grad

    # Measured one by one -------------------------------------------------------------------

    def absorb(self, weight: float) -> None:
        """Measures one micro-gradient and adds it to the weighted running mean."""
        grads = self.take()
        term = weight * self._norms.of(list(grads), list(grads.values()))
        self._terms = term if self._terms is None else self._terms + term
        self.num_measured += 1
        self._mean_weight += weight
        self.unit = 0.0
        share = weight / self._mean_weight
        both = [p for p in grads if p in self._mean]
        if both:
            interpolate_all([self._mean[p] for p in both], [grads[p] for p in both], share)
        for parameter, mean in self._mean.items():
            if parameter not in grads:
                mean.mul_(1 - share)
        for parameter, grad in grads.items():
            if parameter not in self._mean:
                self._mean[parameter] = grad if share == 1 else grad.mul_(share)

    def take_mean(self) -> tuple[list[float], list[float]]:
        """Makes the running mean the gradient.

        Returns:
            Per parameter group, the weighted squared norms of the micro-gradients, added up, and
            the squared norms of the mean.
        """
        for parameter, grad in self._mean.items():
            parameter.grad = grad
        norms = self._norms.of(list(self._mean), list(self._mean.values()))
        assert self._terms is not None
        return self._terms.tolist(), norms.tolist()
