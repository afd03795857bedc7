"""One save, from the shares of all replicas to the commit.

All replicas write, the first gathers what they wrote and commits it, and all learn of it. Whatever
fails before the commit fails the save on all of them, and the attempt is removed.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from torch import Tensor

from resilin.core.placement import Piece, Placement, check_split
from resilin.engine.collectives import Outcome
from resilin.training.state.checkpoint.catalogue import remove
from resilin.training.state.checkpoint.commit import (
    COMMIT,
    COMMIT_FILE,
    METADATA_FILE,
    Commit,
    Entry,
    attempt_name,
    encode,
)
from resilin.training.state.checkpoint.errors import CheckpointError
from resilin.training.state.checkpoint.peers import Peers
from resilin.training.state.checkpoint.storage import Storage
from resilin.training.state.checkpoint.writer import (
    WRITTEN,
    Written,
    write_metadata,
    write_share,
)
from resilin.training.state.shards import Sharded, own_pieces, shares, whole_pieces
from resilin.training.state.snapshot import Json, Snapshot, Version
from resilin.training.state.stage import Stage, Staged


@dataclass(frozen=True, slots=True)
class Task:
    """A snapshot to save, as it was when the save began."""

    version: Version
    """Version of the state."""
    tree: dict[str, Json]
    """The part of it that is not tensors."""
    names: list[str]
    """All its tensors, in their order."""
    layout: int
    """A checksum of names, dtypes and shapes of whole tensors: by these shares are dealt out."""
    share: Outcome[Staged]
    """Copies of the pieces that this process writes, if there was memory for them."""
    is_split: bool
    """Whether tensors are split: pieces then have checksums, to be read one by one."""

    @classmethod
    def of(cls, snapshot: Snapshot, stage: Stage, peers: Peers) -> Task:
        """Copies aside what this process writes of a snapshot."""
        tensors = snapshot.tensors
        layout = [
            (name, str(t.dtype), tuple(t.shape), *(("split",) if isinstance(t, Sharded) else ()))
            for name, t in tensors.items()
        ]
        return cls(
            version=snapshot.version,
            tree=json.loads(json.dumps(snapshot.tree, allow_nan=False)),
            names=list(tensors),
            layout=zlib.crc32(repr(sorted(layout)).encode()),
            # Memory may lack on one process alone. The others are told, and do not wait for it.
            share=Peers.attempt(lambda: stage.begin(_written_by(snapshot, peers))),
            is_split=any(isinstance(held, Sharded) for held in tensors.values()),
        )


def _written_by(snapshot: Snapshot, peers: Peers) -> dict[Piece, Tensor]:
    """The whole tensors that are dealt to this process, and its part of the pieces it holds."""
    dealt = shares(snapshot.tensors, peers.num)[peers.process]
    return whole_pieces(snapshot.tensors, dealt) | dict(own_pieces(snapshot.tensors))


def save(storage: Storage, task: Task, peers: Peers) -> Commit:
    """Writes and commits a snapshot, on all replicas together.

    Raises:
        CheckpointError: It failed on some replica; raised on all of them.
    """
    agreed: Json = peers.lead(
        lambda: [attempt_name(task.version), task.version.to_json(), task.layout]
    )
    name, version, layout = str(agreed[0]), Version.from_json(agreed[1]), int(agreed[2])

    def write() -> Written:
        if (task.version, task.layout) != (version, layout):
            raise CheckpointError(
                f"it saves {task.version} with tensors {task.layout:08x}, while replica 0 saves "
                f"{version} with tensors {layout:08x}: these must be the same"
            )
        share = Peers.value(task.share)
        pieces = share.complete()
        return write_share(storage, name, peers.process, pieces, sums=task.is_split)

    settled = False

    def commit_all() -> Commit:
        nonlocal settled
        settled = True
        try:
            return _commit(storage, task, name, Peers.values(outcomes))
        except BaseException:
            # Before the others hear of it: all have stopped writing, and none looks yet.
            remove(storage, name)
            raise

    try:
        outcomes = peers.outcomes(write, WRITTEN)
        return peers.lead(commit_all, COMMIT)
    except Exception as error:
        if peers.process == 0 and not settled:
            # A replica was lost. Had it been lost later, the commit would stay: it is whole.
            remove(storage, name)
        raise CheckpointError(
            f"the checkpoint {storage.path(name)} was not saved: {error}"
        ) from error


def _commit(storage: Storage, task: Task, name: str, parts: list[Written]) -> Commit:
    files = {file: its for part in parts for file, its in part.files.items()}
    for file, its in files.items():
        _check_seen(storage, name, file, its.size)
    tensors = _tensors(task.names, parts)
    files[METADATA_FILE] = write_metadata(storage, name, tensors)
    commit = Commit(
        version=task.version,
        name=name,
        path=storage.path(name),
        files=files,
        tensors=tensors,
        tree=task.tree,
    )
    storage.publish(name, COMMIT_FILE, encode(commit))
    return commit


def _tensors(names: list[str], parts: list[Written]) -> dict[str, tuple[Entry, ...]]:
    """The pieces of each tensor, from what all processes have written.

    Raises:
        ValueError: The pieces of a tensor are not the whole of it.
    """
    found: dict[str, dict[Placement, Entry]] = {name: {} for name in names}
    for part in parts:
        for name, entry in part.entries:
            # Of a piece that several processes hold, the copy of the first counts.
            found[name].setdefault(entry.placement, entry)
    for name, pieces in found.items():
        if not pieces:
            raise ValueError(f"no process has written a piece of {name}")
        check_split(name, next(iter(pieces)).shape, list(pieces))
    return {name: tuple(pieces.values()) for name, pieces in found.items()}


def _check_seen(storage: Storage, name: str, file: str, size: int) -> None:
    """A place that is not the same for all machines is found now, not when it is needed."""
    found = Peers.attempt(lambda: storage.size(name, file))
    if found.value != size:
        raise CheckpointError(
            f"{file} was written with {size} bytes, and replica 0 finds "
            f"{found.text or found.value}: the place must be shared by all replicas"
        )
