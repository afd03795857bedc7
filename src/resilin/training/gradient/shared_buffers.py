"""Buffers of a sharded model, such as the statistics of a BatchNorm, kept equal on all replicas.

Each replica updates its buffers from its own samples, and FSDP leaves them alone. As under
DistributedDataParallel, those of the first replica count, once per step. They are sent at the end
of a step, and not before the next forward pass: the state that is saved in between is the same on
all processes, and so is the model that is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resilin.engine.collectives import Wait
from resilin.training.gradient.sharding import Sharding, is_sharded


class SharedBuffers:
    """The buffers of one sharded model.

    Args:
        module: The model.
        sharding: Division of its parameters among processes.
        wait: Waits for a collective.
    """

    def __init__(self, module: nn.Module, sharding: Sharding, wait: Wait) -> None:
        self._sharding, self._wait = sharding, wait
        # By name: a module may have another tensor in its place after each forward pass.
        self._names = [
            (each, name)
            for each in module.modules()
            for name, _ in each.named_buffers(recurse=False)
        ]

    def share(self, group: dist.ProcessGroup | None) -> None:
        """Gives all replicas the buffers of the first one. Collective; nothing if there are none.

        All buffers are sent together, whatever their types: one broadcast, or one per dimension of
        the data-parallel mesh under tensor parallelism.

        Args:
            group: All processes; None if there is only this one.

        Raises:
            PeerLost: A replica is gone; some buffers may have been written.
        """
        if group is None or not self._names:
            return
        routes: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        with torch.no_grad():
            for tensor, route in self._tensors(group):
                if route and tensor.numel():
                    routes.setdefault(route, []).append(tensor)
            for route, tensors in routes.items():
                for device in dict.fromkeys(tensor.device for tensor in tensors):
                    alike = [tensor for tensor in tensors if tensor.device == device]
                    for each in route:
                        self._send(alike, each)

    def _tensors(
        self, group: dist.ProcessGroup
    ) -> Iterator[tuple[Tensor, tuple[dist.ProcessGroup, ...]]]:
        """This process's part of each buffer, and the groups that have copies of it."""
        replicas = self._replicas(group)
        members = set(self._sharding.mesh.mesh.flatten().tolist())
        seen: set[int] = set()
        for module, name in self._names:
            buffer: Any = getattr(module, name, None)
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if not is_sharded(buffer):
                yield buffer.detach(), replicas
                continue
            mesh = buffer.device_mesh
            if len(members & set(mesh.mesh.flatten().tolist())) <= 1:
                # It is split within a replica alone.
                yield buffer.detach().to_local(), replicas
                continue
            copies = [dim for dim, each in enumerate(buffer.placements) if each.is_replicate()]
            route = tuple(mesh.get_group(dim) for dim in reversed(copies) if mesh.size(dim) > 1)
            yield buffer.detach().to_local(), route

    def _replicas(self, group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
        """Groups in which the first process has to send, one after the other, to reach all."""
        if self._sharding.processes_per_replica == 1:
            return (group,)
        mesh = self._sharding.mesh
        dims = reversed(range(mesh.ndim))
        return tuple(mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1)

    def _send(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Gives all members of a group the tensors of the first one."""
        # The widest types first: then each begins where its type may begin.
        order = sorted(tensors, key=lambda tensor: -tensor.element_size())
        pack = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in order])
        source = dist.get_global_rank(group, 0)
        self._wait(dist.broadcast(pack, source, group=group, async_op=True))
        if group.rank() == 0:
            return
        begin = 0
        for tensor in order:
            end = begin + tensor.numel() * tensor.element_size()
            tensor.copy_(pack[begin:end].view(tensor.dtype).view(tensor.shape))
            begin = end
