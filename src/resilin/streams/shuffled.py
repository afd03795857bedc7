"""`Shuffled`: a seeded shuffle within each shard, with nothing but positions in its state.

A shuffle buffer of the usual kind holds samples that were drawn at random over the whole past, so a
resumed job must save them, lose them, or read everything again. Here the shard is cut into blocks,
and the samples of a block change places; then it is cut again, half a block further, and the same
is done once more. So a sample can leave its block, and which samples are in a block is known by
position: a resumed shard reads again two blocks at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from resilin.core import _validate
from resilin.streams.cursor import (
    Cursor,
    check_shard,
    digest,
    fingerprint_of,
    open_cursor,
    permutation,
)
from resilin.streams.protocol import Json, Stream


class Shuffled:
    """The samples of a stream, shuffled within each shard.

    A sample moves by fewer than `2 * buffer_size` positions in its shard, in either direction. In
    memory are at most one and a half times `buffer_size` samples for each open shard. Samples do
    not move to another shard: to mix files, shuffle them in the source (`FileStream`).
    """

    def __init__(self, stream: Stream, buffer_size: int, seed: int = 0) -> None:
        """Makes a stream; reads nothing.

        Args:
            stream: The source.
            buffer_size: Number of samples in a block.
            seed: Seed of the order. Each shard and each epoch has an order of its own.

        Raises:
            ValueError: An argument is out of its range.
        """
        self._stream = stream
        self._size = _validate.whole("buffer_size", buffer_size, at_least=1)
        self._seed = _validate.whole("seed", seed, at_least=0)
        self.num_shards = stream.num_shards
        self.fingerprint = digest("shuffled", fingerprint_of(stream), self._size, self._seed)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard."""
        check_shard(self, shard, num_shards)
        source = open_cursor(self._stream, shard, num_shards, epoch)
        return ShuffledShard(source, self._size, ("shuffled", self._seed, epoch, shard))


class ShuffledShard(Iterator[Any]):
    """The samples of one shard in blocks that are shuffled twice.

    Inner block i has samples `i * size` to `(i + 1) * size` of the source. Outer block i has the
    second part of inner block i - 1 and the first part of inner block i, each shuffled.
    """

    def __init__(self, source: Cursor, size: int, key: tuple[Json, ...]) -> None:
        """Begins before the first block.

        Args:
            source: The shard of the source, at its beginning.
            size: Number of samples in a block.
            key: Identifies the order of this shard.
        """
        self._source = source
        self._size = size
        self._half = (size + 1) // 2
        self._key = key
        self._num_blocks = 0  # Outer blocks made; the last of them is being given out.
        self._block: list[Any] = []
        self._num_given = 0  # Of that block.
        self._kept: list[Any] = []  # The second part of the last inner block.
        # Places of the source before the last two inner blocks: where to begin again.
        self._place = self._place_before = source.state_dict()

    def __next__(self) -> Any:
        if self._num_given == len(self._block):
            self._advance()
            if not self._block:
                raise StopIteration
        sample = self._block[self._num_given]
        self._num_given += 1
        return sample

    def skip(self, num: int) -> None:
        """Passes over samples, and over whole blocks by the `skip` of the source.

        Args:
            num: Number of samples; all of them exist.
        """
        if num <= len(self._block) - self._num_given:
            self._num_given += num
            return
        # Outer block 0 has half the size.
        missing = self._size - self._half
        begin = max(0, (self._num_blocks - 1) * self._size - missing)
        block, given = divmod(begin + self._num_given + num + missing, self._size)
        given -= 0 if block else missing
        if block > self._num_blocks:
            self._source.skip((block - 1) * self._size - self._source.num_read)
            self._begin_at(block)
        self._advance()
        self._num_given = given

    def state_dict(self) -> Json:
        """Outer block, samples given of it, and the place of the source at which to begin again."""
        if self._num_given == len(self._block):
            return [self._num_blocks, 0, self._place]
        return [self._num_blocks - 1, self._num_given, self._place_before]

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place; reads the samples of up to two blocks.

        Args:
            state: What `state_dict` of the same shard returned.
        """
        block, given, place = state
        self._source.load_state_dict(place)
        self._begin_at(block)
        if given:
            self._advance()
            self._num_given = given

    def _begin_at(self, block: int) -> None:
        """Continues before an outer block; the source is before inner block `block - 1`."""
        self._place = self._place_before = self._source.state_dict()
        self._num_blocks, self._block, self._num_given = block, [], 0
        self._kept = self._inner(block - 1)[self._half :] if block else []

    def _advance(self) -> None:
        """Makes the next outer block; it is empty after the last one."""
        place = self._source.state_dict()
        inner = self._inner(self._num_blocks)
        block = self._kept + inner[: self._half]
        if block:
            self._place_before, self._place = self._place, place
            self._kept = inner[self._half :]
            self._num_blocks += 1
        order = permutation(len(block), *self._key, "outer", self._num_blocks)
        self._block, self._num_given = [block[i] for i in order.tolist()], 0

    def _inner(self, block: int) -> list[Any]:
        """Reads and shuffles an inner block; it is shorter, or empty, at the end of the shard."""
        samples = list(islice(self._source, self._size))
        order = permutation(len(samples), *self._key, "inner", block)
        return [samples[i] for i in order.tolist()]
