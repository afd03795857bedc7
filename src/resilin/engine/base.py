"""The one interface through which training knows who is in the job.

It is written from the needs of a step: who am I, how many are we, may the step begin, did all of us
commit it, who has state for those that lack it, were we asked to stop. What launched the processes,
and whether a change of membership means new processes or not, is behind it.
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
"""How long replicas wait for each other outside the steps, as at the end of a checkpoint."""
LastWords = Callable[[str, bool], None]
"""What to do before the process ends from another thread; called with (reason, deadline_passed)."""
_CHUNK = 64 * 2**20
"""Bytes that are sent to other replicas at a time."""


class Engine:
    """Who is in the job. This base knows what torch.distributed knows; subclasses the launcher.

    Who is present is asked of torch.distributed each time, because a live engine may change it
    between any two steps. All methods that say "all replicas" are collective.
    """

    def __init__(self) -> None:
        self.generation = 0
        """Number of the present generation; see `raise_generation`."""
        self.stop = StopRequest()
        """Whether this replica was asked to stop."""
        self.pulse = Pulse()
        """What it shows of itself to whoever supervises it."""
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}

    # Who we are ----------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Who is in the job now, as this process sees it.

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
        """Which replica this process is, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def host(self) -> int:
        """Number of the host, or of the agent on it, that this replica runs on."""
        return 0

    @property
    def num_hosts(self) -> int:
        """How many hosts, or agents, the replicas are on."""
        return 1

    @property
    def local_replica(self) -> int:
        """Which of the replicas on this host it is, from 0."""
        return 0

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this host has."""
        return 1

    @property
    def restartable(self) -> bool:
        """Whether somebody starts this process again when it dies."""
        return False

    @property
    def exits(self) -> bool:
        """Whether this process ends by itself behind the training, as a script does."""
        return True

    @property
    def num_restarts(self) -> int:
        """How often this process was started again, as far as is known."""
        return 0

    @property
    def memory_name(self) -> str | None:
        """What the host's copies of this job's state are filed under; None if nobody comes back."""
        return None

    def raise_generation(self, at_least: int) -> None:
        """Gives the present generation a number that nothing which an earlier one left has.

        Called when state is restored, with the same number on all replicas.
        """
        self.generation = max(self.generation, at_least)

    # A step --------------------------------------------------------------------------------

    def begin_step(self) -> Membership:
        """Called by all replicas before each step: the place where members may join or leave.

        Returns:
            Who takes part in the step. Its generation tells whether that has changed; where a
            change means new processes it never has.
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
        """What each replica says, known to all replicas. For small things."""
        group = self.group("control")
        if group is None:
            return [value]
        values: list[Any] = [None] * self.num_replicas
        dist.all_gather_object(values, value, group=group)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        """The value that replica `source` has, on all replicas. For small things."""
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
        """Ends this process where its main thread can do nothing useful any more. Collective.

        Here nobody supervises the process, so there is nothing to watch.

        Args:
            last_words: Called by another thread before the process is ended, whatever its main
                thread does at that moment.
        """

    def unwatch(self) -> None:
        """Ends what `watch` began, if it did."""

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this process after all replicas have agreed to stop.

        Args:
            asked: Whether this very replica was asked to, or follows another one.
        """
        raise SystemExit(self.stop.exit_code)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor as pieces of raw bytes."""
    if not tensor.numel():
        return ()
    assert tensor.is_contiguous()
    raw = tensor.view(-1).view(torch.uint8)
    return (raw[start : start + _CHUNK] for start in range(0, raw.numel(), _CHUNK))
