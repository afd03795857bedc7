"""Reads shards of a stream: in the workers of a DataLoader, or in the training process.

A ticket asks for samples of some shards by their numbers. Shards stay open between tickets, so that
a sample is read when its turn comes. One that was passed already is read again from the nearest
saved place, or from the beginning of its shard.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from resilin.core.shard_order import ShardOrder, sample_key
from resilin.streams.protocol import Json, Seekable, Stateful, Stream
from resilin.training.data.sampling import fetching, seed_globals
from resilin.training.data.shard_cursor import Bookmark
from resilin.training.state.randomness import preserved

logger = logging.getLogger("resilin")

BOOKMARK_EVERY = 256
"""Samples of a shard between two places that are saved."""
_SMALL = 65536
"""Largest tensor, in bytes, that a worker sends by value: shared memory costs more below it."""
_TELL_AFTER = 10.0
"""Seconds of reading samples again, after which it is told, and between two tellings."""


class Ask(NamedTuple):
    """Samples of one shard."""

    shard: int
    """The shard."""
    indices: Sequence[int]
    """Numbers of the samples, ascending."""
    given: int
    """Samples that it is known to have, at least."""
    bookmark: Bookmark | None
    """A saved place before the first of them, if there is one."""


class ShardTicket(NamedTuple):
    """What one worker is asked for."""

    epoch: int
    """Number of the pass over the data."""
    worker: int
    """The worker that has the shards open."""
    asks: Sequence[Ask]
    """Samples by shard; may be none."""


class Read(NamedTuple):
    """The answer to a ticket."""

    epoch: int
    """Number of the pass over the data."""
    places: list[tuple[int, int]]
    """Shard and number of each sample."""
    samples: Any
    """The samples; packed as bytes if they come from a worker and are small."""
    ends: list[tuple[int, int]]
    """Shards whose end was met, with their lengths."""
    bookmarks: list[tuple[int, int, Json]]
    """Saved places of shards: shard, samples that it had given, state."""


class _Opened:
    """A shard that is being read."""

    def __init__(self, shard: int, samples: Iterator[Any], key: int) -> None:
        self.shard = shard
        self.samples = samples
        self.key = key
        self.place = 0
        """Number of the next sample."""
        self.stateful = isinstance(samples, Stateful)
        self._in_worker = get_worker_info() is not None

    def resume(self, bookmark: Bookmark) -> None:
        self.place = bookmark[0]
        assert isinstance(self.samples, Stateful)
        self.samples.load_state_dict(bookmark[1])

    def state(self) -> Json:
        assert isinstance(self.samples, Stateful)
        state = self.samples.state_dict()
        try:
            same = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(
                f"the state of shard {self.shard} must be a JSON value, with lists for tuples and "
                f"strings for keys, and is {state!r}"
            )
        return state

    def skip(self, num: int) -> None:
        """Passes over samples that are known to exist."""
        if isinstance(self.samples, Seekable):
            self.samples.skip(num)
            self.place += num
            return
        # In the training process the global generators are the user's, and this reading is no part
        # of what an undisturbed script would draw.
        with nullcontext() if self._in_worker else preserved():
            self._read_again(num)

    def _read_again(self, num: int) -> None:
        began = told = time.monotonic()
        for done in range(num):
            if time.monotonic() - told > _TELL_AFTER:
                told = time.monotonic()
                logger.info(
                    "shard %d: %d of %d samples that were used before are read again, after %.0f s",
                    *(self.shard, done, num, told - began),
                )
            if not self.read()[0]:
                raise ValueError(
                    f"shard {self.shard} has ended after {self.place} samples, and "
                    f"{self.place + num - done} of it were used: a shard must have the same "
                    "samples whenever it is opened in one pass"
                )

    def read(self) -> tuple[bool, Any]:
        """Whether there is another sample, and that sample."""
        key = sample_key(self.key, self.place)
        if self._in_worker:
            seed_globals(key)
        with fetching(key):
            try:
                sample = next(self.samples)
            except StopIteration:
                return False, None
        self.place += 1
        return True, sample


class ShardReader:
    """Reads samples of shards, each of which stays open.

    Args:
        stream: The user's stream.
        order: Its order.
    """

    def __init__(self, stream: Stream, order: ShardOrder) -> None:
        self._stream = stream
        self._order = order
        self._epoch: int | None = None
        self._opened: dict[int, _Opened] = {}

    def read(self, ticket: ShardTicket) -> Read:
        """Reads what a ticket asks for."""
        if ticket.asks and ticket.epoch != self._epoch:
            self._epoch, self._opened = ticket.epoch, {}
        answer = Read(ticket.epoch, [], [], [], [])
        for ask in ticket.asks:
            self._read(ask, answer)
        return answer

    def _read(self, ask: Ask, answer: Read) -> None:
        opened = self._open(ask)
        for index in ask.indices:
            known = min(index, ask.given) - opened.place
            if known > 0:
                opened.skip(known)
            while opened.place <= index:
                found, sample = opened.read()
                if not found:
                    answer.ends.append((ask.shard, opened.place))
                    return
                if opened.place > index:
                    answer.places.append((ask.shard, index))
                    answer.samples.append(sample)
                if opened.stateful and opened.place % BOOKMARK_EVERY == 0:
                    answer.bookmarks.append((ask.shard, opened.place, opened.state()))

    def _open(self, ask: Ask) -> _Opened:
        assert self._epoch is not None
        opened = self._opened.get(ask.shard)
        first = ask.indices[0]
        if opened is not None and opened.place <= first:
            return opened
        num_shards = self._order.num_shards
        samples = iter(self._stream.open(ask.shard, num_shards, self._epoch))
        opened = _Opened(ask.shard, samples, self._order.key(self._epoch, ask.shard))
        if ask.bookmark is not None and opened.stateful and ask.bookmark[0] <= first:
            opened.resume(ask.bookmark)
        self._opened[ask.shard] = opened
        return opened


class ShardDataset(Dataset[Read]):
    """A stream, read by tickets. Runs in the workers.

    Args:
        stream: The user's stream.
        order: Its order.
    """

    def __init__(self, stream: Stream, order: ShardOrder) -> None:
        self._reader = ShardReader(stream, order)

    def __getitem__(self, ticket: ShardTicket) -> Read:
        worker = get_worker_info()
        assert worker is None or worker.id == ticket.worker, (worker, ticket.worker)
        read = self._reader.read(ticket)
        if worker is None:
            return read
        return read._replace(samples=_packed(read.samples))


class _TooLarge(Exception):
    pass


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        if obj.nbytes > _SMALL or obj.device.type != "cpu" or obj.layout is not torch.strided:
            raise _TooLarge
        if obj.requires_grad or obj.dtype is torch.bfloat16 or obj.is_conj() or obj.is_neg():
            raise _TooLarge
        return torch.from_numpy, (obj.numpy(),)


def _packed(samples: list[Any]) -> Any:
    """Samples as bytes, if all their tensors are small."""
    data = BytesIO()
    try:
        _Pickler(data, protocol=5).dump(samples)
    except _TooLarge:
        return samples
    return data.getvalue()


def unpacked(samples: Any) -> list[Any]:
    """The inverse of what a worker has done to its samples."""
    found: list[Any] = pickle.loads(samples) if isinstance(samples, bytes) else samples
    return found
