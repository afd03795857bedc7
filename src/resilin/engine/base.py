"""The interface between training and the membership of a job.

It follows the needs of a step: who am I, how many are we, may the step begin, did all of us commit
it, who has state for those that lack it, were we asked to stop. It hides the launcher, and whether
a change of membership means new processes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.core.membership import Membership
from resilin.engine.pulse import Pulse
from resilin.engine.stop import StopRequest

CONTROL_TIMEOUT = timedelta(minutes=10)
"""Time limit for replicas that wait for each other outside steps, as after a checkpoint."""
LastWords = Callable[[str, bool], None]
"""Called with (reason, deadline_passed) before another thread ends the process."""
_CHUNK = 64 * 2**20
"""Bytes that are sent to other replicas in one message."""


class Engine:
    """Membership of a job. This base class asks torch.distributed; subclasses know the launcher.

    The members are read from torch.distributed each time, because a live engine may change them
    between any two steps. All methods that mention "all replicas" are collective.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Number of the present generation; see `raise_generation`."""
        self.stop = StopRequest()
        """Whether this replica was asked to stop."""
        self.pulse = Pulse()
        """Published state of this process, for its supervisor."""
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    # Who we are ----------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """The current members of the job, as this process sees them.

        It is the same until `begin_step` returns another one, except for the generation, which
        training raises once, when it restores state.
        """
        return Membership(
            generation=self.generation,
            replica=self.replica,
            num_replicas=self.num_replicas,
            process=self.replica,
            num_processes=self.num_replicas,
            host=self.host,
            num_hosts=self.num_hosts,
            local_process=self.local_replica,
            num_local_processes=self.num_local_replicas,
        )

    @property
    def replica(self) -> int:
        """Number of this process's replica, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def host(self) -> int:
        """Number of the host, or of the agent on it, that this replica runs on."""
        return 0

    @property
    def num_hosts(self) -> int:
        """Number of hosts, or agents, that the replicas run on."""
        return 1

    @property
    def local_replica(self) -> int:
        """Number of this replica among those of its host, from 0."""
        return 0

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas on this host."""
        return 1

    @property
    def restartable(self) -> bool:
        """Whether a supervisor restarts this process when it dies."""
        return False

    @property
    def exits(self) -> bool:
        """Whether this process exits after the training, as a script does."""
        return True

    @property
    def num_restarts(self) -> int:
        """Number of restarts of this process, as far as known."""
        return 0

    @property
    def memory_name(self) -> str | None:
        """Name of this job's in-memory copies on a host; None if processes are never restarted."""
        return None

    def raise_generation(self, at_least: int) -> None:
        """Give the current generation a number above that of any earlier state.

        Called when state is restored, with the same number on all replicas.
        """
        self.generation = max(self.generation, at_least)

    # A step --------------------------------------------------------------------------------

    def begin_step(self) -> Membership:
        """Called by all replicas before each step: the place where members may join or leave.

        Returns:
            The members that take part in the step. A new generation means that they have changed;
            with engines that start new processes for a change they never do.
        """
        return self.membership

    def all_committed(self) -> bool:
        """Called when the gradient of a step is complete: whether all replicas took part in it.

        Asked before the optimizer steps. If not, the step fails: nothing of it is kept, and it is
        issued again. All replicas must give the same answer.

        Where a lost replica means new processes, whoever still runs has seen the reduction of the
        step end, so all took part in it.
        """
        return True

    # Agreement and state -------------------------------------------------------------------

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The process group in which gradients are reduced.

        Returns:
            The group, always the same one while the membership lasts; None if there is but one
            replica.
        """
        return dist.group.WORLD if self.num_replicas > 1 else None

    def group(self, purpose: str) -> dist.ProcessGroup | None:
        """A gloo group of all replicas for one purpose, apart from that of the gradients.

        Threads that communicate at the same time need a group each. All replicas must ask for
        groups in the same order.

        Returns:
            The group, always the same one while the membership lasts; None if there is but one
            replica.
        """
        if self.num_replicas == 1:
            return None
        world = dist.group.WORLD
        assert world is not None
        present = self._groups.get(purpose)
        if present is None or present[0] is not world:
            present = (world, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
            self._groups[purpose] = present
        return present[1]

    def gather(self, value: Any) -> list[Any]:
        """The values of all replicas, on all replicas. For small values."""
        group = self.group("control")
        if group is None:
            return [value]
        values: list[Any] = [None] * self.num_replicas
        dist.all_gather_object(values, value, group=group)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of replica `source`, on all replicas. For small values."""
        group = self.group("control")
        if group is None:
            return value
        payload = pickle.dumps(value) if self.replica == source else b""
        size = torch.tensor([len(payload)])
        dist.broadcast(size, source, group=group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.replica == source:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, source, group=group)
        # Between replicas of one job, which run the same code anyway.
        return pickle.loads(data.numpy().tobytes())

    def hand_out(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        """Fills in tensors on the CPU: each is sent by its owner to all replicas.

        Args:
            tensors: The same names, types and shapes on all replicas; contiguous.
            owners: Which replica has the content of each of them.
        """
        group = self.group("control")
        if group is None:
            return
        for name in owners:
            for part in _parts(tensors[name]):
                dist.broadcast(part, owners[name], group=group)

    # Supervision and the end ---------------------------------------------------------------

    def watch(self, last_words: LastWords) -> None:
        """End this process when its main thread can no longer make progress. Collective.

        Without a supervisor there is nothing to watch.

        Args:
            last_words: Called by another thread before the process is ended, whatever its main
                thread does at that moment.
        """

    def unwatch(self) -> None:
        """Stop watching, if `watch` was called."""

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this process after all replicas have agreed to stop.

        Args:
            asked: Whether this replica itself was asked to stop, or follows another one.
        """
        raise SystemExit(self.stop.exit_code)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor as pieces of raw bytes."""
    if not tensor.numel():
        return ()
    assert tensor.is_contiguous()
    raw = tensor.view(-1).view(torch.uint8)
    return (raw[start : start + _CHUNK] for start in range(0, raw.numel(), _CHUNK))
