"""The stage: host memory that a state is copied into before a thread writes it.

Training stands still while the copy is made, and for nothing else. The memory is allocated once,
and used again while shapes and types stay. A checkpoint writes tensor by tensor, and has a buffer
for each (`Stage`). A file in memory has one place for all of its tensors, and is written from a
`Block` that looks the same: with one call, and without holding up Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resilin.engine import devices
from resilin.training.state.placement import Piece

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """Pieces of a state as they were when they were staged; good until the next ones are."""

    pieces: dict[Piece, Tensor]
    """The copies, on the host."""
    wait: Callable[[], None]
    """Waits until the device has made them; any thread may call it."""
    sources: Mapping[Piece, Tensor]
    """The originals, which must not be freed before that."""

    def complete(self) -> dict[Piece, Tensor]:
        """The copies, after the device has made them."""
        self.wait()
        return self.pieces


class Stage:
    """Host memory for the pieces that a process writes."""

    def __init__(self) -> None:
        self._buffers: dict[Piece, Tensor] = {}

    def begin(self, pieces: Mapping[Piece, Tensor]) -> Staged:
        """Copies these pieces aside; when it returns, the originals may be changed.

        On the CPU the copies are complete then. A device that queues its work makes them before
        anything that is queued later; memory is pinned where the device gains by it.

        Args:
            pieces: The pieces. What was staged before must have been written.
        """
        before = self._buffers
        pins: dict[torch.device, bool] = {}
        staged = {}
        for piece, tensor in pieces.items():
            device = tensor.device
            if device not in pins:
                pins[device] = devices.of(device).pins
            old = before.get(piece)
            if (
                old is None
                or old.shape != tensor.shape
                or old.dtype != tensor.dtype
                or (pins[device] and not old.is_pinned())
            ):
                old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins[device])
            staged[piece] = old
        with torch.no_grad():
            wait = devices.begin_to_host(zip(staged.values(), pieces.values(), strict=True))
        # What is no longer among them is given back.
        self._buffers = staged
        return Staged(staged, wait, pieces)


class Layout:
    """The places of tensors in a block of bytes, and the JSON that says so.

    Args:
        pieces: The tensors, in their order.
        begin: The number that the first place has in the JSON: bytes that precede the block.
    """

    def __init__(self, pieces: Mapping[Piece, Tensor], begin: int) -> None:
        rows: list[list[Any]] = []
        self.offsets: list[int] = []
        """Of each tensor, from the beginning of the block."""
        offset = 0
        for (name, placement), tensor in pieces.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            row: list[Any] = [name, dtype, list(tensor.shape), begin + offset]
            if placement is not None:
                row += [placement.shape, placement.offsets, placement.sizes]
            rows.append(row)
            self.offsets.append(offset)
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self.num_bytes = offset
        """Size of the block."""
        self.text = json.dumps(rows, separators=(",", ":"))
        """Name, type, shape and place of each tensor."""


class Block:
    """Tensors side by side in one piece of host memory, again and again the same ones.

    Args:
        pieces: Tensors like those that are to be staged.
        begin: As in `Layout`.
    """

    def __init__(self, pieces: Mapping[Piece, Tensor], begin: int) -> None:
        self.layout = Layout(pieces, begin)
        """The places of the tensors."""
        self._pinned = _pins(pieces)
        self.data = torch.empty(self.layout.num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        """The bytes."""
        self._views = {
            piece: self.data.narrow(0, offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for (piece, tensor), offset in zip(pieces.items(), self.layout.offsets, strict=True)
        }

    def fits(self, pieces: Mapping[Piece, Tensor]) -> bool:
        """Whether these tensors have the names, shapes and types that there are places for."""
        if len(pieces) != len(self._views):
            return False
        for piece, view in self._views.items():
            tensor = pieces.get(piece)
            if tensor is None or tensor.shape != view.shape or tensor.dtype != view.dtype:
                return False
        return self._pinned or not _pins(pieces)

    def begin(self, pieces: Mapping[Piece, Tensor]) -> Callable[[], None]:
        """Copies tensors to their places; when it returns, they may be changed.

        Returns:
            A function that waits until the device has made the copies; any thread may call it. The
            tensors must not be freed before.
        """
        with torch.no_grad():
            return devices.begin_to_host(
                (view, pieces[piece]) for piece, view in self._views.items()
            )


def _pins(pieces: Mapping[Piece, Tensor]) -> bool:
    """Whether copies of some of these tensors are faster into pinned memory."""
    return any(devices.of(each).pins for each in {tensor.device for tensor in pieces.values()})
