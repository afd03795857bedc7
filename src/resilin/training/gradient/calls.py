"""Calls of the module: what they returned, and which of them a backward pass reaches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from resilin.training.tensors import tensors_in


class _Call:
    """The hook on the outputs of one call. It lives as long as their graph does."""

    __slots__ = ("__weakref__", "_begins", "reached", "weight")

    def __init__(self, begins: Callable[[], None], weight: float) -> None:
        self._begins = begins
        self.weight = weight
        self.reached = False

    def __call__(self, grad: Tensor) -> None:
        self.reached = True
        self._begins()


class Calls:
    """The calls of the module in one micro-batch.

    Args:
        begins: Called when a backward pass reaches the output of a call.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._quiet = False
        self._calls: list[weakref.ref[_Call]] = []
        self._handles: list[RemovableHandle] = []
        self.returned = ""
        """Type of what the last call returned, if no tensor in it requires a gradient."""

    def _reached(self) -> None:
        if not self._quiet:
            self._begins()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Ignores backward passes within this block: a reducer runs one for the others' sake."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def next_micro_batch(self) -> None:
        """Forgets the calls of the micro-batch before: a loop may keep their outputs alive."""
        self._calls.clear()

    def reset(self) -> None:
        """Forgets the step."""
        self._calls.clear()
        self.returned = ""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def add(self, output: Any, weight: float) -> None:
        """Remembers a call by its output."""
        call, found = _Call(self._reached, weight), False
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                found = True
                handle = tensor.register_hook(call)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    # It outlives the step, and so would the hook.
                    self._handles.append(handle)
        self.returned = "" if found else type(output).__name__
        self._calls = [known for known in self._calls if known() is not None]
        if found:
            self._calls.append(weakref.ref(call))

    def weight(self) -> float:
        """Weight of the largest call whose output may still have a backward pass."""
        return max((call.weight for call in self._living()), default=0.0)

    def check(self) -> None:
        """Refuses a weight that is that of a call without a part in the backward pass.

        Raises:
            RuntimeError: The largest call was not reached.
        """
        reached = max((call.weight for call in self._living() if call.reached), default=None)
        if reached is not None and reached < self.weight():
            raise RuntimeError(
                f"the size of this step is not clear: the model was called with batches of "
                f"{self.weight():g} and {reached:g}, and the larger one has no part in the "
                "backward pass; say the weight with `with model.weight(n):`, or make the other "
                "call under torch.no_grad()"
            )

    def _living(self) -> list[_Call]:
        return [call for known in self._calls if (call := known()) is not None]
