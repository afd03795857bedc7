"""Writing: the pieces of a process are copied aside, then written in the format of DCP.

`torch.distributed.checkpoint.save` would gather plans and failures in rounds of its own, where one
gathering at the end is enough: who writes what is known beforehand, and nothing is written twice.
What is left on storage can be read by DCP as if it had written it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from resilin.compat.torch_names import make_place
from resilin.core.placement import Piece, Placement
from resilin.engine.collectives import Json, Wire
from resilin.training.state.checkpoint.commit import METADATA_FILE, Entry, FileSum
from resilin.training.state.checkpoint.storage import Storage

_DCP_VERSION = "1.0.0"
"""Version of DCP's format that this is; newer versions of torch note it."""


@dataclass(frozen=True, slots=True)
class Written:
    """The report of one process on what it has written."""

    entries: list[tuple[str, Entry]]
    """Names of tensors, and where pieces of them are."""
    files: dict[str, FileSum] = field(default_factory=dict)
    """The files; none for an empty share."""

    def to_json(self) -> Json:
        """The report as JSON."""
        entries = []
        for name, e in self.entries:
            place = [e.placement.shape, e.placement.offsets, e.placement.sizes]
            entries.append([name, e.dtype, place, [e.file, e.offset, e.length, e.crc32]])
        return [entries, {name: [its.size, its.crc32] for name, its in self.files.items()}]

    @classmethod
    def from_json(cls, state: Json) -> Written:
        """The reverse of `to_json`."""
        entries, files = state
        return cls(
            [
                (name, Entry(dtype, Placement(*map(tuple, place)), *where))
                for name, dtype, place, where in entries
            ],
            {name: FileSum(*its) for name, its in files.items()},
        )


WRITTEN: Wire[Written] = Wire(Written.to_json, Written.from_json)
"""The form in which processes report the files they have written."""


def write_share(
    storage: Storage,
    attempt: str,
    process: int,
    share: Mapping[Piece, Tensor],
    *,
    sums: bool = False,
) -> Written:
    """Writes the pieces of one process into a file of its own.

    Args:
        storage: Where to.
        attempt: The checkpoint.
        process: Number of the process.
        share: The pieces.
        sums: Whether each of them has a checksum of its own, and can be read without the others.
    """
    storage.prepare(attempt)
    written = Written([])
    if not share:
        return written
    file = f"__{process}_0.distcp"
    with storage.create(attempt, file) as stream:
        for (name, placement), tensor in share.items():
            begin = stream.tell()
            if sums:
                stream.begin_part()
            torch.save(tensor, stream)  # type: ignore[arg-type]
            # Here and not within: see Sums.
            stream.check()
            dtype = str(tensor.dtype).removeprefix("torch.")
            where = placement or Placement.whole(tensor.shape)
            length = stream.tell() - begin
            entry = Entry(dtype, where, file, begin, length, stream.part_crc32)
            written.entries.append((name, entry))
    written.files[file] = stream.sum
    return written


def write_metadata(
    storage: Storage, attempt: str, tensors: Mapping[str, Sequence[Entry]]
) -> FileSum:
    """Writes what DCP's own readers need: the pieces of all tensors, and where they are."""
    metadata = Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=pieces[0].torch_dtype),
                size=torch.Size(pieces[0].placement.shape),
                chunks=[
                    ChunkStorageMetadata(
                        torch.Size(each.placement.offsets), torch.Size(each.placement.sizes)
                    )
                    for each in pieces
                ],
            )
            for name, pieces in tensors.items()
        },
        # The path of each name in the state, which is flat.
        planner_data={name: (name,) for name in tensors},
        storage_data={
            MetadataIndex(name, each.placement.offsets): make_place(
                each.file, each.offset, each.length
            )
            for name, pieces in tensors.items()
            for each in pieces
        },
        storage_meta=StorageMeta(save_id=attempt),
    )
    metadata.version = _DCP_VERSION  # no argument in torch 2.8
    with storage.create(attempt, METADATA_FILE) as stream:
        pickle.dump(metadata, stream)
    return stream.sum
