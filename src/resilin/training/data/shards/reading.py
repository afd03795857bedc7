"""Reads shards of a stream: in the workers of a DataLoader, or in the training process.

A ticket asks for samples of some shards by their numbers. Shards stay open between tickets, so that
a sample is read when its turn comes. One that was passed already is read again from the nearest
saved place, or from the beginning of its shard.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from resilin.core.shard_order import ShardOrder, sample_key
from resilin.streams.protocol import Json, Seekable, Stateful, Stream
from resilin.training.data.sampling import Reading, seed_globals
from resilin.training.data.shards.cursor import Bookmark
from resilin.training.state.randomness import Moved, preserved

logger = logging.getLogger("resilin")

BOOKMARK_EVERY = 256
"""Samples of a shard between two places that are saved."""
_SMALL = 65536
"""Largest tensor, in bytes, that a worker sends by value: shared memory costs more below it."""
_OF_NUMPY = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""Types of tensors that numpy has as well."""
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
    """Samples that one worker is asked for."""

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
    samples: list[Any]
    """The samples; those of a worker have to be unpacked."""
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


class ShardReader:
    """Reads samples of shards, each of which stays open.

    In a worker, a stream that draws from the global generators of Python, numpy or torch gets the
    same numbers for a sample whenever that is read. Seeding them takes as long as reading a small
    sample, so it begins with the first ticket in which something was drawn; that one is read again.

    Args:
        stream: The user's stream.
        order: Its order.
    """

    def __init__(self, stream: Stream, order: ShardOrder) -> None:
        self._stream = stream
        self._order = order
        self._epoch: int | None = None
        self._opened: dict[int, _Opened] = {}
        self._seeds = False
        self._reading = Reading()

    def read(self, ticket: ShardTicket) -> Read:
        """Reads what a ticket asks for."""
        if not ticket.asks:
            return Read(ticket.epoch, [], [], [], [])
        if ticket.epoch != self._epoch:
            self._epoch, self._opened = ticket.epoch, {}
        if get_worker_info() is None or self._seeds:
            return self._read_all(ticket)
        moved = Moved()
        answer = self._read_all(ticket)
        if not moved:
            return answer
        self._seeds = True
        for ask in ticket.asks:
            del self._opened[ask.shard]
        return self._read_all(ticket)

    def _read_all(self, ticket: ShardTicket) -> Read:
        answer = Read(ticket.epoch, [], [], [], [])
        with self._reading:
            try:
                for ask in ticket.asks:
                    self._read(ask, answer)
            except BaseException:
                # A generator that has raised looks as if its shard had ended.
                self._opened.pop(ask.shard, None)
                raise
        return answer

    def _read(self, ask: Ask, answer: Read) -> None:
        shard = ask.shard
        opened = self._opened.get(shard)
        if opened is None or opened.place > ask.indices[0]:
            opened = self._open(ask)
        for index in ask.indices:
            if index > opened.place:
                self._pass_over(opened, index, ask.given)
            found, sample = self._next(opened)
            if not found:
                answer.ends.append((shard, opened.place))
                return
            answer.places.append((shard, index))
            answer.samples.append(sample)
            if opened.stateful and opened.place % BOOKMARK_EVERY == 0:
                answer.bookmarks.append((shard, opened.place, opened.state()))

    def _next(self, opened: _Opened) -> tuple[bool, Any]:
        """Whether there is another sample, and that sample."""
        self._reading.begin((opened.key, opened.place))
        if self._seeds:
            seed_globals(sample_key(opened.key, opened.place))
        try:
            sample = next(opened.samples)
        except StopIteration:
            return False, None
        opened.place += 1
        return True, sample

    def _pass_over(self, opened: _Opened, index: int, given: int) -> None:
        """Moves towards a sample, as far as there are samples before it.

        Those from `given` on belong to other replicas, and may not exist.
        """
        known = min(index, given) - opened.place
        if known > 0:
            self._skip(opened, known)
        found = True
        while found and opened.place < index:
            found, _ = self._next(opened)

    def _open(self, ask: Ask) -> _Opened:
        assert self._epoch is not None
        first = ask.indices[0]
        num_shards, key = self._order.num_shards, self._order.key(self._epoch, ask.shard)
        if self._seeds:
            seed_globals(key)
        samples = iter(self._stream.open(ask.shard, num_shards, self._epoch))
        opened = _Opened(ask.shard, samples, key)
        if ask.bookmark is not None and opened.stateful and ask.bookmark[0] <= first:
            opened.resume(ask.bookmark)
        self._opened[ask.shard] = opened
        return opened

    def _skip(self, opened: _Opened, num: int) -> None:
        """Passes over samples that are known to exist."""
        if isinstance(opened.samples, Seekable):
            opened.samples.skip(num)
            opened.place += num
            return
        # In the training process the global generators are the user's, and this reading is no part
        # of what an undisturbed script would draw.
        with preserved() if get_worker_info() is None else nullcontext():
            self._read_again(opened, num)

    def _read_again(self, opened: _Opened, num: int) -> None:
        began = told = time.monotonic()
        for done in range(num):
            if time.monotonic() - told > _TELL_AFTER:
                told = time.monotonic()
                logger.info(
                    "shard %d: %d of %d samples that were used before are read again, after %.0f s",
                    *(opened.shard, done, num, told - began),
                )
            if not self._next(opened)[0]:
                raise ValueError(
                    f"shard {opened.shard} has ended after {opened.place} samples, and "
                    f"{opened.place + num - done} of it were used: a shard must have the same "
                    "samples whenever it is opened in one pass"
                )


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


class _Small(NamedTuple):
    """A tensor that is sent by value."""

    values: Any


def _packed(item: Any) -> Any:
    """Samples, with small tensors as what a queue sends by value."""
    if type(item) is Tensor:
        return _Small(item.numpy()) if _is_small(item) else item
    return _mapped(_packed, item)


def _is_small(tensor: Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    own = not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    return plain and own and tensor.nbytes <= _SMALL and tensor.dtype in _OF_NUMPY


def unpacked(item: Any) -> Any:
    """The inverse of what a worker has done to its samples."""
    if type(item) is _Small:
        return torch.from_numpy(item.values)
    return _mapped(unpacked, item)


def _mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """Containers whose items are mapped; others are left alone."""
    if type(item) is dict:
        return {key: function(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(map(function, item))
    return item
