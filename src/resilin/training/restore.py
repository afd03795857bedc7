"""Finding the newest state of a job: in the memory of any host, or else in a checkpoint.

All replicas end up with the same state. Those on a host that has it read it there; the others get
it from them, each holder sending a share. Storage is asked only when no host has anything newer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from resilin.engine.base import Engine
from resilin.training.checkpoint import Checkpoints
from resilin.training.memory import MemoryCopies
from resilin.training.registry import add_up, gathered
from resilin.training.snapshot import Json, Snapshot, Version, shares

logger = logging.getLogger("resilin")


class Content(NamedTuple):
    """What the memory of one host has of a state, beside the parts that all replicas share."""

    num_replicas: int
    """How many replicas the job had when they wrote it."""
    sums: Mapping[int, Mapping[str, Json]]
    """What replicas have added to sums, by replica."""
    owners: set[int]
    """Replicas whose own state is there."""


class Candidate(NamedTuple):
    """A state that memory has."""

    version: Version
    """Which one."""
    sums: dict[str, Json]
    """Sums over the replicas whose parts are there."""
    has_all_sums: bool
    """Whether no part of them is missing."""
    has_all_own: bool
    """Whether each replica gets back what it had of its own, if there is such a thing."""


def newest_state(
    engine: Engine, memory: MemoryCopies | None, checkpoints: Checkpoints | None
) -> tuple[Snapshot | None, str]:
    """The newest state that any replica can find, and where it was. Collective.

    Raises:
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: One was written by a newer resilin.
    """
    here: dict[Version, Content] = {}
    if memory is not None:
        here = {
            v: Content(memory.num_replicas(v), memory.sums(v), memory.owners(v))
            for v in memory.versions()
        }
    saved: list[Version] = []
    if checkpoints is not None and engine.replica == 0:
        saved = [commit.version for commit in checkpoints.commits()[:1]]
    everyone = engine.gather((here, saved))
    saved = everyone[0][1]
    found: dict[Version, list[Content]] = {}
    for contents, _ in everyone:
        for version, content in contents.items():
            if not saved or version >= saved[0]:
                found.setdefault(version, []).append(content)
    for candidate in candidates(found, engine.num_replicas):
        snapshot = _from_memory(engine, memory, candidate.version)
        if snapshot is None:
            continue
        if not candidate.has_all_sums and engine.replica == 0:
            logger.warning(
                "Accumulators go on without what was added on hosts that are gone, since the last "
                "checkpoint"
            )
        snapshot.tree.update(candidate.sums)
        owners = [c[snapshot.version].owners if snapshot.version in c else () for c, _ in everyone]
        return _with_own(engine, memory, snapshot, owners), "memory"
    if checkpoints is None:
        return None, ""
    return checkpoints.newest(engine.group("control")), "checkpoint"


def _with_own(
    engine: Engine,
    memory: MemoryCopies | None,
    snapshot: Snapshot,
    owners: Sequence[Collection[int]],
) -> Snapshot:
    """Adds what each replica has of its own, from all hosts that have it. Collective.

    Args:
        engine: Who is in the job.
        memory: The copies of this host.
        snapshot: The rest of the state.
        owners: Per replica, those whose own state it can read. The first that can sends it.
    """
    known = set().union(*owners[: engine.replica])
    here = {}
    if memory is not None and not known.issuperset(owners[engine.replica]):
        found = memory.own(snapshot.version)
        here = {each: own for each, own in found.items() if each not in known}
    own = gathered({i: each for part in engine.gather(here) for i, each in part.items()})
    snapshot.tree.update(own.tree)
    snapshot.tensors.update(own.tensors)
    return snapshot


def candidates(found: Mapping[Version, list[Content]], num_replicas: int) -> list[Candidate]:
    """States in memory in the order in which to try them.

    A replica that dies within a step leaves the others one ahead of it: the state of all is theirs,
    but its own part of the sums is that of the step before. So where there are sums, the state
    before the newest is preferred if only that one has all parts of them. The same holds for what
    each replica has of its own, if there are as many replicas as before to get it back.
    """
    tried = []
    for version in sorted(found, reverse=True):
        contents = found[version]
        before = contents[0].num_replicas
        parts = {replica: part for each in contents for replica, part in each.sums.items()}
        owners = set().union(*(each.owners for each in contents))
        tried.append(
            Candidate(
                version,
                add_up([parts[replica] for replica in sorted(parts)]),
                has_all_sums=len(parts) == before or not any(parts.values()),
                has_all_own=not owners or before != num_replicas or len(owners) == before,
            )
        )
    # Of the same generation only: an earlier one may have been left behind on a host long ago.
    latest = max(found, default=Version(0, 0)).generation
    return sorted(
        tried,
        key=lambda it: it.has_all_sums and it.has_all_own and it.version.generation == latest,
        reverse=True,
    )


def _from_memory(engine: Engine, memory: MemoryCopies | None, version: Version) -> Snapshot | None:
    """A state that some host has in memory, on all replicas; None if it has gone."""
    mine: Snapshot | None = None
    if memory is not None and version in memory.versions():
        try:
            mine = memory.read(version)
        except LookupError as error:
            logger.warning("%s", error)
    holders = [replica for replica, has in enumerate(engine.gather(mine is not None)) if has]
    if not holders:
        return None
    if len(holders) == engine.num_replicas:
        return mine
    outline = None
    if mine is not None:
        outline = mine.tree, {name: (t.dtype, t.shape) for name, t in mine.tensors.items()}
    tree, table = engine.broadcast(outline, source=holders[0])
    if mine is None:
        empty = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in table.items()}
        mine = Snapshot(version, tree, empty)
    dealt = shares(mine.tensors, len(holders))
    owners = {name: holders[i] for i, names in enumerate(dealt) for name in names}
    engine.hand_out(mine.tensors, owners)
    return mine
