"""Ray Train: workers of a `TorchTrainer`, whose number may change during training.

Ray stops all workers and starts new ones when it resizes the worker group, or when a worker or its
node is lost. So a step ends for all or for none, as under torchrun, and state comes from the memory
of a host that is still there, or from a checkpoint. Two things differ. The training function runs
in a thread, while the main thread destroys the process group before a resize, at any moment of the
training. And a worker is killed when everything is finished, so all cleanup must happen before.

A host is a node of Ray, which is lost as a whole. Ray's own local ranks are by address, and several
nodes may share one: pods in the network of their machine, each with its own memory.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import NoReturn

import torch.distributed as dist

from resilin.compat.ray_names import this_worker
from resilin.compat.torch_names import default_store
from resilin.core.membership import Membership
from resilin.engine.base import Engine
from resilin.engine.collectives import Group
from resilin.engine.stop import StopRequest

_NODE = "resilin/node"


class RayTrain(Engine):
    """Workers of Ray Train.

    The members are those that Ray announced when it started the worker, and not those of
    torch.distributed: a destroyed process group does not make this a job of one replica.

    Raises:
        ValueError: The workers have no process group, or one of another size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stop = _NoSignals()
        self._replica, self._num_replicas, self._run = this_worker()
        size = dist.get_world_size() if dist.is_initialized() else 0
        if size != self._num_replicas and (size or self._num_replicas > 1):
            raise ValueError(
                f"Ray Train has started {self._num_replicas} workers, and their process group has "
                f"{size} members: it must have all of them, as with TorchTrainer and TorchConfig"
            )
        # Not `_world`: the base class moves that one on whenever the process group changes.
        self._started_with = dist.group.WORLD
        self._node = str(sys.modules["ray"].get_runtime_context().get_node_id())
        if self._num_replicas > 1:
            default_store().set(f"{_NODE}/{self._replica}", self._node)

    # Who we are ----------------------------------------------------------------------------

    def find_membership(self) -> Membership:
        """Membership as Ray reports it; hosts are nodes, in the order of their workers."""
        nodes = self._nodes
        hosts = list(dict.fromkeys(nodes))
        return Membership(
            replica=self._replica,
            num_replicas=self._num_replicas,
            process=self._replica,
            num_processes=self._num_replicas,
            host=hosts.index(self._node),
            num_hosts=len(hosts),
            local_process=nodes[: self._replica].count(self._node),
            num_local_processes=nodes.count(self._node),
        )

    @cached_property
    def _nodes(self) -> list[str]:
        """The node of each worker. The first to ask waits until all workers are here."""
        if self._num_replicas == 1:
            return [self._node]
        keys = [f"{_NODE}/{replica}" for replica in range(self._num_replicas)]
        return [node.decode() for node in default_store().multi_get(keys)]

    @property
    def restartable(self) -> bool:
        """Always: Ray restarts workers in a resized group, or as its FailureConfig allows."""
        return True

    @property
    def exits(self) -> bool:
        """Never: Ray kills its workers."""
        return False

    @property
    def memory_name(self) -> str | None:
        """Id of this call of `fit`; a later call of the same name resumes from checkpoints."""
        return f"ray-{self._run}"

    # A step --------------------------------------------------------------------------------

    def begin_step(self) -> Membership:
        """End the training if Ray has destroyed its process group.

        Raises:
            RuntimeError: It has.
        """
        self.require_members()
        return self.membership

    def all_committed(self) -> bool:
        """Whether the step was reduced: the process group still exists.

        Ray destroys it from another thread, at any moment. A step that lost it has the gradient of
        this replica alone, and must not be committed.
        """
        return dist.group.WORLD is self._started_with

    def require_members(self) -> None:
        """Raise if Ray has destroyed the process group: nothing may wait for other workers then.

        Raises:
            RuntimeError: It has.
        """
        if not self.all_committed():
            raise RuntimeError(
                f"Ray Train has destroyed the process group of its {self._num_replicas} workers, "
                "as it does before it starts new ones"
            )

    # Agreement -----------------------------------------------------------------------------

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The process group of `TorchTrainer`; None if there is but one worker.

        Raises:
            RuntimeError: Ray has destroyed it.
        """
        self.require_members()
        return super().gradient_group()

    def group(self, purpose: str) -> Group | None:
        """A gloo group of all workers for one purpose; None if there is but one worker.

        Raises:
            RuntimeError: Ray has destroyed the process group.
        """
        self.require_members()
        return super().group(purpose)

    # The end -------------------------------------------------------------------------------

    def leave(self, *, asked: bool) -> NoReturn:
        """End this worker with an error, so that Ray restarts the job."""
        reason = self.stop.reason or "another replica was asked to"
        raise RuntimeError(
            f"the job has stopped ({reason}): its state is kept, and Ray Train starts it again if "
            "max_failures of its FailureConfig allows"
        )


class _NoSignals(StopRequest):
    """A stop request without signals: they belong to Ray and reach the main thread."""

    def listen(self, *, interrupts: bool = False) -> None:
        """Do nothing: signals are not handled."""
