"""The stage: host memory that a state is copied into before a thread writes it.

Training stands still while the copy is made, and for nothing else. The memory is allocated once,
and used again while shapes and types stay. A checkpoint writes tensor by tensor, and has a buffer
for each (`Stage`). A file in memory has one place for all of its tensors, and is written from a
`Block` that looks the same: with one call, and without holding up Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resilin.core.placement import Piece
from resilin.engine import devices

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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The places of tensors in a block of bytes, and the JSON that says so."""

    num_bytes: int
    """Size of the block."""
    text: str
    """Name, type, shape and place of each tensor."""
    offsets: Sequence[int] = ()
    """Place of each tensor, from the beginning of the block."""

    @classmethod
    def of(cls, pieces: Mapping[Piece, Tensor], begin: int) -> Layout:
        """The layout of tensors side by side.

        Args:
            pieces: The tensors, in their order.
            begin: The number that the first place has in the JSON: bytes that precede the block.
        """
        rows: list[list[Any]] = []
        offsets: list[int] = []
        offset = 0
        for (name, placement), tensor in pieces.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            row: list[Any] = [name, dtype, list(tensor.shape), begin + offset]
            if placement is not None:
                row += [placement.shape, placement.offsets, placement.sizes]
            rows.append(row)
            offsets.append(offset)
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        return cls(offset, json.dumps(rows, separators=(",", ":")), offsets)


class Bytes(NamedTuple):
    """Tensors side by side."""

    layout: Layout
    """The places of the tensors."""
    data: Tensor
    """The bytes."""


class Block:
    """Tensors side by side in one piece of host memory, again and again the same ones.

    Args:
        pieces: Tensors like those that are to be staged.
        begin: As in `Layout.of`.
    """

    def __init__(self, pieces: Mapping[Piece, Tensor], begin: int) -> None:
        self.layout = Layout.of(pieces, begin)
        """The places of the tensors."""
        self._pinned = _pins(pieces)
        self.data = torch.empty(self.layout.num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        """The bytes."""
        self._views = {
            piece: self.data.narrow(0, offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for (piece, tensor), offset in zip(pieces.items(), self.layout.offsets, strict=True)
        }
        self._begin = begin
        self._last: tuple[int, Bytes] | None = None

    def last(self, num: int) -> Bytes:
        """The last of the tensors, as a block of their own; not a copy."""
        if self._last is None or self._last[0] != num:
            first = len(self._views) - num
            begin = self.layout.offsets[first] if num else self.layout.num_bytes
            layout = Layout.of(dict(list(self._views.items())[first:]), self._begin)
            self._last = num, Bytes(layout, self.data[begin:])
        return self._last[1]

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
