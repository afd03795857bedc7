"""`Stream`: what a loader needs of data that can be read in order only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, lists, and dicts whose keys are strings."""


class Stream(Protocol):
    """Data in a fixed number of shards, each of which is read from its beginning to its end.

    The shards of an epoch together are its samples. Which samples a shard has, and in which order,
    depends on nothing but the arguments of `open`: a shard is opened again, in another process,
    where a job is resumed. Shards may be of any length, and nobody has to know it beforehand.
    """

    num_shards: int
    """Number of shards, the same for the whole life of a job.

    A job can use as many replicas as there are shards, and is balanced best if the shards are a
    multiple of the replicas, or many more.
    """

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard.

        The iterator may have the methods of `Seekable` and `Stateful`: they make a resumed job
        faster, and change nothing else. Without them, samples that were used are read again and
        dropped.

        Args:
            shard: Number of the shard, from 0.
            num_shards: Number of all shards; `self.num_shards`.
            epoch: Number of the pass over the data, from 0.
        """
        ...


@runtime_checkable
class Seekable(Protocol):
    """A shard that can pass over samples without reading them all."""

    def skip(self, num: int) -> None:
        """Passes over the next `num` samples; all of them exist."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A shard whose place can be saved."""

    def state_dict(self) -> Json:
        """Its place, after the sample that was read last: a small JSON value, and a copy."""
        ...

    def load_state_dict(self, state: Json) -> None:
        """Continues where a shard with the same arguments of `open` was.

        Called before the first sample is read.
        """
        ...


def is_stream(data: object) -> TypeGuard[Stream]:
    """Whether an object has what a stream needs."""
    return callable(getattr(data, "open", None)) and hasattr(data, "num_shards")
