"""Transfer of state between processes: gathered for a checkpoint, handed out at a start.

Whole tensors are held by every process of a host that has a copy; each holder sends a share of
them to all. Of split tensors each process asks for the pieces that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from resilin.core.placement import Asked, wanted_of
from resilin.engine.base import Engine
from resilin.engine.collectives import State
from resilin.training.state.offers import Offer, Table
from resilin.training.state.registry import Registry
from resilin.training.state.replica_parts import OwnState, add_up, gathered
from resilin.training.state.shards import Sharded, all_whole, shares, whole_pieces
from resilin.training.state.snapshot import Json, Snapshot, Version


def gather_parts(engine: Engine, registry: Registry, snapshot: Snapshot) -> None:
    """Adds to a snapshot the sums over all replicas, and what each has of its own. Collective."""
    mine = registry.take_own()
    said = State([registry.take_sums(snapshot.version.epoch), mine.tree], all_whole(mine.tensors))
    everyone = engine.collectives().gather_states(said)
    own = gathered(
        {i: OwnState(each.tree[1], dict(each.tensors)) for i, each in enumerate(everyone)}
    )
    snapshot.tree.update(add_up([each.tree[0] for each in everyone]))
    snapshot.tree.update(own.tree)
    snapshot.tensors.update(own.tensors)


def transfer(
    engine: Engine,
    mine: Snapshot | None,
    version: Version,
    wanted: Asked | None = None,
    *,
    offer: Offer | None = None,
    table: Table | None = None,
) -> Snapshot | None:
    """Gives every process a state that some of them hold. Collective.

    Args:
        engine: Who is in the job.
        mine: The state as far as this process can read it; None if it cannot.
        version: Which state it is.
        wanted: The pieces that this process needs of split tensors; it gets the others whole.
        offer: The pieces of split tensors that this process can read; those of `mine` if None.
        table: Those of all processes, if they are known.

    Returns:
        The state; None if no process holds it.

    Raises:
        ValueError: The pieces of a tensor that all processes hold together are not enough.
        LookupError: A piece is gone; on all processes.
    """
    offer = Offer.of(mine) if offer is None else offer
    everyone: list[Json] = engine.gather([mine is not None, bool(offer.shapes)])
    holders = [process for process, (has, _) in enumerate(everyone) if has]
    if not holders:
        return None
    if len(holders) < len(everyone):
        mine = _transfer_whole(engine, mine, version, holders)
    assert mine is not None
    if any(split for _, split in everyone):
        table = Table.gather(engine, offer) if table is None else table
        needed = wanted_of(wanted, table.stored)
        mine.tensors.update(table.take(engine, offer, needed))
    return mine


def _transfer_whole(
    engine: Engine, mine: Snapshot | None, version: Version, holders: Sequence[int]
) -> Snapshot:
    outline = None
    if mine is not None:
        # Of each whole tensor a place for its content: the type and the shape.
        table = {
            name: [_dtype(held), list(held.shape)]
            for name, held in mine.tensors.items()
            if not isinstance(held, Sharded)
        }
        outline = [mine.tree, table]
    tree, table = engine.broadcast(outline, source=holders[0])
    if mine is None:
        mine = Snapshot(version, tree, {name: _place(*each) for name, each in table.items()})
    dealt = shares(mine.tensors, len(holders))
    owners = {name: holders[i] for i, names in enumerate(dealt) for name in names}
    whole = {name: tensor for (name, _), tensor in whole_pieces(mine.tensors, owners).items()}
    engine.collectives().fill(whole, owners)
    return mine


def _dtype(held: Tensor | Sharded) -> str:
    return str(held.dtype).removeprefix("torch.")


def _place(dtype: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
