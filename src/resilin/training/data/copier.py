"""Copies batches to a device before the loop asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from resilin.engine import devices
from resilin.training.tensors import tensors_in


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


@dataclasses.dataclass(frozen=True, slots=True)
class Copier:
    """Copies batches to a device; neither the host nor what the device computes waits for it."""

    device: torch.device
    """Where batches are copied to."""
    ahead: int
    """Batches on their way while the loop has one."""

    @classmethod
    def to(cls, device: torch.device | str, ahead: int) -> Copier:
        """A copier to this device; a device without an index is the current one of its kind."""
        there = torch.device(device)
        if there.index is None and devices.of(there).pins:
            there = torch.device(there.type, torch.accelerator.current_device_index())
        return cls(there, ahead)

    def send(self, batch: Any) -> tuple[Any, torch.Event | None]:
        """Begins to copy a batch.

        Returns:
            The batch on the device, and what the device passes when it is there; None if it is.
        """
        if not devices.of(self.device).pins:
            return _mapped(batch, lambda part: part.to(self.device)), None
        stream = _side_stream(self.device)
        with stream:
            return _mapped(batch, self._queued), stream.record_event()

    def _queued(self, part: Any) -> Any:
        pin = getattr(part, "pin_memory", None)
        if pin is not None and not (isinstance(part, Tensor) and part.device.type != "cpu"):
            part = pin()
        return part.to(self.device, non_blocking=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """A micro-batch that the loop does not have yet."""

    span: range
    """Positions of its step."""
    weight: float
    """Its weight."""
    _batch: Any
    _event: torch.Event | None

    @classmethod
    def of(cls, batch: Any, span: range, weight: float, copier: Copier | None) -> Fetched:
        """A micro-batch as it was collated; its copy begins now."""
        sent, event = (batch, None) if copier is None else copier.send(batch)
        return cls(span, weight, sent, event)

    def batch(self) -> Any:
        """The batch; what is queued on its device from now on runs after the copy."""
        if self._event is not None:
            tensors = list(tensors_in(self._batch))
            for stream in {torch.accelerator.current_stream(each.device) for each in tensors}:
                stream.wait_event(self._event)
                for each in tensors:
                    each.record_stream(stream)  # its memory belongs to the side stream
        return self._batch


def _mapped(batch: Any, move: Callable[[Any], Any]) -> Any:
    """A batch of the same structure, with all tensors in it moved."""
    if callable(getattr(batch, "to", None)):
        return move(batch)
    if isinstance(batch, Mapping):
        parts = {key: _mapped(value, move) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return parts
        moved = copy(batch)
        moved.update(parts)
        return moved
    if isinstance(batch, list | tuple):
        items = [_mapped(item, move) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(
            batch, **{name: _mapped(getattr(batch, name), move) for name in fields}
        )
    return batch
