"""Copies of a sharded model in a live job: checked, and given the groups of each generation.

Under HSDP each copy of the model is sharded over some processes. In a live job a copy comes and
goes as a whole. FSDP keeps the shards of a copy together, in a group of its processes. It does not
reduce over copies there: that fails when a copy is lost, and FSDP would raise in the user's code.
So resilin does, where it can give the reduction up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from resilin.compat.torch_names import root_of_mesh
from resilin.core.membership import Membership
from resilin.engine.collectives import Wait
from resilin.engine.copies import CopyGroups
from resilin.engine.live.refusal import refuse_live
from resilin.training.gradient.packs import LARGEST, in_packs
from resilin.training.gradient.sharding import Sharding
from resilin.training.state.meshes import forget_places


def check_live(model: nn.Module, sharding: Sharding | None, size: int) -> None:
    """Has a live job run without `--live` if its model cannot be live.

    Args:
        model: The model.
        sharding: Its sharding; None if it is not sharded.
        size: Processes of which the launcher makes one copy.

    Raises:
        ValueError: The launcher cannot run the job without `--live`.
        SystemExit: It does.
    """
    if sharding is None:
        if size > 1:
            refuse_live(
                f"--processes-per-copy ({size}) is for a model that is sharded with fully_shard, "
                "and no module of this model is"
            )
        return
    if reason := _refusal(model, sharding, size):
        refuse_live(reason)


def _refusal(model: nn.Module, sharding: Sharding, size: int) -> str:
    """The reason why a sharded model cannot be live; empty if it can."""
    from resilin.compat.torch_fsdp import own_groups_of

    if sharding.processes_per_replica > 1:
        return "a live job cannot train a model that is sharded by tensor parallelism"
    if any(unit.mesh.ndim == 1 for unit in sharding.units):
        return (
            "the model is sharded over all processes (a 1-D mesh of fully_shard), and the shards "
            "of one that is lost are on no other"
        )
    for unit in sharding.units:
        ranks = torch.arange(sharding.num_processes).view(-1, unit.num_shards)
        if unit.num_shards != size or not torch.equal(unit.mesh.mesh.long(), ranks):
            return (
                f"each copy of the model is sharded over {unit.num_shards} processes (the mesh of "
                f"fully_shard is {unit.mesh.mesh.tolist()}), and the launcher makes copies of "
                f"{size} processes with neighbouring numbers (--processes-per-copy)"
            )
        if root_of_mesh(unit.mesh) is not unit.mesh:
            return "the mesh of fully_shard is a part of another one, which nothing would follow"
    if reason := own_groups_of(model):
        return f"the process groups of the model cannot be exchanged in a live job: {reason}"
    return ""


def follow(
    model: nn.Module, sharding: Sharding, groups: CopyGroups, membership: Membership
) -> Sharding:
    """Gives a sharded model the groups of a generation.

    Args:
        model: The model.
        sharding: Its sharding in the generation before, or as it was built.
        groups: The groups.
        membership: The place of this process in the generation.

    Returns:
        Its sharding now.
    """
    from resilin.compat.torch_fsdp import exchange_groups

    mesh = DeviceMesh.from_group(
        [groups.copies, groups.shards],
        sharding.mesh.device_type,
        torch.arange(membership.num_processes).view(-1, sharding.units[0].num_shards),
        mesh_dim_names=sharding.mesh.mesh_dim_names,
    )
    exchange_groups(model, mesh, groups.alone)
    forget_places()
    return replace(
        sharding,
        mesh=sharding.units[0].mesh,
        replica=membership.replica,
        num_processes=membership.num_processes,
        copy_groups=groups,
    )


def add_over_copies(parameters: Sequence[Any], copies: dist.ProcessGroup, wait: Wait) -> None:
    """Adds up the gradients of sharded parameters over all copies of the model. Collective.

    A parameter that only other copies have used gets their gradient.

    Args:
        parameters: The parameters, the same on all copies.
        copies: The processes that have the same shards.
        wait: Waits for a collective.

    Raises:
        PeerLost: A copy was lost; gradients are as they were.
    """
    if copies.size() == 1:
        return
    with torch.no_grad():
        shards = {parameter.to_local(): parameter for parameter in parameters}
        under_way = []
        for pack in in_packs(shards, LARGEST, LARGEST):
            flat = _packed([(shard, shards[shard].grad) for shard in pack])
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            work = dist.all_reduce(real, group=copies, async_op=True)
            under_way.append((work, flat, pack))
        for work, _, _ in under_way:
            wait(work)
        for _, flat, pack in under_way:
            *sums, used = torch.split(flat, [*(shard.numel() for shard in pack), len(pack)])
            # What this copy has used is used. To read the rest, the host waits for the device.
            missing = any(shards[shard].grad is None for shard in pack)
            numbers = used.tolist() if missing else [1] * len(pack)
            for shard, its, number in zip(pack, sums, numbers, strict=True):
                parameter = shards[shard]
                if not number:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().copy_(its.view(shard.shape))


def _packed(pack: Sequence[tuple[Tensor, Any]]) -> Tensor:
    """Gradients in one tensor, zeros for those that are missing, and which of them are there."""
    kind = pack[0][0]
    there = torch.tensor([grad is not None for _, grad in pack]).to(kind.device, kind.dtype)
    parts = [torch.zeros_like(shard) if grad is None else grad.to_local() for shard, grad in pack]
    return torch.cat([*(part.reshape(-1) for part in parts), there])
