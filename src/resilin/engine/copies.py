"""Copies of a model that is sharded over several processes, in a live job.

The processes of one copy are one member: they join, leave and are lost together, because none of
them has the whole model. Those of a copy that is complete depend on each other alone while they
shard and unshard it, so the loss of another copy cannot fail there. It fails where copies meet: in
the reduction over them, in a ballot, in a question. Some processes of a copy may see that end well,
and others not, and all of them must continue alike, or they would wait for each other. So they tell
each other, in a group of their own, before they do. A copy then is to the others what one process
is, and the rules of `core/live.py` hold for it as they are.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from resilin.engine import environment
from resilin.engine.lost import PeerLost

STARTING = timedelta(minutes=10)
"""Time limit for the processes of a new copy to find each other: each imports torch on its own. If
one of them dies, their launcher ends the others."""


class Place(NamedTuple):
    """The place of this process in the copy that it holds a part of."""

    member: str
    """Name of the member: that of the worker with part 0."""
    part: int = 0
    """Number of its part."""
    size: int = 1
    """Processes of the copy."""

    @classmethod
    def of_this_process(cls, worker: str) -> Place:
        """The place that the launcher has given to this process; alone, if it has given none.

        Args:
            worker: Name of the worker that this process is.

        Raises:
            ValueError: The launcher's environment is malformed.
        """
        said = os.environ.get(environment.COPY)
        if said is None:
            return cls(worker)
        member, part, size = said.rsplit(":", 2)
        place = cls(member, int(part), int(size))
        if not 0 <= place.part < place.size:
            raise ValueError(f"{environment.COPY} ({said}) must have a part below its size")
        return place

    @property
    def leads(self) -> bool:
        """Whether this process speaks for its copy."""
        return self.part == 0

    def to_environment(self) -> str:
        """The place, as a launcher gives it to a worker."""
        return f"{self.member}:{self.part}:{self.size}"

    def names(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Names of all processes of these members, in the order of their numbers."""
        if self.size == 1:
            return members
        return tuple(f"{name}.{part}" for name in members for part in range(self.size))

    @property
    def name(self) -> str:
        """Name of this process among them."""
        return self.names((self.member,))[self.part]

    def meeting(self) -> FileStore:
        """A store in which the processes of a new copy meet, before it joins the others."""
        directory = Path(os.environ[environment.LIVE]).parent
        return FileStore(str(directory / f"copy-{self.member}"), self.size)


class CopyGroups(NamedTuple):
    """Groups of this process in a generation of copies."""

    shards: dist.ProcessGroup
    """The processes of its copy."""
    copies: dist.ProcessGroup
    """The processes that hold the same part, one in each copy."""
    alone: dist.ProcessGroup
    """This process: for a reduction over copies that is left to somebody else."""


def make_groups(process: int, num_processes: int, size: int, patience: timedelta) -> CopyGroups:
    """Makes the groups of a generation. Each process makes only its own ones.

    Args:
        process: Number of this process.
        num_processes: Processes of the generation.
        size: Processes of a copy.
        patience: Time limit for connections.
    """
    first = process - process % size
    numbers = (
        range(first, first + size),
        range(process % size, num_processes, size),
        range(process, process + 1),
    )
    made = (
        dist.new_group(list(each), backend="gloo", timeout=patience, use_local_synchronization=True)
        for each in numbers
    )
    return CopyGroups(*made)


def all_agree(group: dist.ProcessGroup, done: bool) -> bool:
    """Whether all processes of a copy have done something that another copy may have failed.

    Only the loss of one of its own processes can fail here: then the copy is lost, or that one has
    given the generation up before all of it was formed.

    Raises:
        PeerLost: A process of the copy has left the group.
    """
    said = torch.tensor([int(done)])
    try:
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise PeerLost(f"a process of this copy has left its group ({error})") from error
    return bool(said.item())
