"""Side effects of the body of a step, and how they are taken back.

A step that was lost is issued again, and its body runs twice. Sums, buffers of the model (as those
of BatchNorm) and random generators are put back to what they were before it. What a script counts
on its own is not known here, and counts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from resilin.training.state.randomness import remembered
from resilin.training.state.registry import Summed

if TYPE_CHECKING:
    from resilin.training.job import Job


class Body:
    """The state before the body of a step.

    Args:
        job: The job, which has the sums and the model.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._undo: list[Callable[[], None]] = []

    def begins(self) -> None:
        """Remembers what the body is about to change."""
        sums = [(thing, thing.state_dict()) for thing in self._job.registry.summed.values()]
        self._undo = [remembered(), lambda: _put_back_sums(sums)]
        if self._job.trained is None:
            return
        buffers = [b for b in self._job.trained.module.buffers() if b.numel()]
        if buffers:
            copies = [buffer.detach().clone() for buffer in buffers]
            self._undo.append(lambda: _put_back(buffers, copies))

    def take_back(self) -> None:
        """Undoes what the body has changed, once."""
        undo, self._undo = self._undo, []
        for each in undo:
            each()


def _put_back_sums(sums: list[tuple[Summed, dict[str, Any]]]) -> None:
    for thing, state in sums:
        thing.load_state_dict(state)


@torch.no_grad()
def _put_back(tensors: list[Tensor], copies: list[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)
