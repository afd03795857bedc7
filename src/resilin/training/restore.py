"""Finding the newest state of a job: in the memory of any host, or else in a checkpoint.

All replicas end up with the same state. Those on a host that has it read it there; the others get
it from them, each holder sending a share. Storage is asked only when no host has anything newer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from resilin.engine.base import Engine
from resilin.training.checkpoint import Checkpoints
from resilin.training.memory import MemoryCopies
from resilin.training.registry import add_up
from resilin.training.snapshot import Json, Snapshot, Version, shares

logger = logging.getLogger("resilin")

Sums = Mapping[int, Mapping[str, Json]]
"""What replicas have added to sums, by replica."""


def newest_state(
    engine: Engine, memory: MemoryCopies | None, checkpoints: Checkpoints | None
) -> tuple[Snapshot | None, str]:
    """The newest state that any replica can find, and where it was. Collective.

    Raises:
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: One was written by a newer resilin.
    """
    here: dict[Version, tuple[int, Sums]] = {}
    if memory is not None:
        here = {v: (memory.num_replicas(v), memory.sums(v)) for v in memory.versions()}
    saved: list[Version] = []
    if checkpoints is not None and engine.replica == 0:
        saved = [commit.version for commit in checkpoints.commits()[:1]]
    everyone = engine.gather((here, saved))
    saved = everyone[0][1]
    found: dict[Version, list[tuple[int, Sums]]] = {}
    for contents, _ in everyone:
        for version, content in contents.items():
            if not saved or version >= saved[0]:
                found.setdefault(version, []).append(content)
    for version, sums, whole in _candidates(found):
        snapshot = _from_memory(engine, memory, version)
        if snapshot is None:
            continue
        if not whole and engine.replica == 0:
            logger.warning(
                "Accumulators go on without what was added on hosts that are gone, since the last "
                "checkpoint"
            )
        return replace(snapshot, tree={**snapshot.tree, **sums}), "memory"
    if checkpoints is None:
        return None, ""
    return checkpoints.newest(engine.group("control")), "checkpoint"


def _candidates(
    found: Mapping[Version, list[tuple[int, Sums]]],
) -> list[tuple[Version, dict[str, Json], bool]]:
    """States in memory in the order in which to try them: version, sums, and if these are whole.

    A replica that dies within a step leaves the others one ahead of it: the state of all is theirs,
    but its own part of the sums is that of the step before. So where there are sums, the state
    before the newest is preferred if only that one has all parts of them.
    """
    tried = []
    for version in sorted(found, reverse=True):
        parts = {replica: part for _, sums in found[version] for replica, part in sums.items()}
        whole = len(parts) == found[version][0][0] or not any(parts.values())
        tried.append((version, add_up([parts[replica] for replica in sorted(parts)]), whole))
    # Of the same generation only: an earlier one may have been left behind on a host long ago.
    latest = max(found, default=Version(0, 0)).generation
    return sorted(tried, key=lambda item: item[2] and item[0].generation == latest, reverse=True)


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
