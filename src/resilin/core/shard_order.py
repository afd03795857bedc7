"""The order of a stream: shards take turns, whatever their lengths, which nobody knows before.

In each round every shard that has one gives its next sample. Shards sit in seats, and a round goes
over the seats. When it is the turn of a shard that has ended, the shard in the last seat moves to
the empty seat, and gives its sample of this round from there. So the order depends on the seats at
the beginning of the epoch, which the seed determines, and on the lengths; and on neither the number
of replicas nor the size of batches. An end changes the seat of at most one shard.

All state is the position and the lengths of the shards that have ended.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from resilin.core import _validate
from resilin.core.stream import SampleStream, saved_cursor

UNKNOWN = 2**62
"""Length of a shard whose end nobody has met."""
_MAX_SHARDS = 2**24
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNEVEN = 1.25
"""Largest share of a replica, over the mean, at which whole shards belong to one replica each."""

Lengths = NDArray[np.int64]
"""Lengths of all shards, `UNKNOWN` where nobody has met the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Samples that follow each other in the order."""

    shards: NDArray[np.int64]
    """The shard of each."""
    indices: NDArray[np.int64]
    """Its number within the shard, from 0."""
    owners: NDArray[np.int64]
    """The replica that reads it."""

    def __len__(self) -> int:
        return len(self.shards)

    def of(self, replica: int) -> list[tuple[int, int]]:
        """Shard and number of each sample that one replica reads, in order."""
        mine = self.owners == replica
        return list(zip(self.shards[mine].tolist(), self.indices[mine].tolist(), strict=True))

    def shares(self, replicas: int) -> tuple[int, ...]:
        """Number of samples of each replica."""
        return tuple(np.bincount(self.owners, minlength=replicas).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A place in the order of one epoch."""

    seats: NDArray[np.int64]
    """The shards that have not given up their seats."""
    position: int = 0
    """Samples before this place."""
    round: int = 0
    """Samples that each of these shards gave in earlier rounds."""
    seat: int = 0
    """The seat whose turn it is in this round."""

    def take(self, num: int, lengths: Lengths, replicas: int = 1) -> tuple[Taken, Turn]:
        """The next samples, and the place after them.

        Where a length is unknown, the shard is taken to have a sample. There are fewer samples than
        asked for at the end of the epoch alone.

        Args:
            num: Number of samples.
            lengths: Lengths of all shards, as far as they are known.
            replicas: Number of replicas.
        """
        pieces: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

        def emit(turn: Turn, count: int) -> None:
            seats = np.arange(turn.seat, turn.seat + count, dtype=np.int64)
            if turn.seat + count <= len(turn.seats):
                # A copy: a later end in the same walk changes the seats.
                shards = turn.seats[turn.seat : turn.seat + count].copy()
                indices = np.full(count, turn.round, dtype=np.int64)
            else:
                rounds, seats = np.divmod(seats, len(turn.seats))
                shards, indices = turn.seats[seats], turn.round + rounds
            if _by_seats(len(turn.seats), replicas):
                owners = seats % replicas
            else:
                places = np.arange(turn.position, turn.position + count, dtype=np.int64)
                owners = places % replicas
            pieces.append((shards, indices, owners))

        after = self._walk(num, lengths, emit)
        if not pieces:
            none = np.empty(0, dtype=np.int64)
            return Taken(none, none, none), after
        if len(pieces) == 1:
            return Taken(*pieces[0]), after
        shards, indices, owners = (np.concatenate(part) for part in zip(*pieces, strict=True))
        return Taken(shards, indices, owners), after

    def skip(self, num: int, lengths: Lengths) -> Turn:
        """The place after the next `num` samples, without saying which they are."""
        return self._walk(num, lengths, lambda turn, count: None)

    def is_end(self, lengths: Lengths) -> bool:
        """Whether no sample follows, as far as lengths are known."""
        if len(self.seats) and lengths[self.seats[self.seat]] > self.round:
            return False  # the one that is asked for most often
        return self._walk(1, lengths, lambda turn, count: None).position == self.position

    def given(self, shard: int) -> int:
        """Samples before this place that a shard has given; it has not ended before."""
        places = np.flatnonzero(self.seats == shard)
        return self.round + bool(len(places) and places[0] < self.seat)

    def _walk(self, num: int, lengths: Lengths, emit: Any) -> Turn:
        seats, position, number, seat = self.seats, self.position, self.round, self.seat
        own = False
        while num and len(seats):
            over = np.flatnonzero(lengths[seats[seat : seat + num]] <= number)
            count = int(over[0]) if len(over) else min(num, len(seats) - seat)
            if not len(over) and seat == 0 and count == len(seats):
                # Whole rounds at once, up to the first in which a shard is known to end.
                clear = int(lengths[seats].min()) - number
                count = min(num // count, clear) * count
            if count:
                emit(Turn(seats, position, number, seat), count)
                num, position = num - count, position + count
                rounds, seat = divmod(seat + count, len(seats))
                number += rounds
            if len(over):
                if not own:
                    seats, own = seats.copy(), True
                seats[seat] = seats[-1]
                seats = seats[:-1]
                if seat == len(seats):
                    seat, number = 0, number + 1
        return Turn(seats, position, number, seat)


def _by_seats(seats: int, replicas: int) -> bool:
    """Whether each shard belongs to one replica, and not each sample.

    Shards that cannot be divided about evenly are read by several replicas, each of which takes
    every so-manieth sample: reading more than once costs less than replicas that wait. At the end
    of an epoch, where few shards are left, it is always so.
    """
    return -(-seats // replicas) * replicas <= _UNEVEN * seats


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """An endless, seeded order of the samples of a stream, independent of the world size.

    Examples:
        >>> order = ShardOrder(3)
        >>> lengths = order.unknown()
        >>> lengths[0] = 1
        >>> taken, turn = order.begin(0).take(5, lengths)
        >>> list(zip(taken.shards.tolist(), taken.indices.tolist()))
        [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1)]
    """

    VERSION: ClassVar[int] = 1
    """Version of the order. The same state under the same version gives the same samples."""

    num_shards: int
    """Number of shards."""
    seed: int = 0
    """Seed of the order of the shards; in [0, 2^64)."""
    shuffle: bool = False
    """Whether the shards have other seats in each epoch; the order within a shard is its own."""
    fingerprint: str = ""
    """Identity of the data; a saved state is rejected for others."""

    def __post_init__(self) -> None:
        if _validate.whole("num_shards", self.num_shards, at_least=1) > _MAX_SHARDS:
            raise ValueError(f"num_shards ({self.num_shards}) must be at most 2^24")
        self._seats()

    def _seats(self) -> SampleStream:
        return SampleStream(self.num_shards, seed=self.seed, shuffle=self.shuffle)

    def begin(self, epoch: int) -> Turn:
        """The beginning of an epoch."""
        first = epoch * self.num_shards
        return Turn(self._seats().indices(range(first, first + self.num_shards)))

    def unknown(self) -> Lengths:
        """Lengths of which none is known."""
        return np.full(self.num_shards, UNKNOWN, dtype=np.int64)

    def key(self, epoch: int, shard: int) -> int:
        """The seed of a shard in one epoch, for `sample_key`."""
        place = epoch * self.num_shards + shard
        return int(self._seats().keys(range(place, place + 1))[0])

    def identity(self) -> dict[str, Any]:
        """All that a saved state must have been made with; JSON-compatible."""
        return {
            "version": self.VERSION,
            "num_shards": self.num_shards,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def state(self, cursor: int) -> dict[str, Any]:
        """Identity and position, for a checkpoint; JSON-compatible."""
        return {**self.identity(), "cursor": _validate.whole("cursor", cursor, at_least=0)}

    def resume(self, state: Mapping[str, Any]) -> int:
        """Returns the position of a saved state.

        Raises:
            ValueError: The state belongs to another order or other data. The message names all
                differences.
        """
        return saved_cursor(self.identity(), state)


def sample_key(shard_key: int, index: int) -> int:
    """The random seed of one sample of a shard, by its number.

    In Python's numbers, one sample at a time: shards are read so.
    """
    x = (shard_key + (index + 1) * _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def pack_lengths(lengths: Lengths) -> str:
    """Lengths as text, a few bytes for a shard that has ended, and next to none for others."""
    known = np.where(lengths == UNKNOWN, -1, lengths)
    # Differences of neighbours, byte by byte: equal lengths, and high bytes, take no room.
    steps = np.diff(known, prepend=np.int64(-1)).astype("<i8")
    planes = np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 8).T)
    return base64.b64encode(zlib.compress(planes.tobytes(), 9)).decode()


def unpack_lengths(text: str, num_shards: int) -> Lengths:
    """The inverse of `pack_lengths`.

    Raises:
        ValueError: The text is not that of so many shards.
    """
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), 8 * num_shards + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"the saved lengths of shards cannot be read: {error}") from None
    if len(raw) != 8 * num_shards:
        raise ValueError(
            f"the saved lengths of shards have {len(raw)} bytes, and {num_shards} shards have "
            f"{8 * num_shards}"
        )
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(8, -1)
    known = np.cumsum(np.ascontiguousarray(planes.T).view("<i8").ravel()) - 1
    if (known < -1).any():
        raise ValueError("the saved lengths of shards must be at least 0")
    return np.where(known < 0, UNKNOWN, known).astype(np.int64)
