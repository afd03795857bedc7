"""Buffers that are in no `state_dict()` of the model, once the training has changed them.

A buffer with `persistent=False` is a constant as a rule, such as a mask: the script makes it again.
One that training changes, such as a counter of steps, is a part of the state of the job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from resilin.compat.torch_names import version_of

logger = logging.getLogger("resilin")


class UnsavedBuffers:
    """Keeps and restores those that have changed; a voter, so that all replicas keep the same ones.

    Which have changed is seen by their versions, and then by their contents: replicas send them to
    each other, whether they have changed or not. Contents that are the same are compared again
    after as many steps as there were until then, because the host waits for a device there.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        saved = module.state_dict(keep_vars=True).keys()
        self._module = module
        self._first = {
            name: buffer.detach().cpu().clone()
            for name, buffer in module.named_buffers()
            if name not in saved and type(buffer) is Tensor
        }
        self._seen = {name: (id(b), version_of(b)) for name, b in self._now().items()}
        self._changed = dict.fromkeys(self._first, False)
        self._due = dict.fromkeys(self._first, 0)
        self._num_steps = 0

    def __bool__(self) -> bool:
        """Whether there are such buffers."""
        return bool(self._first)

    def _now(self) -> dict[str, Tensor]:
        """Those that have the shape and type that they had."""
        found = {}
        for name, first in self._first.items():
            owner, _, own = name.rpartition(".")
            buffer = getattr(self._module.get_submodule(owner), own, None)
            if buffer is not None and (buffer.shape, buffer.dtype) == (first.shape, first.dtype):
                found[name] = buffer
        return found

    def votes(self) -> tuple[float, ...]:
        """Whether each has changed on this replica."""
        self._num_steps += 1
        now = self._now()
        return tuple(
            float(changed or (name in now and self._differs(name, now[name])))
            for name, changed in self._changed.items()
        )

    def _differs(self, name: str, buffer: Tensor) -> bool:
        mark = id(buffer), version_of(buffer)
        if mark == self._seen[name] or self._num_steps < self._due[name]:
            return False
        self._seen[name] = mark
        self._due[name] = 2 * self._num_steps
        return not torch.equal(buffer.detach().cpu(), self._first[name])

    def counted(self, votes: tuple[float, ...]) -> None:
        """Keeps those that have changed on any replica."""
        self._changed = {n: bool(sum) for n, sum in zip(self._changed, votes, strict=True)}

    def state_dict(self) -> dict[str, Tensor]:
        """Those that have changed; one with another shape as it was at first."""
        now = self._now()
        return {n: now.get(n, self._first[n]) for n, changed in self._changed.items() if changed}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores them. One that the script makes otherwise by now stays as it is."""
        now = self._now()
        for name, kept in state.items():
            if name in now and now[name].shape == kept.shape:
                now[name].copy_(kept)
                self._changed[name] = True
            else:
                logger.warning(
                    "the state has the buffer %s of shape %s, and the model has none of this name "
                    "and shape outside of its state_dict(): it stays as the script makes it",
                    name,
                    tuple(kept.shape),
                )
