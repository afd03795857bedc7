"""Ray Train: workers of a `TorchTrainer`, whose number may change while it trains.

Ray stops all workers and starts new ones when it resizes the worker group, or when a worker or its
node is lost. So a step ends for all or for none, as under torchrun, and state comes from the memory
of a host that is still there, or from a checkpoint. Two things are different. The training function
runs in a thread beside the main one, which takes the process group away when the group is to be
resized, in the middle of whatever the training does. And a worker is killed when all is done: what
has to be tidied up must be by then.

A host is a node of Ray, which is lost as a whole. Ray's own local ranks go by address, and several
nodes may have one: pods in the network of their machine, each with a memory of its own.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from resilin.compat.ray_names import this_worker
from resilin.compat.torch_names import default_store
from resilin.core.membership import Membership
from resilin.engine.base import Engine
from resilin.engine.stop import StopRequest

_NODE = "resilin/node"


class _Place(NamedTuple):
    """Where a worker is; the words are those of `Engine`."""

    host: int
    num_hosts: int
    local_replica: int
    num_local_replicas: int


class RayTrain(Engine):
    """Workers of Ray Train.

    Who is here is what Ray said when it started the worker, and not what torch.distributed says: a
    process group that Ray has taken away leaves no job of one replica behind.

    Raises:
        ValueError: The workers have no process group, or one of another size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = _Asked()
        self._replica, self._num_replicas, self._run = this_worker()
        size = dist.get_world_size() if dist.is_initialized() else 0
        if size != self._num_replicas and (size or self._num_replicas > 1):
            raise ValueError(
                f"Ray Train has started {self._num_replicas} workers, and their process group has "
                f"{size} members: it must have all of them, as with TorchTrainer and TorchConfig"
            )
        self._world = dist.group.WORLD
        self._node = str(sys.modules["ray"].get_runtime_context().get_node_id())
        if self._num_replicas > 1:
            default_store().set(f"{_NODE}/{self._replica}", self._node)

    @cached_property
    def _place(self) -> _Place:
        """Where this worker is. The first to ask waits until all workers are here."""
        nodes = [self._node]
        if self._num_replicas > 1:
            keys = [f"{_NODE}/{replica}" for replica in range(self._num_replicas)]
            nodes = [node.decode() for node in default_store().multi_get(keys)]
        hosts = list(dict.fromkeys(nodes))
        return _Place(
            host=hosts.index(self._node),
            num_hosts=len(hosts),
            local_replica=nodes[: self._replica].count(self._node),
            num_local_replicas=nodes.count(self._node),
        )

    # Who we are ----------------------------------------------------------------------------

    @property
    def replica(self) -> int:
        """The world rank of the worker."""
        return self._replica

    @property
    def num_replicas(self) -> int:
        """Workers in the group."""
        return self._num_replicas

    @property
    def host(self) -> int:
        """Which node this is, in the order of the workers."""
        return self._place.host

    @property
    def num_hosts(self) -> int:
        """Nodes that the workers are on."""
        return self._place.num_hosts

    @property
    def local_replica(self) -> int:
        """Which worker of its node this is."""
        return self._place.local_replica

    @property
    def num_local_replicas(self) -> int:
        """Workers of this node."""
        return self._place.num_local_replicas

    @property
    def restartable(self) -> bool:
        """Ray starts workers again: in a resized group, or as its FailureConfig allows."""
        return True

    @property
    def exits(self) -> bool:
        """Workers are killed."""
        return False

    @property
    def memory_name(self) -> str | None:
        """The id of this call of `fit`: a later one, even of the same name, goes by checkpoints."""
        return f"ray-{self._run}"

    # A step --------------------------------------------------------------------------------

    def begin_step(self) -> Membership:
        """Ends the training where Ray has taken its process group away."""
        if not self.all_committed():
            raise RuntimeError(
                f"Ray Train has taken the process group of its {self._num_replicas} workers away, "
                "as it does before it starts new ones"
            )
        return self.membership

    def all_committed(self) -> bool:
        """Whether the step was reduced: the process group is still there.

        Ray takes it away from another thread, at any moment. A step that lost it on the way has
        the gradient of this replica alone, and must not be kept.
        """
        return dist.group.WORLD is self._world

    # The end -------------------------------------------------------------------------------

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this worker with an error, by which Ray knows that there is more to do."""
        reason = self.stop.reason or "another replica was asked to"
        raise RuntimeError(
            f"the job has stopped ({reason}): its state is kept, and Ray Train starts it again if "
            "max_failures of its FailureConfig allows"
        )


class _Asked(StopRequest):
    """Signals are Ray's: they reach the main thread, and the training is beside it."""

    def listen(self) -> None:
        """Takes no signals."""
