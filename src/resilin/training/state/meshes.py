"""Tensors that torch has split over a mesh of processes, as pieces and back.

A parameter of a model under `fully_shard`, or under tensor parallelism, is a DTensor: each process
has a rectangle of it, and under HSDP several processes have the same one. Its state is taken as a
`Sharded`, and loaded as a DTensor of the split that the model has now.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from resilin.compat.torch_names import root_of_mesh
from resilin.core.mesh_spread import Numbers, Spread
from resilin.core.placement import Placement, Sizes
from resilin.training.state.shards import Assembly, Held, Shard, Sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MODULE = "torch.distributed.tensor"
"""The module of DTensors: a process that has not loaded it has none."""


class Local(NamedTuple):
    """The part of this process in a tensor that is split over a mesh."""

    placement: Placement | None
    """Its rectangle; None if the process is not in the mesh."""
    holders: Sizes
    """Processes that have the same rectangle."""
    holder: int
    """Place of this process among them."""


_LOCALS: WeakKeyDictionary[Any, dict[tuple[Any, Sizes], Local]] = WeakKeyDictionary()
"""Parts that were computed before, by mesh. A state has the same ones at every step."""


def forget_places() -> None:
    """Forget the parts that were computed: a mesh has other processes now, in a live job."""
    _LOCALS.clear()


def are_loaded() -> bool:
    """Whether there can be tensors that torch has split."""
    return _MODULE in sys.modules


def is_split(value: object) -> bool:
    """Whether a value is a tensor that torch has split over a mesh."""
    if type(value) is Tensor or _MODULE not in sys.modules:
        return False
    return isinstance(value, sys.modules[_MODULE].DTensor)


def sharded(path: str, tensor: Any) -> Sharded:
    """The local part of a DTensor; not a copy.

    Args:
        path: Name of the tensor, for errors.
        tensor: The DTensor.

    Raises:
        ValueError: It is split in a way that has no rectangles.
    """
    shape = tuple(tensor.shape)
    try:
        local = _local(tensor.device_mesh, tuple(tensor.placements), shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if local.placement is None:
        return Sharded(shape, tensor.dtype, (), local.holders, local.holder, tensor)
    with torch.no_grad():
        data = tensor.to_local().detach()
    if type(data) is not Tensor or tuple(data.shape) != local.placement.sizes:
        raise ValueError(
            f"{path} has the placements {tuple(tensor.placements)} of {shape}, by which this "
            f"process holds a tensor of {local.placement.sizes}; found a {type(data).__name__} of "
            f"{tuple(data.shape)}"
        )
    shard = Shard(local.placement, data)
    return Sharded(shape, tensor.dtype, (shard,), local.holders, local.holder, tensor)


def placed(path: str, held: Held, target: Held | None) -> Held:
    """A restored tensor in the form that its owner has it in now.

    Args:
        path: Name of the tensor, for errors.
        held: The tensor, or pieces of it.
        target: The tensor of the owner as it is now; None if it has none.

    Returns:
        A DTensor if the owner has one, otherwise the whole tensor. An owner whose state has pieces
        that are not of a DTensor gets pieces.

    Raises:
        ValueError: The pieces that are here are not those that are needed.
    """
    if isinstance(target, Sharded) and target.origin is None:
        return held
    if not isinstance(target, Sharded):
        if not isinstance(held, Sharded):
            return held
        whole = _assembled(path, held, Placement.whole(held.shape))
        assert isinstance(whole, Tensor)
        return whole
    origin: Any = target.origin
    if tuple(held.shape) != target.shape:
        raise ValueError(f"{path} was {tuple(held.shape)} and is {target.shape}")
    data = torch.empty(0, dtype=held.dtype)
    if target.shards:
        data = _assembled(path, held, target.shards[0].placement)
    made: Tensor = sys.modules[_MODULE].DTensor.from_local(
        data.to(origin.device),
        origin.device_mesh,
        origin.placements,
        run_check=False,
        shape=origin.shape,
        stride=origin.stride(),
    )
    return made


def _assembled(path: str, held: Held, wanted: Placement) -> Tensor:
    """One rectangle of a tensor, from what is here of it."""
    if isinstance(held, Tensor):
        region = zip(wanted.offsets, wanted.sizes, strict=True)
        return held[tuple(slice(begin, begin + size) for begin, size in region)].contiguous()
    for shard in held.shards:
        if shard.placement == wanted:
            return shard.data
    assembly = Assembly({path: [wanted]})
    for shard in held.shards:
        assembly.add(path, shard.placement, shard.data)
    found = assembly.result().get(path)
    if not isinstance(found, Sharded):
        raise ValueError(f"{path} lacks all of the elements that are needed here")
    return found.shards[0].data


# Meshes ------------------------------------------------------------------------------------------


def _local(mesh: DeviceMesh, placements: tuple[Any, ...], shape: Sizes) -> Local:
    known = _LOCALS.setdefault(mesh, {})
    found = known.get((placements, shape))
    if found is None:
        found = known[placements, shape] = _make_local(mesh, placements, shape)
    return found


def _make_local(mesh: DeviceMesh, placements: tuple[Any, ...], shape: Sizes) -> Local:
    spread = spread_of(tuple(mesh.mesh.shape), placements)
    place: Sequence[int] | None = mesh.get_coordinate()
    if place is None:
        return Local(None, (), 0)
    spread, processes, within = _within_root(mesh, spread, place)
    number = int(np.ravel_multi_index(tuple(within), spread.mesh))
    numbers = spread.holders(number)
    holders = tuple(processes.ravel()[list(numbers)].tolist())
    return Local(spread.placement(shape, number), holders, numbers.index(number))


def spread_of(mesh: Sizes, placements: Sequence[Any]) -> Spread:
    """The arithmetic of the placements of a DTensor.

    Args:
        mesh: Sizes of the mesh.
        placements: A placement per dimension of it.

    Raises:
        ValueError: One of them is neither a split of a dimension nor a copy.
    """
    splits = tuple(_split_by(placement) for placement in placements)
    order: list[int] = []
    for dim in reversed(range(len(mesh))):
        factor = getattr(placements[dim], "split_factor", None)
        if factor is None:
            order.insert(0, dim)
            continue
        # It splits what the dimensions after it have split before, as FSDP does under TP.
        before = [n for n, split in zip(mesh, splits, strict=True) if split == splits[dim]]
        before = before[1 + sum(split == splits[dim] for split in splits[:dim]) :]
        if factor != math.prod(before):
            raise ValueError(
                f"the placement {placements[dim]} has the split factor {factor}, and the later "
                f"dimensions of the mesh {mesh} split the same dimension by {math.prod(before)}: "
                "these must be equal"
            )
        order.append(dim)
    return Spread(mesh, splits, tuple(order))


def _split_by(placement: Any) -> int | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or not isinstance(dim, int):
        raise ValueError(
            f"the placement {placement} has no rectangle per process: only Shard and Replicate can "
            "be saved"
        )
    return dim


def _within_root(
    mesh: DeviceMesh, spread: Spread, place: Sequence[int]
) -> tuple[Spread, Numbers, Sequence[int]]:
    """The spread, the processes and the place of this one, of which this is a part.

    All copies are seen there.

    A parameter that tensor parallelism leaves alone is split over the data-parallel part of the
    mesh; each member of a tensor-parallel group has a copy.
    """
    own: Numbers = np.array(mesh.mesh.tolist(), dtype=np.int64)
    root = root_of_mesh(mesh)
    names, all_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    within = root.get_coordinate()
    if root is mesh or not names or not set(names) <= set(all_names) or within is None:
        return spread, own, place
    dims = [all_names.index(name) for name in names]
    every: Numbers = np.array(root.mesh.tolist(), dtype=np.int64)
    index = tuple(slice(None) if i in dims else within[i] for i in range(every.ndim))
    part = every[index]
    # Dimensions of the part are in the order of the root.
    if dims != sorted(dims) or part.shape != own.shape or not (part == own).all():
        return spread, own, place
    splits: list[int | None] = [None] * every.ndim
    for dim, split in zip(dims, spread.splits, strict=True):
        splits[dim] = split
    order = [dims[each] for each in spread.order]
    rest = [dim for dim in range(every.ndim) if dim not in dims]
    return Spread(every.shape, tuple(splits), (*order, *rest)), every, within
