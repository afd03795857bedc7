"""The sample stream: an endless, seeded order of samples, independent of the world size.

All data state is `(seed, cursor)`. The order of an epoch is computed, not stored (except for a
small table below 65,537 samples): the cost of a slice of 10^10 samples depends on its length only.
The permutation is implemented here, down to the hash, because a resumed run must see the same order
after any upgrade of numpy or torch; its `VERSION` is part of the saved state, and a change of the
order must raise it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from resilin.core import _validate

Tail = Literal["short", "straddle", "drop"]
"""Treatment of the last, incomplete batch of an epoch.

`short`: it is a smaller batch. `straddle`: it is filled from the next epoch, each sample still
once per epoch. `drop`: it is dropped, once for the whole epoch.
"""
TAILS: tuple[Tail, ...] = ("short", "straddle", "drop")
"""The names of all tails."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLES = 0x5A3F1C8E6B2D9047
"""Separates the seeds of samples from the keys of the order."""
_HALF = np.uint64(32)
_ROUNDS = 8
_MAX_SAMPLES = 2**48
"""Keeps both sides of the grid below 2^25, so that 32 bits of hash shift them evenly."""
_TABLE_LIMIT = 65536
"""Up to this many samples, sorting a table of hashes is faster than computing each index."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit words that leaves no visible pattern."""
    x = x + np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@lru_cache(maxsize=4)
def _sample_seed(seed: int) -> NDArray[np.uint64]:
    """The seed of all samples' seeds, in one element."""
    return _mix(np.full(1, seed, dtype=np.uint64) ^ np.uint64(_SAMPLES))


@lru_cache(maxsize=4)
def _keys(seed: int, epoch: int, n: int) -> NDArray[np.uint64]:
    """The round keys of one epoch's permutation. Cached for the whole epoch."""
    key: NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)
    for word in (seed, epoch, n):
        key = _mix(key ^ np.uint64(word))
    return _mix(np.arange(_ROUNDS, dtype=np.uint64) ^ key)


