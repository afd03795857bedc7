"""Micro-batches of one replica added up in `.grad`, each by its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from resilin.training.gradient.exchange import Exchange
from resilin.training.gradient.parameters import Parameters

_WIDEST = {torch.float16: 2.0}
"""Largest ratio of the unit of `.grad` to the new weight, so that no conversion overflows."""
_WIDE = 2.0**16
"""The same for other types."""


class Accumulation:
    """The sum in `.grad` of the trained parameters, and its unit.

    `.grad` is kept in units of a micro-batch's weight, so equal micro-batches cost nothing. Where
    that of the next micro-batch is so much smaller that the conversion might overflow, the gradient
    so far is put aside, and the next one is added by its share.

    Args:
        parameters: The parameters of the model.
        exchange: The step under way.
        views: Whether `.grad` may be views of buffers that the reduction writes to, so that a
            gradient that is put aside has to be copied.
    """

    def __init__(self, parameters: Parameters, exchange: Exchange, *, views: bool) -> None:
        self._parameters = parameters
        self._exchange = exchange
        self._views = views
        self._widest = min((_WIDEST.get(p.dtype, _WIDE) for p in parameters.all), default=_WIDE)

    def begin_step(self) -> None:
        """Forgets the step before. Gradients are left as they are."""
        self._unit = 0.0
        self._share = 1.0
        self.held: dict[Tensor, Tensor] | None = None
        """The gradient so far, while it is put aside."""

    @property
    def unit(self) -> float:
        """Weight that `.grad` has to be multiplied by, with the micro-batch at hand in it."""
        part = self._exchange.step.part
        return self._unit or (0.0 if part is None else part.weight)

    @property
    def share(self) -> float:
        """Weight of the micro-batch at hand, in units, while the others are put aside."""
        return self._share

    def begin(self) -> None:
        """Prepares for the micro-batch at hand."""
        part = self._exchange.step.part
        assert part is not None
        weight = part.weight
        self._share = 1.0
        if weight == 0:
            self.hold(0.0)
        elif self._unit > self._widest * weight:
            self.hold(weight / self._unit)
        elif self._unit:
            self._parameters.scale_grads(self._unit / weight)
            self._unit = weight

    def hold(self, share: float) -> None:
        """Set the gradient so far aside, so that the next one can be weighted separately."""
        self._share = share
        if not self._unit:
            # Nothing counts so far: what is there now is of the step before, and the loop may zero
            # it after the model was called.
            self.held = {}
            return
        grads = self._parameters.grads_by_parameter()
        self.held = {p: grad.clone() for p, grad in grads.items()} if self._views else grads
        self._remove_grads()

    def _remove_grads(self) -> None:
        if not self._views:
            self._parameters.clear_grads()
            return
        # DDP expects a gradient where an earlier micro-batch had one: zeros.
        for grad in self._parameters.grads():
            grad.zero_()

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Adds the micro-batch at hand to what was put aside, if anything was.

        Args:
            trained: Whether it had a backward pass.

        Returns:
            Whether `.grad` was changed.
        """
        if trained:
            self._unit = self.unit
        held, self.held = self.held, None
        if held is None or not (held or trained):
            return False
        new = self._parameters.take_grads() if trained and self._share else {}
        self._remove_grads()
        for parameter, grad in held.items():
            parameter.grad = grad
        for parameter, grad in new.items():
            grad.mul_(self._share)
            parameter.grad = held[parameter].add_(grad) if parameter in held else grad
        return True

    def take(self) -> dict[Tensor, Tensor]:
        """Takes the gradient so far away, and returns it."""
        self._unit = 0.0
        return self._parameters.take_grads()

    def restore_unused(self) -> None:
        """Gives parameters that no replica used the gradient back that was put aside."""
        for parameter, grad in (self.held or {}).items():
            if parameter.grad is None:
                parameter.grad = grad

    def abandon(self) -> None:
        """Removes a gradient of which a part is put aside."""
        if self.held is not None:
            self._parameters.clear_grads()
