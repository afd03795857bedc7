"""`Sharding`: which parameters of a model `fully_shard` has sharded, and over which processes.

A replica is one data-parallel member. Under FSDP and HSDP each process is one. Under tensor
parallelism (TP) the processes that share a layer form one replica: they work on the same data. A
sharded parameter is a DTensor: its mesh has the data-parallel dimensions first, those of FSDP's own
mesh, and after them the tensor-parallel ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from resilin.core.membership import Membership
from resilin.engine.copies import CopyGroups


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that one call of `fully_shard` made a unit: they are reduced together."""

    modules: tuple[Any, ...]
    """The modules of the call: several for `fully_shard([a, b])`."""
    parameters: tuple[Any, ...]
    """Its sharded parameters, DTensors, in the order in which FSDP reduces them."""
    mesh: DeviceMesh
    """The mesh that it was sharded on: 1-D, or 2-D for HSDP."""

    @property
    def num_shards(self) -> int:
        """Processes that a parameter is divided among by FSDP."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def replicates(self) -> bool:
        """Whether shards have copies in other processes, as under HSDP."""
        return self.mesh.ndim > 1

    def width(self, parameter: Any) -> int:
        """Numbers of a parameter in each row of the flat gradient, one row per shard."""
        shape = list(parameter.shape)
        for dim, placement in self._tensor_parallel(parameter):
            if not placement.is_replicate():
                shape[placement.dim] = _chunk(shape[placement.dim], parameter.device_mesh, dim)
        dim = parameter.placements[self.mesh.ndim - 1].dim
        if dim:
            return int(math.prod(shape)) // self.num_shards  # FSDP divides other dimensions evenly
        return int(-(-shape[0] // self.num_shards) * math.prod(shape[1:]))

    def num_tensor_shards(self, parameter: Any) -> int:
        """Processes of one replica that a parameter is divided among."""
        mesh = parameter.device_mesh
        pairs = self._tensor_parallel(parameter)
        return int(math.prod(mesh.size(dim) for dim, each in pairs if not each.is_replicate()))

    def _tensor_parallel(self, parameter: Any) -> Iterator[tuple[int, Any]]:
        return (
            (dim, each) for dim, each in enumerate(parameter.placements) if dim >= self.mesh.ndim
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The sharding of a model, as one process sees it."""

    units: tuple[Unit, ...]
    """All units, in the order of their modules."""
    roots: tuple[Any, ...]
    """Sharded modules that are in no other sharded module."""
    mesh: DeviceMesh
    """The data-parallel mesh."""
    replica: int
    """The data-parallel member that this process belongs to."""
    num_processes: int
    """Processes of the job."""
    copy_groups: CopyGroups | None = None
    """Groups of the copies in a live job, where resilin reduces over copies in place of FSDP."""

    @property
    def within_copy(self) -> Sharding:
        """The same for the processes of one copy: as if there was no other one."""
        return replace(self, num_processes=self.units[0].num_shards)

    @property
    def num_replicas(self) -> int:
        """Data-parallel members."""
        return self.mesh.size()

    @property
    def processes_per_replica(self) -> int:
        """Processes that work on the same data: more than 1 under tensor parallelism."""
        return self.num_processes // self.num_replicas

    def copies(self, parameter: Any) -> int:
        """Processes that have the same part of a parameter, and of its reduced gradient."""
        if not is_sharded(parameter):
            return self.num_processes
        mesh, placements = parameter.device_mesh, parameter.placements
        divided = (mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate())
        return self.num_processes // int(math.prod(divided))


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(parameter, "device_mesh")