@lru_cache(maxsize=4)
def _table(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """The whole permutation of a small epoch. Cached: it is used in every step."""
    keys = _mix(np.arange(n, dtype=np.uint64) ^ _keys(seed, epoch, n)[0])
    table = np.argsort(keys, kind="stable").astype(np.int64)
    table.flags.writeable = False
    return table


def _feistel(x: NDArray[np.int64], seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Computes the images of `x` under the permutation of a large epoch.

    A Feistel network over an a x b grid of at least n cells, with modular addition in place of
    xor so that a and b need not be powers of two. Cells outside n are walked through the network
    again until they land inside; fewer than one in sqrt(n) has to.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    rows, columns = np.uint64(a), np.uint64(b)

    def shift(moved: NDArray[np.uint64], by: NDArray[np.uint64], size: np.uint64) -> None:
        # The top 32 bits of the hash, as a fraction of `size`: a product instead of a division.
        by >>= _HALF
        by *= size
        by >>= _HALF
        moved += by
        np.subtract(moved, size, out=moved, where=moved >= size)

    def once(cell: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row: NDArray[np.uint64] = cell // columns
        column: NDArray[np.uint64] = cell - row * columns
        for i, key in enumerate(_keys(seed, epoch, n)):
            if i % 2 == 0:
                shift(row, _mix(column ^ key), rows)
            else:
                shift(column, _mix(row ^ key), columns)
        row *= columns
        row += column
        return row

    cells = once(x.astype(np.uint64))
    outside = np.flatnonzero(cells >= n)
    while len(outside):
        cells[outside] = once(cells[outside])
        outside = outside[cells[outside] >= n]
    return cells.astype(np.int64)


@dataclass(frozen=True, slots=True)
class SampleStream:
    """An endless, seeded, world-size-independent order of samples.

    Position p of the stream is sample `order(p % num_samples)` of epoch `p // num_samples`.
    The stream itself has no position: the cursor is one integer that the caller keeps.

    Examples:
        >>> stream = SampleStream(10, seed=7)
        >>> sorted(int(i) for i in stream.indices(range(10)))
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    VERSION: ClassVar[int] = 1
    """Version of the order. The same state under the same version gives the same samples."""

    num_samples: int
    """Samples in one epoch."""
    seed: int = 0
    """Seed of the order; in [0, 2^64)."""
    shuffle: bool = True
    """False keeps the order of the dataset."""
    fingerprint: str = ""
    """Identity of the dataset; a saved cursor is rejected for another one."""

    def __post_init__(self) -> None:
        if _validate.whole("num_samples", self.num_samples, at_least=1) > _MAX_SAMPLES:
            raise ValueError(f"num_samples ({self.num_samples}) must be at most 2^48")
        if _validate.whole("seed", self.seed, at_least=0) > _MASK:
            raise ValueError(f"seed ({self.seed}) must be below 2^64")

    def indices(self, positions: range) -> NDArray[np.int64]:
        """Samples at these positions, in order. Time and memory are proportional to their number.

        Args:
            positions: Ascending positions, as from `Ownership.positions`. They may cross epochs.
        """
        if positions.step < 1 or positions.start < 0:
            raise ValueError(f"positions ({positions}) must ascend and start at 0 or later")
        if not len(positions):
            return np.empty(0, dtype=np.int64)
        pieces = []
        while len(positions):
            epoch, first = divmod(positions[0], self.num_samples)
            count = -(-(self.num_samples - first) // positions.step)
            here, positions = positions[:count], positions[count:]
            offsets = first + positions.step * np.arange(len(here), dtype=np.int64)
            pieces.append(self._order(epoch, offsets))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def keys(self, positions: range) -> NDArray[np.uint64]:
        """Random seeds of the samples at these positions, which depend only on seed and position.

        Args:
            positions: Ascending positions, as for `indices`.
        """
        places = np.arange(positions.start, positions.stop, positions.step, dtype=np.uint64)
        return _mix(places ^ _sample_seed(self.seed))

    def _order(self, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.shuffle:
            return offsets
        if self.num_samples <= _TABLE_LIMIT:
            return _table(self.seed, epoch, self.num_samples)[offsets]
        return _feistel(offsets, self.seed, epoch, self.num_samples)

    def batch(self, cursor: int, batch_size: int, *, tail: Tail = "short") -> range:
        """The positions of the next step: `[start, stop)`, at most `batch_size` of them.

        `start` is the cursor, except that `drop` skips the remainder of an epoch that is too short
        for a whole batch. The cursor after the step is `stop`.

        Raises:
            ValueError: `drop` with a batch larger than the dataset would drop every sample.
        """
        _validate.whole("cursor", cursor, at_least=0)
        _validate.whole("batch_size", batch_size, at_least=1)
        _validate.one_of("tail", tail, TAILS)
        left = self.num_samples - cursor % self.num_samples
        if tail == "straddle" or batch_size <= left:
            return range(cursor, cursor + batch_size)
        if tail == "short":
            return range(cursor, cursor + left)
        if batch_size > self.num_samples:
            raise ValueError(
                f"batch_size ({batch_size}) exceeds num_samples ({self.num_samples}): "
                "dropping the last batch would drop every sample"
            )
        return range(cursor + left, cursor + left + batch_size)

    def reference_steps(self, cursor: int, reference: int, *, tail: Tail = "short") -> float:
        """Number of steps that the reference run had made at this cursor.

        Reference steps and samples are proportional within an epoch, whatever the actual batches of
        the epoch, and agree with `len(loader)` of the reference run at its end: a short last batch
        counts as a whole step, as in any PyTorch loop.

        Args:
            cursor: A position in the stream.
            reference: The reference batch size.
            tail: Treatment of the last batch of an epoch in the reference run.
        """
        epoch, offset = divmod(_validate.whole("cursor", cursor, at_least=0), self.num_samples)
        per_epoch = self.steps_per_epoch(reference, tail=tail)
        if tail == "drop":
            return epoch * per_epoch + min(offset / reference, per_epoch)
        return epoch * per_epoch + offset * per_epoch / self.num_samples

    def steps_per_epoch(self, batch_size: int, *, tail: Tail = "short") -> float:
        """Steps in one epoch at a fixed batch size; not a whole number if batches straddle."""
        _validate.whole("batch_size", batch_size, at_least=1)
        _validate.one_of("tail", tail, TAILS)
        if tail == "straddle":
            return self.num_samples / batch_size
        if tail == "drop":
            return self.num_samples // batch_size
        return -(-self.num_samples // batch_size)

    def state(self, cursor: int) -> dict[str, Any]:
        """The whole data state, for a checkpoint; JSON-compatible."""
        return {**self._identity(), "cursor": _validate.whole("cursor", cursor, at_least=0)}

    def resume(self, state: Mapping[str, Any]) -> int:
        """Returns the cursor of a saved state.

        Raises:
            ValueError: The state belongs to another order or dataset; resuming would repeat and
                skip samples. The message names all differences.
        """
        return saved_cursor(self._identity(), state)

    def _identity(self) -> dict[str, Any]:
        return {
            "version": self.VERSION,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }


def saved_cursor(identity: Mapping[str, Any], state: Mapping[str, Any]) -> int:
    """The cursor of a saved state, if that is one of the same order.

    Args:
        identity: All that a state must have been made with.
        state: A saved state: an identity, and a cursor.

    Raises:
        ValueError: The state was made with something else. The message names all differences.
    """
    missing = [name for name in (*identity, "cursor") if name not in state]
    if missing:
        raise ValueError(f"the saved stream state lacks {', '.join(missing)}")
    differing = [
        f"{name} was {state[name]!r} and is {value!r}"
        for name, value in identity.items()
        if state[name] != value
    ]
    if differing:
        raise ValueError(
            "the saved cursor belongs to another sample stream: " + "; ".join(differing)
        )
    return _validate.whole("cursor", state["cursor"], at_least=0)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Assignment of the positions of the stream to replicas, during one generation.

    Replica r owns the positions congruent to `base + r` modulo `replicas`. This does not depend on
    the batch size, so changing the size does not invalidate prefetched samples. Over any span of
    positions the replicas' counts differ by at most one, as in a plan of equal replicas.
    """

    base: int
    """The cursor at which this generation began: every earlier position is committed."""
    replicas: int
    """Data-parallel members of this generation."""

    def __post_init__(self) -> None:
        _validate.whole("base", self.base, at_least=0)
        _validate.whole("replicas", self.replicas, at_least=1)

    def slot(self, replica: int, cursor: int) -> int:
        """This replica's place in the plan of the step that starts at `cursor`.

        The owner of the first position takes place 0. Places rotate from step to step if the batch
        is not divisible, so that no replica always has the additional sample.
        """
        if not 0 <= replica < self.replicas:
            raise ValueError(f"replica ({replica}) must be in [0, {self.replicas})")
        if cursor < self.base:
            raise ValueError(f"cursor ({cursor}) must be at least base ({self.base})")
        return (replica - (cursor - self.base)) % self.replicas

    def positions(self, replica: int, span: range) -> range:
        """The positions in `span` that this replica owns, in order."""
        if span.step != 1:
            raise ValueError(f"span ({span}) must be contiguous")
        return range(span.start + self.slot(replica, span.start), span.stop, self.replicas)
