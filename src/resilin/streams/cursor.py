"""The place in a shard: how streams that are made of other streams read, pass over and resume them.

A stream of a stream, such as `Shuffled`, never saves a sample. It saves the place of its source at
which it has to begin to read again, and how far it was from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resilin.core.stream import SampleStream
from resilin.streams.protocol import Json, Seekable, Stateful, Stream

_END = object()


class Cursor(Iterator[Any]):
    """A shard with a place, whatever the shard itself can do.

    The place is the number of samples read, and the state of the shard if it has one. A cursor
    returns to a place by the state, else by `skip`, else by reading the samples again.
    """

    def __init__(self, shard: Iterator[Any]) -> None:
        """Wraps an open shard.

        Args:
            shard: What `open` of a stream returned, or any other iterator; nothing was read yet.
        """
        self._shard = shard
        self._seekable = shard if isinstance(shard, Seekable) else None
        self._stateful = shard if isinstance(shard, Stateful) else None
        self.num_read = 0

    def __next__(self) -> Any:
        sample = next(self._shard)
        self.num_read += 1
        return sample

    def skip(self, num: int) -> None:
        """Passes over samples.

        Args:
            num: Number of samples; all of them exist.

        Raises:
            ValueError: The shard has ended before.
        """
        if num and self._seekable is not None:
            self._seekable.skip(num)
        else:
            for passed in range(num):
                if next(self._shard, _END) is _END:
                    raise ValueError(
                        f"a shard has {self.num_read + passed} samples, of which "
                        f"{self.num_read + num} were read before: its data has changed"
                    )
        self.num_read += num

    def state_dict(self) -> Json:
        """The place: the number of samples read, and the state of the shard or None."""
        return [self.num_read, None if self._stateful is None else self._stateful.state_dict()]

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place.

        Args:
            state: What `state_dict` of a cursor over the same shard returned.
        """
        num_read, of_shard = state
        if of_shard is None or self._stateful is None:
            self.skip(num_read)
        else:
            self._stateful.load_state_dict(of_shard)
            self.num_read = num_read


def open_cursor(stream: Stream, shard: int, num_shards: int, epoch: int) -> Cursor:
    """A cursor at the beginning of a shard; the arguments are those of `Stream.open`."""
    return Cursor(stream.open(shard, num_shards, epoch))


def check_shard(stream: Stream, shard: int, num_shards: int) -> None:
    """Check the arguments of `open`.

    Raises:
        ValueError: The stream has another number of shards, or no shard of this number.
    """
    if num_shards != stream.num_shards:
        raise ValueError(
            f"num_shards ({num_shards}) must be that of the stream ({stream.num_shards})"
        )
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard ({shard}) must be at least 0 and below num_shards ({num_shards})")


def digest(*parts: Json) -> str:
    """A short text that identifies JSON values, the same in every process and version."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint_of(stream: Stream) -> str:
    """The fingerprint of a stream; empty if it has none."""
    return str(getattr(stream, "fingerprint", None) or "")


def permutation(num: int, *key: Json) -> NDArray[np.int64]:
    """A seeded permutation of `num` places, the same after any upgrade of numpy.

    Args:
        num: Number of places.
        key: JSON values; each key has a permutation of its own.
    """
    if num == 0:
        return np.zeros(0, dtype=np.int64)
    seed = int(digest(*key)[:16], 16)
    return SampleStream(num, seed=seed).indices(range(num))
