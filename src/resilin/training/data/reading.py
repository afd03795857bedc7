"""Batches that a loop has read and not trained yet: which of them does it train?

A loop may read ahead, through a generator or a thread that fetches the next batch early, or leave a
batch out. Both ask for a batch while the one before was not trained, and only the tensors that the
model is called with tell them apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from resilin.training.tensors import tensors_in

_memory: Any = StorageWeakRef
_SAMPLED = 256
"""Numbers of a tensor that recognise a copy of it."""
_DEPTH = 4
"""Objects within objects in which tensors of a batch are looked for."""
_LIKE, _UNLIKE = 0.98, 0.9
"""Correlations with a batch from which a tensor was computed, and with any other one."""


class _Mark(NamedTuple):
    """A tensor of a batch, which is not kept alive."""

    storage: StorageWeakRef
    """Its memory; a view has the same."""
    shape: torch.Size
    """Its shape."""
    sample: Tensor | None
    """Some of its numbers, where it is; None if copies of it need not be recognised."""


@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """A micro-batch that the loop has, recognised by its tensors."""

    marks: tuple[_Mark, ...]
    """Its tensors."""
    span: range
    """Positions of its step."""
    weight: float = 0.0
    """Its weight, if the loader weighs batches."""

    @classmethod
    def of(cls, batch: Any, span: range, weight: float = 0.0, *, copies: bool = True) -> Handed:
        """The marks of a batch as the loader gives it.

        Args:
            batch: The batch.
            span: Positions of its step.
            weight: Its weight, if the loader weighs batches.
            copies: Whether copies of its tensors are to be recognised.
        """
        marks = [
            _Mark(
                _memory(each.untyped_storage()),
                each.shape,
                _sample(each) if copies else None,
            )
            for each in _tensors(batch)
        ]
        return cls(tuple(marks), span, weight)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(mark.shape)) for mark in self.marks[:3]) or "no tensor"
        return f"positions {self.span.start} to {self.span.stop} ({shapes})"


class Reading:
    """The batches of a pass that the loop has read and not trained yet.

    The first of them is the current micro-batch, which the loader has handed out to the model. The
    steps of the others begin when the model is called with them.
    """

    def __init__(self, depth: int | None) -> None:
        self.lock = RLock()
        """A thread of the loop may read ahead."""
        self.first: Handed | None = None
        """The current micro-batch, once the loop has read more than that."""
        self.ahead: deque[Handed] = deque()
        """Those after it."""
        self.depth = depth
        """How many those are whenever the loop trains; None if that is not known."""
        self.requests = 0
        """Batches that the loop has asked for."""
        self.over = False
        """Whether the loop was told that there is no other."""
        self.cut = False
        """Whether the loop asks for no other, since another loader of a `zip` is over."""
        self.one_by_one = False
        """Whether the loop has trained its first batch before it asked for another one."""
        self.trains_first = False
        """Whether it has ended the backward pass of a batch before it asked for another one."""
        self.called = 0
        """The same when the model was called with the current micro-batch."""
        self._recognised: tuple[Handed, int] | None = None

    def find(self, first: Handed, values: Any, gone: Sequence[Handed], called: bool) -> int | None:
        """Finds the batch that the model is called with.

        Args:
            first: The current micro-batch.
            values: Arguments of the model, or a batch as the loader gave it.
            gone: Batches that were counted as left out before.
            called: Whether an earlier call waits for its backward pass.

        Returns:
            How many batches the loop leaves out before it; None if nothing tells.

        Raises:
            RuntimeError: The batch cannot be trained any more.
        """
        self.first = first
        handed = [*gone, first, *self.ahead]
        steady = len(self.ahead) == self.depth and not (gone or self.over)
        found = trained_one(values, handed, copies=not steady)
        again = called and self.called == self.requests
        if found is None:
            if again or steady or (self.over and self.depth is not None and not gone):
                return 0
            if self.one_by_one and not self.ahead:
                return 0  # such a loop has left out the others
            # The loop has called the model, left that batch out, and asked for another one.
            return 1 if called and len(self.ahead) == 1 and not gone else None
        index = found - len(gone)
        if index < 0:
            raise RuntimeError(_too_late(handed[found]))
        if index and again:
            raise RuntimeError(_joined(first, handed[found]))
        if not index and self.ahead:
            seen, self._recognised = self._recognised, (first, len(self.ahead))
            if seen is not None and seen[0] is not first:
                self.depth = len(self.ahead) if seen[1] == len(self.ahead) else None
        return index

    def undecided(self, gone: Sequence[Handed]) -> str:
        """The refusal of a call whose batch cannot be told."""
        assert self.first is not None
        handed = [*gone, self.first, *self.ahead]
        return (
            f"the loop has read the batches at {handed[0]} and at {handed[-1]} and trained "
            "neither, and the model is called with tensors of which nothing tells whose they are: "
            f"their gradient would be weighed as that of the wrong batch; {_WAYS_OUT}"
        )


_WAYS_OUT = (
    "read ahead with `loader.prefetch(device, ahead=2)`, or call the model within `with "
    "model.using(batch):`, where batch is what the loader gave"
)


def _too_late(batch: Handed) -> str:
    """The refusal of a batch that was counted as left out."""
    return (
        f"the model is called with the batch at {batch}, which was counted as left out when the "
        "loop asked for the next one: a loop cannot read ahead over the end of a pass, from a "
        f"stream, or in a live job; {_WAYS_OUT.partition(',')[0]}, and end each pass with what it "
        "has read"
    )


def _joined(one: Handed, other: Handed) -> str:
    """The refusal of two batches in one loss."""
    return (
        f"two batches of one loader, at {one} and at {other}, are trained with one loss: each "
        "belongs to a step of its own; make the loader with a larger batch_size"
    )


def trained_one(values: Any, handed: Sequence[Handed], *, copies: bool) -> int | None:
    """Finds the one batch that these values are of.

    Their memory tells, or else their numbers, or else how these correlate with those of a batch,
    as after a normalisation. What is in all of the batches, such as a mask of ones, says nothing.

    Args:
        values: Arguments of the model, or a batch as the loader gave it.
        handed: Batches that the loop has.
        copies: Whether to look for copies of their tensors, too: that reads from the device.

    Returns:
        Its index; None if the tensors tell of none, or of several.
    """
    tensors = list(_tensors(values))
    possible = set(range(len(handed)))
    for same in (_same_memory, _same_numbers, _same_pattern) if copies else (_same_memory,):
        told = [within for each in tensors if 0 < len(within := same(each, handed)) < len(handed)]
        if told:
            possible = possible.intersection(*told)
        if len(possible) < 2:
            break
    return possible.pop() if len(possible) == 1 < len(handed) else None


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors and arrays with memory of their own, also in objects that are no containers."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not hasattr(value, "__tensor_flatten__"):
            yield value.detach().as_subclass(Tensor)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            yield torch.tensor(value)
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        if depth:
            yield from _tensors(vars(value), depth - 1)
    else:
        yield from tensors_in(value)


def _same_memory(tensor: Tensor, handed: Sequence[Handed]) -> set[int]:
    storage = _memory(tensor.untyped_storage())
    return {n for n, each in enumerate(handed) if any(m.storage == storage for m in each.marks)}


def _same_numbers(tensor: Tensor, handed: Sequence[Handed]) -> set[int]:
    own = _own_sample(tensor, handed)
    # A copy may have another type, such as bfloat16.
    return {
        n
        for n, each in enumerate(handed)
        if own is not None
        and any(_equal(s.to(own.dtype), own) for s in _samples(each, tensor) if _keeps(s, own))
    }


def _same_pattern(tensor: Tensor, handed: Sequence[Handed]) -> set[int]:
    own = _own_sample(tensor, handed)
    if own is None or not own.is_floating_point() or len(own) < _SAMPLED // 4:
        return set()
    alike = [max((_like(s, own) for s in _samples(each, tensor)), default=0.0) for each in handed]
    found = {n for n, each in enumerate(alike) if each >= _LIKE}
    return found if sum(each > _UNLIKE for each in alike) == len(found) == 1 else set()


def _samples(handed: Handed, tensor: Tensor) -> list[Tensor]:
    marks = [mark for mark in handed.marks if mark.shape == tensor.shape]
    return [mark.sample.cpu() for mark in marks if mark.sample is not None]


def _own_sample(tensor: Tensor, handed: Sequence[Handed]) -> Tensor | None:
    alike = any(mark.shape == tensor.shape for each in handed for mark in each.marks)
    return _sample(tensor).cpu() if alike and tensor.numel() > 1 else None


def _keeps(sample: Tensor, own: Tensor) -> bool:
    """Whether a conversion of its type could be a copy: one to bool is a comparison."""
    return (own.dtype is torch.bool) == (sample.dtype is torch.bool)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are equal, NaN included."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _like(one: Tensor, other: Tensor) -> float:
    """The correlation of numbers; 0 if some are constant or not finite."""
    a, b = (each.double() - each.double().mean() for each in (one, other))
    correlation = float(a @ b / (a.norm() * b.norm()))
    return correlation if math.isfinite(correlation) else 0.0


def _sample(tensor: Tensor) -> Tensor:
    """Numbers at places that are spread over a tensor, where it is: nothing waits for them."""
    num = tensor.numel()
    if num <= _SAMPLED:
        return tensor.flatten().clone()
    at = torch.arange(_SAMPLED, device=tensor.device) * (num - 1) // (_SAMPLED - 1)
    return tensor[torch.unravel_index(at, tensor.shape)]
