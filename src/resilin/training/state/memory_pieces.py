"""Pieces of split tensors in the memory of a host: what is there, and regions of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from resilin.core.placement import Sizes
from resilin.training.state.exchange import Region
from resilin.training.state.memory_file import Found, read_regions, read_unchanged
from resilin.training.state.offers import Offer, Offered, in_order


def offer_of(directory: Path, files: Sequence[Found]) -> Offer:
    """The pieces that are in some files.

    Args:
        directory: The directory of all of them.
        files: Complete files of one version.
    """
    shapes: dict[str, Sizes] = {}
    found: dict[Offered, tuple[Found, int]] = {}
    for file in files:
        shapes.update((name, tuple(shape)) for name, shape in file.meta.get("split", {}).items())
        for row, ((name, placement), dtype) in enumerate(file.placements()):
            if placement is not None:
                found[Offered(name, placement, dtype)] = (file, row)
    pieces = in_order(found)

    def provide(asked: Sequence[tuple[int, Region]]) -> list[Tensor]:
        by_file: dict[Path, list[int]] = {}
        for index, (number, _) in enumerate(asked):
            by_file.setdefault(found[pieces[number]][0].path, []).append(index)
        tensors: dict[int, Tensor] = {}
        for indices in by_file.values():
            file = found[pieces[asked[indices[0]][0]]][0]
            regions = [(found[pieces[asked[i][0]]][1], asked[i][1]) for i in indices]
            read = read_unchanged(file, partial(read_regions, file, regions))
            tensors.update(zip(indices, read, strict=True))
        return [tensors[index] for index in range(len(asked))]

    status = directory.stat()
    return Offer(shapes, pieces, provide, (status.st_dev, status.st_ino))
