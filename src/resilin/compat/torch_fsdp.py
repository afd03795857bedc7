"""torch: the names of FSDP2 (`fully_shard`) that have no public counterpart.

Three of them: the state of a module, its groups of parameters, and their mesh. Live jobs need the
process groups of that mesh as well, and put another mesh in its place. Everything else is done
through methods of `FSDPModule` that are documented. Loaded only where a script has imported FSDP:
without that, no module can be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from resilin.compat.torch_names import TORCH

_STATE = TORCH.name(
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "finds modules that fully_shard([a, b]) has put into one unit",
)
_GROUPS = TORCH.name(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups",
    "finds the parameters that are reduced together",
    instance=True,
    since="2.12",
)
_MESH = TORCH.name(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info",
    "knows the mesh that a module was sharded on",
    instance=True,
)
_METHODS = {
    "reset_iter_state": "2.13",
    "set_custom_reduce_scatter": "2.9",
    "set_gradient_divide_factor": "2.8",
    "set_requires_all_reduce": "2.8",
    "reshard": "2.8",
}
"""Public methods of `FSDPModule`, and the first tested version that has each."""


def check_fsdp() -> None:
    """Check that the installed torch has all that sharded models need.

    Raises:
        MissingNameError: It lacks a private name, or a method of `FSDPModule`.
    """
    _STATE.find()
    for method, since in _METHODS.items():
        if not hasattr(FSDPModule, method):
            raise TORCH.missing(f"torch.distributed.fsdp.FSDPModule.{method}", since)


def units_of(module: nn.Module) -> Iterator[tuple[list[Any], list[DeviceMesh], bool]]:
    """The modules that `fully_shard` was called on, those of one call together.

    Args:
        module: The whole model.

    Yields:
        The modules of a unit, the mesh of each of its groups of parameters, and whether that mesh
        has dimensions that are not data-parallel (`dp_mesh_dims`).

    Raises:
        MissingNameError: The installed torch keeps this somewhere else.
    """
    units: dict[int, tuple[list[Any], Any]] = {}
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state = _STATE.of(each)()
            units.setdefault(id(state), ([], state))[0].append(each)
    for modules, state in units.values():
        infos = [_MESH.of(group) for group in _GROUPS.of(state)]
        spmd = any(getattr(info, "dp_mesh_dims", None) is not None for info in infos)
        yield modules, [info.mesh for info in infos], spmd


# Copies that come and go --------------------------------------------------------------------------

_SHARDS = TORCH.name(
    "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo.shard_process_group",
    "gives a sharded model the groups of a generation of a live job",
    instance=True,
)
_COPIES = TORCH.name(
    "torch.distributed.fsdp._fully_shard._fsdp_common:DDPMeshInfo.replicate_process_group",
    "leaves the reduction over copies to resilin, in a live job",
    instance=True,
)


def own_groups_of(module: nn.Module) -> str:
    """The reason why the groups of a sharded model cannot be exchanged; empty if they can.

    Args:
        module: The whole model.

    Raises:
        MissingNameError: The installed torch keeps them somewhere else.
    """
    for group in _param_groups(module):
        info = _MESH.of(group)
        _SHARDS.of(info)
        _COPIES.of(info)
        if not hasattr(info.mesh, "__dict__"):
            raise TORCH.missing("torch.distributed.device_mesh.DeviceMesh.__dict__")
        if getattr(info, "reduce_scatter_process_group", None) is not None:
            return "set_separate_reduce_scatter_group() gives it a group of its own"
        if getattr(group, "post_forward_mesh_info", None) not in (None, info):
            return "reshard_after_forward is a number, and gives it groups of its own"
    return ""


def exchange_groups(module: nn.Module, mesh: DeviceMesh, copies: ProcessGroup) -> None:
    """Gives a sharded model other groups, of as many shards as before.

    All DTensors of the model, of its gradients and of its optimizer have their meshes from it. So
    these meshes are changed where they are: each becomes like the new one.

    Args:
        module: The whole model.
        mesh: The new mesh, of copies and shards.
        copies: The group in which FSDP reduces over copies.
    """
    known: list[DeviceMesh] = []
    for group in _param_groups(module):
        info = _MESH.of(group)
        if all(info.mesh is not each for each in known):
            known.append(info.mesh)
            vars(info.mesh).clear()
            vars(info.mesh).update(vars(mesh))
        _SHARDS.set(info, mesh.get_group(1))
        _COPIES.set(info, copies)


def _param_groups(module: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state = _STATE.of(each)()
            if id(state) not in seen:
                seen.add(id(state))
                yield from _GROUPS.of(state)
