"""One save, from the shares of all replicas to the commit.

All replicas write, the first gathers what they wrote and commits it, and all learn of it. Whatever
fails before the commit fails the save on all of them, and the attempt is removed.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from torch import Tensor

from resilin.training.state.checkpoint.catalogue import remove
from resilin.training.state.checkpoint.commit import (
    COMMIT_FILE,
    METADATA_FILE,
    Commit,
    attempt_name,
    encode,
)
from resilin.training.state.checkpoint.errors import CheckpointError
from resilin.training.state.checkpoint.peers import Outcome, Peers, attempt, values
from resilin.training.state.checkpoint.storage import Storage
from resilin.training.state.checkpoint.writer import Stage, Written, write_metadata, write_share
from resilin.training.state.snapshot import Json, Snapshot, Version, shares


@dataclass(frozen=True, slots=True)
class Task:
    """A snapshot to save, as it was when the save began."""

    version: Version
    """Which state it is."""
    tree: dict[str, Json]
    """The part of it that is not tensors."""
    names: list[str]
    """All its tensors, in their order."""
    layout: int
    """A checksum of names, dtypes and shapes: by these the shares are dealt out."""
    share: Outcome[dict[str, Tensor]]
    """Copies of the tensors that this replica writes, if there was memory for them."""

    @classmethod
    def of(cls, snapshot: Snapshot, stage: Stage, peers: Peers) -> Task:
        """Copies aside what this replica needs of a snapshot."""
        mine = shares(snapshot.tensors, peers.num)[peers.rank]
        layout = [(name, str(t.dtype), tuple(t.shape)) for name, t in snapshot.tensors.items()]
        return cls(
            version=snapshot.version,
            tree=json.loads(json.dumps(snapshot.tree, allow_nan=False)),
            names=list(snapshot.tensors),
            layout=zlib.crc32(repr(sorted(layout)).encode()),
            # Memory may lack on one replica alone. The others are told, and do not wait for it.
            share=attempt(lambda: stage.copy(snapshot.tensors, mine)),
        )


def save(storage: Storage, task: Task, peers: Peers) -> Commit:
    """Writes and commits a snapshot, on all replicas together.

    Raises:
        CheckpointError: It failed on some replica; raised on all of them.
    """
    name, version, layout = peers.lead(
        lambda: (attempt_name(task.version), task.version, task.layout)
    )

    def write() -> Written:
        if (task.version, task.layout) != (version, layout):
            raise CheckpointError(
                f"it saves {task.version} with tensors {task.layout:08x}, while replica 0 saves "
                f"{version} with tensors {layout:08x}: these must be the same"
            )
        return write_share(storage, name, peers.rank, values([task.share])[0])

    settled = False

    def commit_all() -> Commit:
        nonlocal settled
        settled = True
        try:
            return _commit(storage, task, name, values(outcomes))
        except BaseException:
            # Before the others hear of it: all have stopped writing, and none looks yet.
            remove(storage, name)
            raise

    try:
        outcomes = peers.gather(write)
        return peers.lead(commit_all)
    except Exception as error:
        if peers.rank == 0 and not settled:
            # A replica was lost. Had it been lost later, the commit would stay: it is whole.
            remove(storage, name)
        raise CheckpointError(
            f"the checkpoint {storage.path(name)} was not saved: {error}"
        ) from error


def _commit(storage: Storage, task: Task, name: str, parts: list[Written]) -> Commit:
    files = {file: its for part in parts for file, its in part.files.items()}
    for file, its in files.items():
        _check_seen(storage, name, file, its.size)
    files[METADATA_FILE] = write_metadata(storage, name, parts)
    entries = {key: entry for part in parts for key, entry in part.entries.items()}
    commit = Commit(
        version=task.version,
        name=name,
        path=storage.path(name),
        files=files,
        tensors={key: entries[key] for key in task.names},
        tree=task.tree,
    )
    storage.publish(name, COMMIT_FILE, encode(commit))
    return commit


def _check_seen(storage: Storage, name: str, file: str, size: int) -> None:
    """A place that is not the same for all machines is found now, not when it is needed."""
    found = attempt(lambda: storage.size(name, file))
    if found.value != size:
        raise CheckpointError(
            f"{file} was written with {size} bytes, and replica 0 finds "
            f"{found.text or found.value}: the place must be shared by all replicas"
        )
