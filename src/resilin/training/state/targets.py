"""Targets: the split that the tensors of an object have now, for a state that is restored to it.

A model has its parameters before its state is restored. An optimizer has no state before its first
step: what is stored for a parameter, of the same shape, is split as the parameter is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from resilin.core.placement import Sizes, Stored, Wanted
from resilin.training.state import meshes
from resilin.training.state.shards import Sharded
from resilin.training.state.snapshot import Snapshot, join, names, split


def wanted_by(things: Mapping[str, Any], stored: Mapping[str, Stored]) -> Wanted:
    """The pieces that objects need of a stored state, by the names of the tensors.

    Args:
        things: The objects, by name.
        stored: The tensors of that state.

    Raises:
        ValueError: Nothing says how an object that is split now has one of them.
    """
    found = {}
    for name, thing in things.items():
        mine = {each: its for each, its in stored.items() if each.startswith(f"{name}.")}
        for each, held in targets(name, thing, mine).items():
            if each in mine:
                found[each] = [shard.placement for shard in held.shards]
    return found


def state_for(name: str, thing: Any, snapshot: Snapshot) -> Any:
    """The state of an object in a snapshot, with its tensors split as the object is now."""
    tree = snapshot.tree[name]
    tensors = {each: snapshot.tensors[each] for each in names(tree) if each in snapshot.tensors}
    stored = {
        each: Stored(tuple(held.shape), isinstance(held, Sharded)) for each, held in tensors.items()
    }
    present = targets(name, thing, stored)
    return join(
        tree,
        {each: meshes.placed(each, held, present.get(each)) for each, held in tensors.items()},
    )


def targets(name: str, thing: Any, stored: Mapping[str, Stored]) -> dict[str, Sharded]:
    """The tensors of an object that are split now, by name.

    Args:
        name: Name of the object; those of its tensors begin with it.
        thing: The object.
        stored: Its stored tensors, by name.

    Raises:
        ValueError: The object is split now, and a tensor that was stored in pieces is not one that
            it has, nor of the shape of its parameter.
    """
    parameters = _parameters(thing)
    whole = parameters is not None and not any(map(meshes.is_split, parameters))
    if not stored or whole or not (meshes.are_loaded() or any(s.split for s in stored.values())):
        return {}
    _, present = split(name, thing.state_dict())
    found = {each: held for each, held in present.items() if isinstance(held, Sharded)}
    if isinstance(thing, Optimizer) and parameters is not None:
        for each, its in stored.items():
            number = _number(name, each)
            if each in present or number is None or number >= len(parameters):
                continue
            parameter = parameters[number]
            if meshes.is_split(parameter) and tuple(parameter.shape) == its.shape:
                found[each] = meshes.sharded(each, parameter)
    if found or parameters is not None:
        _check(name, found, present, stored)
    return found


def _parameters(thing: Any) -> list[Any] | None:
    """The parameters of an object that has some; None if nobody knows."""
    if isinstance(thing, Optimizer):
        groups = (group["params"] for group in thing.param_groups)
        return list(itertools.chain.from_iterable(groups))
    return list(thing.parameters()) if isinstance(thing, nn.Module) else None


def _number(name: str, tensor: str) -> int | None:
    """The number of the parameter that a tensor of an optimizer belongs to."""
    prefix = f"{name}.state."
    number = tensor.removeprefix(prefix).partition(".")[0]
    return int(number) if tensor.startswith(prefix) and number.isdigit() else None


def _check(
    name: str,
    found: Mapping[str, Sharded],
    present: Mapping[str, Any],
    stored: Mapping[str, Stored],
) -> None:
    for each, its in stored.items():
        if its.split and each not in found and each not in present:
            shapes: list[Sizes] = sorted({held.shape for held in found.values()})
            raise ValueError(
                f"{each} of shape {its.shape} was split over processes when it was saved, and "
                f"nothing says how {name!r} has it now (it has split tensors of the shapes "
                f"{shapes}): state of an optimizer must have the shape of its parameter, or be "
                "there before the state is restored"
            )
