"""Batches that a loop has read and not trained yet: which of them does it train?

A loop may read ahead, through a generator or a thread that fetches the next batch early, or leave a
batch out. Both ask for a batch while the one before was not trained, and only the tensors that the
model is called with tell them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from resilin.training.tensors import tensors_in

_memory: Any = StorageWeakRef
_SAMPLED = 256
"""Numbers of a tensor that recognise a copy of it."""


class _Mark(NamedTuple):
    """A tensor of a batch, which is not kept alive."""

    storage: StorageWeakRef
    """Its memory; a view has the same."""
    shape: torch.Size
    """Its shape."""
    sample: Tensor
    """Some of its numbers, on the CPU; none if copies of it need not be recognised."""


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
                _sample(each, _SAMPLED if copies else 0),
            )
            for each in _plain(tensors_in(batch))
        ]
        return cls(tuple(marks), span, weight)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(mark.shape)) for mark in self.marks) or "no tensor"
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

    Tensors that are in all of the batches, such as a mask of ones, say nothing.

    Args:
        values: Arguments of the model, or a batch as the loader gave it.
        handed: Batches that the loop has.
        copies: Whether to look for copies of their tensors, too: that reads from the device.

    Returns:
        Its index; None if the tensors tell of none, or of several.
    """
    tensors = list(_plain(tensors_in(values)))
    for same in (_same_memory, _same_numbers) if copies else (_same_memory,):
        told = [within for each in tensors if 0 < len(within := same(each, handed)) < len(handed)]
        if told:
            found = set.intersection(*told)
            return found.pop() if len(found) == 1 else None
    return None


def _plain(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Those that have memory of their own."""
    for tensor in tensors:
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            yield tensor


def _same_memory(tensor: Tensor, handed: Sequence[Handed]) -> set[int]:
    storage = _memory(tensor.untyped_storage())
    return {n for n, each in enumerate(handed) if any(m.storage == storage for m in each.marks)}


def _same_numbers(tensor: Tensor, handed: Sequence[Handed]) -> set[int]:
    alike = {
        n: [mark.sample for mark in each.marks if mark.shape == tensor.shape]
        for n, each in enumerate(handed)
    }
    if not any(alike.values()) or tensor.numel() < 2:
        return set()
    own = _sample(tensor)
    # A copy may have another type, such as bfloat16.
    return {
        n
        for n, samples in alike.items()
        if any(_equal(sample.to(own.dtype), own) for sample in samples)
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether numbers are equal, NaN included."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _sample(tensor: Tensor, most: int = _SAMPLED) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= most:
        return flat.to("cpu", copy=True)
    at = torch.arange(most, device=flat.device) * (flat.numel() - 1) // max(1, most - 1)
    return flat[at].cpu()
