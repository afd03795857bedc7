"""Writing: a share of the tensors is copied aside, then written in the format of DCP.

The steps are those of `torch.distributed.checkpoint.save`, taken one by one: it would gather plans
and failures in rounds of its own, where one gathering at the end is enough, since shares are dealt
out beforehand and nothing is written twice. What it leaves on storage is the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from resilin.compat.torch_names import make_place
from resilin.engine import devices
from resilin.training.state.checkpoint.commit import METADATA_FILE, Entry, FileSum
from resilin.training.state.checkpoint.storage import Storage

_DCP_VERSION = "1.0.0"
"""Version of DCP's format that this is; newer versions of torch note it."""


class Stage:
    """Host memory for a share of the tensors, used again by each save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Copies these tensors aside, and returns when that is done.

        The copies are good until the next call. Memory is pinned where the device gains by it.
        """
        staged = {name: self._buffer(name, tensors[name]) for name in names}
        devices.to_host((buffer, tensors[name].detach()) for name, buffer in staged.items())
        # What is no longer in the share is given back.
        self._buffers = dict(staged)
        return staged

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        pinned = devices.of(tensor.device).pins
        if (
            old is not None
            and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
            and old.is_pinned() >= pinned
        ):
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


@dataclass(frozen=True, slots=True)
class Written:
    """What one replica has written."""

    plan: SavePlan
    """Its part of DCP's plan."""
    places: dict[MetadataIndex, Any]
    """Where DCP finds the tensors."""
    entries: dict[str, Entry]
    """Where we find them."""
    files: dict[str, FileSum] = field(default_factory=dict)
    """The files; none for an empty share."""


def write_share(storage: Storage, attempt: str, rank: int, share: dict[str, Tensor]) -> Written:
    """Writes the share of one replica into a file of its own."""
    storage.prepare(attempt)
    planner = DefaultSavePlanner()
    planner.set_up_planner(share, is_coordinator=rank == 0)
    written = Written(planner.finish_plan(planner.create_local_plan()), {}, {})
    if not written.plan.items:
        return written
    name = f"__{rank}_0.distcp"
    with storage.create(attempt, name) as stream:
        for item in written.plan.items:
            tensor: Any = planner.resolve_data(item)
            begin = stream.tell()
            torch.save(tensor, stream)  # type: ignore[arg-type]
            # Here and not within: see Sums.
            stream.check()
            length = stream.tell() - begin
            written.places[item.index] = make_place(name, begin, length)
            written.entries[item.index.fqn] = Entry(
                str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), name, begin, length
            )
    written.files[name] = stream.sum
    return written


def write_metadata(storage: Storage, attempt: str, parts: list[Written]) -> FileSum:
    """Writes what DCP's own readers need, from what all replicas have written."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([part.plan for part in parts])
    metadata.version = _DCP_VERSION
    metadata.storage_data = {index: place for part in parts for index, place in part.places.items()}
    metadata.storage_meta = StorageMeta(save_id=attempt)
    with storage.create(attempt, METADATA_FILE) as stream:
        pickle.dump(metadata, stream)
    return stream.sum
