"""Spreads: which rectangle of a tensor each process of a mesh holds, as arithmetic.

A mesh numbers its processes along several dimensions. Each of them either splits one dimension of
the tensor, or has copies: FSDP splits along one, HSDP has copies along another, and tensor
parallelism splits once more. Splits are as even as those of `torch.chunk`: all pieces are of the
same length but for the last ones, which may be shorter or empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from resilin.core.placement import Placement, Sizes

Numbers: TypeAlias = npt.NDArray[np.int64]
"""Whole numbers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The way in which the processes of a mesh hold a tensor."""

    mesh: Sizes
    """Processes along each dimension of the mesh; numbered with the last one fastest."""
    splits: tuple[int | None, ...]
    """The dimension of the tensor that each of these splits; None for copies."""
    order: Sizes = ()
    """Dimensions of the mesh in the order in which they split; that of the mesh if empty.

    It matters where two of them split the same dimension of the tensor: FSDP splits what tensor
    parallelism has split before, though its dimension comes first in the mesh.
    """

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.mesh))))
        if len(self.splits) != len(self.mesh) or sorted(self.order) != list(range(len(self.mesh))):
            raise ValueError(
                f"a mesh of {self.mesh} must have as many splits, found {self.splits}, and an "
                f"order of all its dimensions, found {self.order}"
            )

    @property
    def num_processes(self) -> int:
        """Processes in the mesh."""
        return math.prod(self.mesh)

    @property
    def num_holders(self) -> int:
        """Processes that hold the same rectangle."""
        return math.prod(n for n, dim in zip(self.mesh, self.splits, strict=True) if dim is None)

    def placement(self, shape: Sizes, process: int) -> Placement:
        """The rectangle that one process of the mesh holds."""
        offsets, sizes = self.rectangles(shape, np.array([process]))
        return Placement(shape, tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))

    def rectangles(self, shape: Sizes, processes: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """The rectangles of some processes, or of all.

        Args:
            shape: Shape of the tensor.
            processes: Their numbers in the mesh.

        Returns:
            Offsets and sizes, with a row per process.

        Raises:
            ValueError: A dimension that the tensor does not have is split.
        """
        if any(dim is not None and not 0 <= dim < len(shape) for dim in self.splits):
            raise ValueError(f"splits {self.splits} must be dimensions of the shape {shape}")
        places = self._places(processes)
        offsets = np.zeros((len(places[0]), len(shape)), dtype=np.int64)
        sizes = np.tile(np.array(shape, dtype=np.int64), (len(offsets), 1))
        for each in self.order:
            dim = self.splits[each]
            if dim is None:
                continue
            length = sizes[:, dim]
            step = -(-length // self.mesh[each])
            begin = np.minimum(step * places[each], length)
            offsets[:, dim] += begin
            sizes[:, dim] = np.minimum(step, length - begin)
        return offsets, sizes

    def holders(self, process: int) -> Sizes:
        """Numbers of the processes that hold the same rectangle as one of them, it included."""
        places = np.unravel_index(process, self.mesh) if self.mesh else ()
        index = tuple(
            slice(None) if dim is None else int(place)
            for place, dim in zip(places, self.splits, strict=True)
        )
        numbers = np.arange(self.num_processes).reshape(self.mesh)[index]
        return tuple(np.ravel(numbers).tolist())

    def groups(self) -> Numbers:
        """The processes in groups that hold the same rectangle: a row per group, in order."""
        split = [i for i, dim in enumerate(self.splits) if dim is not None]
        copies = [i for i, dim in enumerate(self.splits) if dim is None]
        numbers = np.arange(self.num_processes).reshape(self.mesh).transpose(split + copies)
        groups: Numbers = numbers.reshape(-1, self.num_holders)
        return groups

    def _places(self, processes: Numbers | None) -> tuple[Numbers, ...]:
        """The place of each process along each dimension of the mesh."""
        numbers = np.arange(self.num_processes) if processes is None else processes
        # A mesh without dimensions has one process, and still a row for it.
        return np.unravel_index(numbers, self.mesh) if self.mesh else (numbers,)
