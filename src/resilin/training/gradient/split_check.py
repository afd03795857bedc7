"""A check whether the gradient of a loss depends on the split of its batch.

A step that is accumulated, or shared by replicas, is exact for losses that are means over samples.
Losses that couple samples (contrastive ones, class weights, Dice, BatchNorm) are another loss for
each split. This compares the two gradients for one batch, once, and leaves no trace in the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from resilin.compat.torch_names import Dropout, tree_leaves
from resilin.core import _validate
from resilin.training.data.tickets import CannotResize, split


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheck:
    """Result of `check_split`. Its text form is a sentence."""

    difference: float
    """Distance between the gradient in pieces and the whole one, over the length of the latter."""
    randomness: float
    """The same for two passes over the whole batch with different random numbers."""
    sizes: tuple[int, ...]
    """Samples in each piece."""
    tolerance: float
    """The largest difference that counts as rounding."""

    @property
    def same(self) -> bool:
        """Whether the split changes nothing but rounding."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        cut = f"{sum(self.sizes)} samples in pieces of {', '.join(map(str, self.sizes))}"
        if self.same:
            return (
                f"{cut}: the gradient is that of the whole batch (relative difference "
                f"{self.difference:.2g}, within {self.tolerance:g})"
            )
        found = f"{cut}: the gradient differs from that of the whole batch by {self.difference:.2g}"
        if self.randomness > self.tolerance:
            return (
                f"{found}, but the loss is random: two passes over the whole batch differ by "
                f"{self.randomness:.2g}; check it without that randomness"
            )
        return (
            f"{found}: this loss couples the samples of a batch, or is no mean over them, and "
            "trains differently when a step is accumulated or has more replicas"
        )


def compare_pieces(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batch: Any,
    *,
    pieces: int,
    weight: Callable[[Any], Any] | None,
    tolerance: float,
) -> SplitCheck:
    """Compares the gradient of a batch in pieces with that of the whole batch.

    Args:
        model: An `AdaptiveDataParallel`.
        loss: As all the others: see `resilin.check_split`.
        batch: A collated batch.
        pieces: Into how many pieces of nearly equal size it is split.
        weight: The weight of a collated batch; None weighs by samples, or by `model.weight()`.
        tolerance: The largest relative difference that counts as rounding.
    """
    _validate.whole("pieces", pieces, at_least=2)
    _validate.real("tolerance", tolerance, above=0)
    parts = _cut(batch, pieces)
    module: Any = model.module
    parameters = [p for p in module.parameters() if p.requires_grad]
    passes = _Passes(model, parameters, loss, weight)
    with _undisturbed(module):
        whole, _ = passes.run(batch, 0.0)
        again, _ = passes.run(batch, 0.0)
        found = [passes.run(part, float(size)) for part, size in parts]
    total = sum(each for _, each in found)
    if not total > 0:
        raise ValueError(f"the weights of the {pieces} pieces add up to {total}, not more than 0")
    mean = [
        sum(grads[place] * (each / total) for grads, each in found)
        for place in range(len(parameters))
    ]
    return SplitCheck(
        difference=_distance(mean, whole),
        randomness=_distance(again, whole),
        sizes=tuple(size for _, size in parts),
        tolerance=tolerance,
    )


class _Passes:
    """Passes forward and back that are no part of a step."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        loss: Callable[[Any], Tensor],
        weight: Callable[[Any], Any] | None,
    ) -> None:
        self._model, self._parameters = model, parameters
        self._loss, self._weight = loss, weight

    def run(self, batch: Any, size: float) -> tuple[list[Tensor], float]:
        """Gradients of all parameters, in double precision, and the weight of the batch."""
        told: list[float] = []

        @contextmanager
        def weight(value: float) -> Iterator[None]:
            told.append(float(value))
            yield

        # The module itself, without the reduction and what else belongs to a step.
        module: Any = self._model.module
        own = {"forward": module.__call__, "weight": weight}
        vars(self._model).update(own)
        try:
            with torch.enable_grad():
                loss = self._loss(batch)
                grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        finally:
            for name in own:
                vars(self._model).pop(name, None)
        if self._weight is not None:
            size = float(self._weight(batch))
        elif told:
            size = told[0]
        filled = zip(grads, self._parameters, strict=True)
        return [_double(torch.zeros_like(p) if g is None else g) for g, p in filled], size


def _double(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.is_sparse else grad
    return torch.view_as_real(grad).double() if grad.is_complex() else grad.double()


def _distance(found: list[Any], right: list[Tensor]) -> float:
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, right, strict=True))
    length = sum(float(grad.square().sum()) for grad in right)
    return float((apart / length) ** 0.5) if length else float(apart > 0)


def _cut(batch: Any, pieces: int) -> list[tuple[Any, int]]:
    """The pieces of a batch with their sizes, which differ by at most one."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    size = len(tensors[0]) if tensors else 0
    if size < pieces:
        raise ValueError(f"a batch of {size} samples cannot be split into {pieces} pieces")
    parts, rest = [], batch
    for left in range(pieces, 1, -1):
        each = -(-size // left)
        try:
            first, rest = split(rest, each, size)
        except CannotResize:
            raise ValueError(
                "the samples of this batch cannot be told apart: check_split() takes tensors with "
                f"the samples along the first dimension ({size} here), in tuples, lists and dicts"
            ) from None
        parts.append((first, each))
        size -= each
    return [*parts, (rest, size)]


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers and random numbers are what they were; dropout is off within it."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    dropouts = [m for m in module.modules() if isinstance(m, Dropout) and m.training]
    numpy: Any = sys.modules.get("numpy")
    drawn = random.getstate(), None if numpy is None else numpy.random.get_state()
    for dropout in dropouts:
        dropout.training = False
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for dropout in dropouts:
            dropout.training = True
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        random.setstate(drawn[0])
        if numpy is not None:
            numpy.random.set_state(drawn[1])