def _chunk(size: int, mesh: DeviceMesh, dim: int) -> int:
    """Part of a dimension that this process has, as `torch.chunk` divides it."""
    most = -(-size // mesh.size(dim))
    return max(0, min(most, size - most * mesh.get_local_rank(dim)))


def find_sharding(
    model: nn.Module, mesh: DeviceMesh | None, membership: Membership
) -> Sharding | None:
    """The sharding of a model; None if no part of it is sharded.

    Args:
        model: The model.
        mesh: The data-parallel mesh, if the user names it.
        membership: The processes of the job.

    Raises:
        ValueError: It is sharded in a way that cannot be trained, or on another mesh.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = [module for module in model.modules() if fsdp and isinstance(module, fsdp.FSDPModule)]
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), and FSDP2 is needed: apply "
            "torch.distributed.fsdp.fully_shard to its modules instead"
        )
    if not sharded:
        _refuse_tensor_parallel(model, mesh)
        return None
    for module in sharded:
        module.reshard()  # after a forward pass, its parameters may be whole ones
    units = _units(model)
    _check_managed(model, units)
    if not units:
        raise ValueError("fully_shard was called on modules without parameters")
    data_parallel = _data_parallel(units, mesh, membership)
    inner = {each for module in sharded for each in module.modules() if each is not module}
    coordinate = data_parallel.get_coordinate()
    assert coordinate is not None
    replica = 0
    for dim, place in enumerate(coordinate):
        replica = replica * data_parallel.size(dim) + place
    return Sharding(
        units=units,
        roots=tuple(module for module in sharded if module not in inner),
        mesh=data_parallel,
        replica=replica,
        num_processes=membership.num_processes,
    )


def _refuse_tensor_parallel(model: nn.Module, mesh: DeviceMesh | None) -> None:
    if found := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ValueError(
            f"{len(found)} parameters are DTensors that fully_shard does not manage ({found[0]} is "
            "the first): call fully_shard on the model after tensor parallelism was applied, also "
            "if the data-parallel mesh has only 1 process"
        )
    if mesh is not None:
        raise ValueError(
            f"mesh ({mesh}) is the data-parallel mesh of a model that is sharded with fully_shard, "
            "and no module of this model is"
        )


def _units(model: nn.Module) -> tuple[Unit, ...]:
    from resilin.compat.torch_fsdp import check_fsdp, units_of

    check_fsdp()
    units, known = [], set(model.modules())
    for modules, meshes, spmd in units_of(model):
        name = type(modules[0]).__name__
        if len(meshes) > 1 or spmd:
            raise ValueError(
                f"{name} was sharded with a mesh per parameter, or with dp_mesh_dims: only one "
                "mesh of data-parallel dimensions per call of fully_shard is supported"
            )
        if not meshes:
            continue  # all of its parameters are in units within it
        managed = [p for p in _in_order(modules, known) if _is_managed(p, meshes[0])]
        if not managed:
            raise ValueError(
                f"{name} has no parameter that is sharded over its mesh {meshes[0]}: replicate() "
                "is not supported; leave it out, and DistributedDataParallel is used"
            )
        units.append(Unit(tuple(modules), tuple(managed), meshes[0]))
    return tuple(units)


def _in_order(roots: Sequence[nn.Module], known: set[nn.Module]) -> Iterator[Tensor]:
    """Parameters of a unit in FSDP's order: inner modules first, inner units left out."""
    from torch.distributed.fsdp import FSDPModule

    seen: set[nn.Module] = set()
    given: set[Tensor] = set()

    def walk(module: nn.Module) -> Iterator[Tensor]:
        seen.add(module)
        for child in module.children():
            if child not in seen and (child in roots or not isinstance(child, FSDPModule)):
                yield from walk(child)
        for parameter in module.parameters(recurse=False):
            if parameter not in given:
                given.add(parameter)
                yield parameter

    for root in roots:
        if root in known and root not in seen:
            yield from walk(root)


def _is_managed(parameter: Any, mesh: DeviceMesh) -> bool:
    """Whether FSDP has sharded a parameter on this mesh."""
    if not is_sharded(parameter) or parameter.device_mesh.ndim < mesh.ndim:
        return False
    if parameter.device_mesh.ndim == mesh.ndim and parameter.device_mesh != mesh:
        return False
    return not parameter.placements[mesh.ndim - 1].is_replicate()


def _check_managed(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuses DTensors that nobody would reduce, and gradients that are taken to the host."""
    managed = {parameter for unit in units for parameter in unit.parameters}
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            continue
        place: Any = parameter
        if parameter not in managed:
            raise ValueError(
                f"{name} is a DTensor on the mesh {place.device_mesh}, and fully_shard does not "
                "manage it: nobody would reduce its gradient over data-parallel members; do not "
                "put it into ignored_params"
            )
        refuse_offload(name, parameter.device.type, place.device_mesh.device_type)


def refuse_offload(name: str, device: str, mesh_device: str) -> None:
    """Refuses a parameter that is kept elsewhere than on the device of its mesh.

    Raises:
        ValueError: It is.
    """
    if device != mesh_device:
        raise ValueError(
            f"{name} is on {device} and its mesh is for {mesh_device}: CPUOffloadPolicy is not "
            "supported, because gradients would be weighed before they have arrived"
        )


def _data_parallel(
    units: Sequence[Unit], mesh: DeviceMesh | None, membership: Membership
) -> DeviceMesh:
    """The data-parallel mesh: that of FSDP, if it can be told from the tensor-parallel rest."""
    own = units[0].mesh
    for unit in units:
        if _ranks(unit.mesh) != _ranks(own):
            raise ValueError(
                f"units are sharded over different processes, {_ranks(own)} and "
                f"{_ranks(unit.mesh)}: all calls of fully_shard need the same data-parallel members"
            )
    if mesh is not None and _ranks(mesh) != _ranks(own):
        raise ValueError(
            f"mesh has the processes {_ranks(mesh)}, and fully_shard was called with a mesh of "
            f"{_ranks(own)}: both must be the data-parallel mesh"
        )
    num = membership.num_processes
    if own.size() == num or mesh is not None:
        if num % own.size():
            raise ValueError(
                f"{num} processes cannot form {own.size()} replicas of equally many processes"
            )
        return own
    widest = max((p.device_mesh.size() for unit in units for p in unit.parameters), default=0)
    if widest != num:
        raise ValueError(
            f"fully_shard was called with a mesh of {own.size()} processes, the job has {num}, and "
            f"no parameter has a mesh of all of them (the largest has {widest}): what the others "
            "do cannot be told; if they work on the same data, pass the data-parallel mesh as mesh="
        )
    return own


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks
