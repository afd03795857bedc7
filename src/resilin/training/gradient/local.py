"""The reducer of one replica: nothing is sent, and micro-batches are the samples of the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resilin.compat.torch_names import interpolate_all
from resilin.core.step import Share
from resilin.engine.devices import Fetched
from resilin.training.gradient.accumulation import Accumulation
from resilin.training.gradient.reducer import Model, fetch_norms
from resilin.training.gradient.timing import Stopwatch


class LocalReducer:
    """Adds up the micro-batches of one replica.

    In a step that is measured, each micro-gradient is taken out of `.grad` and added to a running
    mean, so that its norm is known.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, model: Model) -> None:
        self._model = model
        self._exchange = model.exchange
        self._sum = Accumulation(model.parameters, model.exchange, views=False)

    @classmethod
    def fits(cls, model: Model, group: dist.ProcessGroup | None) -> bool:
        """Whether there is only one replica."""
        return group is None

    def attach(self, group: dist.ProcessGroup | None, *, source: int | None) -> None:
        """There is nothing to wrap, and nobody to copy from."""

    def detach(self) -> None:
        """There is nothing to take off."""

    def begin_step(self) -> None:
        """Forgets the step before. Gradients are left as they are."""
        self._sum.begin_step()
        self._mean: dict[Tensor, Tensor] = {}
        self._mean_weight = 0.0
        self._mean_norms: Tensor | None = None
        self._terms: Tensor | None = None
        self._num_measured = 0
        self._watch = Stopwatch()

    @property
    def shared(self) -> bool:
        """Whether others have a part of the step: there are none."""
        return False

    # One micro-batch -----------------------------------------------------------------------

    def begin(self) -> None:
        """Prepares `.grad` for the micro-batch at hand."""
        self._sum.begin()

    def forward(self, call: Callable[[nn.Module], Any], *, last: bool) -> Any:
        """Calls the module."""
        return call(self._model.module)

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Takes in the micro-batch at hand, and measures it if the step is measured."""
        changed = self._sum.end_micro_batch(trained=trained)
        step = self._exchange.step
        part = step.part
        if not trained or not step.measure or part is None or not part.weight:
            return changed
        with self._watch:
            self._measure(part.weight)
        return True

    def _measure(self, weight: float) -> None:
        """Measures one micro-gradient and adds it to the weighted running mean."""
        grads, mean = self._sum.take(), self._mean
        term = weight * self._model.norms.of(list(grads), list(grads.values()))
        self._terms = term if self._terms is None else self._terms + term
        self._num_measured += 1
        self._mean_weight += weight
        share = weight / self._mean_weight
        both = [p for p in grads if p in mean and grads[p].layout is torch.strided]
        for parameter in grads.keys() & mean.keys() - set(both):
            # Only sums and multiples are defined for sparse ones.
            mean[parameter].mul_(1 - share).add_(grads[parameter].mul_(share))
        if both:
            interpolate_all([mean[p] for p in both], [grads[p] for p in both], share)
        for parameter, old in mean.items():
            if parameter not in grads:
                old.mul_(1 - share)
        for parameter, grad in grads.items():
            if parameter not in mean:
                mean[parameter] = grad if share == 1 else grad.mul_(share)

    # The whole step ------------------------------------------------------------------------

    def finish(self, *, trained: bool) -> None:
        """Takes in the last micro-batch; what was measured becomes the gradient."""
        if not self._exchange.step.empty:
            self._end_last(trained=trained)
        share = Share(
            divisor=self._exchange.step.weight,
            num_gradients=self._num_measured,
            seconds=self._watch.seconds,
        )
        self._exchange.send(share)

    def _end_last(self, *, trained: bool) -> None:
        if not self._num_measured:
            # Alone it has nothing to be compared with.
            self._sum.end_micro_batch(trained=trained)
            return
        self.end_micro_batch(trained=trained)
        with self._watch:
            for parameter, grad in self._mean.items():
                parameter.grad = grad
            self._mean_norms = self._model.norms.of(list(self._mean), list(self._mean.values()))

    def rescale(self, weight: float) -> Fetched | None:
        """Divides the sum by its weight; a running mean is one already."""
        if self._mean_norms is None or self._terms is None:
            self._model.parameters.scale_grads(self._sum.unit / weight)
            return None
        return fetch_norms(self._terms, self._mean_norms, None)

    def abandon(self) -> None:
        """Removes a gradient of which a part is not in `.grad`."""
        self._sum.abandon()
        if self._mean:
            self._model.parameters.clear_grads()
