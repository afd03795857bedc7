"""`Mixture`: several streams in exact proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal

from resilin.core import _validate
from resilin.streams.cursor import Cursor, check_shard, digest, fingerprint_of, open_cursor
from resilin.streams.protocol import Json, Stream

Stop = Literal["first", "all"]
"""When a shard of a mixture ends: with the first of its components, or with all of them."""


class Mixture:
    """Samples of several streams, in proportion to their weights.

    Nothing is drawn at random. In each shard, of the first n samples of a mixture of k streams,
    component i with share w_i of the weights has n * w_i, give or take at most
    `1 - 1 / (2 * k - 2)`: half a sample for two components, less than one for any number. So over
    all shards of an epoch the count of a component is off by less than one sample for each shard.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        weights: Sequence[int | float | Fraction],
        *,
        stop: Stop = "first",
    ) -> None:
        """Makes a stream; reads nothing.

        Args:
            streams: The components, all with the same number of shards.
            weights: A positive weight for each; they need not add up to 1. A float counts as the
                decimal number that it prints as.
            stop: `first`: a shard ends when it is the turn of a component that has no more samples
                in this shard; what the others have left is not used in this epoch. `all`: the
                others continue, in proportion to their weights.

        Raises:
            ValueError: The numbers of shards differ, or an argument is out of its range.
        """
        if not streams or len(streams) != len(weights):
            raise ValueError(
                f"weights ({len(weights)} of them) must be one for each stream "
                f"({len(streams)} of them), and at least one"
            )
        _validate.one_of("stop", stop, ("first", "all"))
        numbers = [stream.num_shards for stream in streams]
        if len(set(numbers)) > 1:
            raise ValueError(f"num_shards of the streams of a mixture ({numbers}) must be the same")
        self.num_shards = numbers[0]
        self._streams = tuple(streams)
        self._weights = _whole_weights(weights)
        self._stop = stop
        parts = [fingerprint_of(stream) for stream in streams]
        self.fingerprint = digest("mixture", parts, list(self._weights), stop)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard."""
        check_shard(self, shard, num_shards)
        parts = [open_cursor(stream, shard, num_shards, epoch) for stream in self._streams]
        kind = MixedShard if self._stop == "first" else DwindlingShard
        return kind(parts, self._weights)


class Turns:
    """Whose turn it is, in exact arithmetic.

    The chairman assignment of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics
    32 (1980): of the components that are not too far ahead of their share, the one takes its turn
    whose share would soonest be too far ahead of it. No other rule has a better bound.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Begins with the first turn.

        Args:
            weights: Positive whole numbers without a common divisor.
        """
        self._weights = weights
        self._total = sum(weights)
        # The inverse of each weight, times a number that makes it whole.
        multiple = math.lcm(*weights)
        self._inverse = [multiple // weight for weight in weights]
        self._slack = 2 * len(weights) - 2
        self.counts = [0] * len(weights)

    def next(self) -> int:
        """The component whose turn it is; `counts` does not count it yet."""
        if self._slack == 0:
            return 0
        turn = sum(self.counts) + 1
        chosen, soonest = -1, 0
        for i, (weight, count) in enumerate(zip(self._weights, self.counts, strict=True)):
            # How far its share is ahead of its count, in units of 1 / (slack * total).
            behind = self._slack * (weight * turn - count * self._total)
            if behind >= self._total:
                deadline = (self._total * (self._slack - 1) - behind) * self._inverse[i]
                if chosen < 0 or deadline < soonest:
                    chosen, soonest = i, deadline
        assert chosen >= 0, "the shares of all components add up to the number of turns"
        return chosen

    def go_to(self, turn: int) -> None:
        """Sets the counts to those after `turn` turns.

        They are exact after each `sum(weights)` turns, so no more turns than that are computed.

        Args:
            turn: Number of turns from the beginning.
        """
        rounds, rest = divmod(turn, self._total)
        self.counts = [0] * len(self._weights)
        for _ in range(rest):
            self.counts[self.next()] += 1
        self.counts = [
            count + rounds * weight
            for count, weight in zip(self.counts, self._weights, strict=True)
        ]


class DwindlingShard(Iterator[Any]):
    """A shard of a mixture that ends with the last of its components."""

    def __init__(self, parts: Sequence[Cursor], weights: Sequence[int]) -> None:
        """Begins with the first sample.

        Args:
            parts: The shard of each component, at its beginning.
            weights: A positive whole number for each.
        """
        self._parts = parts
        self._weights = weights
        self._left = list(range(len(parts)))
        self._turns = Turns(weights)

    def __next__(self) -> Any:
        while self._left:
            turn = self._turns.next()
            try:
                sample = next(self._parts[self._left[turn]])
            except StopIteration:
                self._end(turn)
            else:
                self._turns.counts[turn] += 1
                return sample
        raise StopIteration

    def _end(self, turn: int) -> None:
        """Leaves one component out; the proportions of the others begin again."""
        self._restart([i for i in self._left if i != self._left[turn]])

    def _restart(self, left: list[int]) -> None:
        self._left = left
        self._turns = Turns(_reduced([self._weights[i] for i in left]))

    def state_dict(self) -> Json:
        """The components left, their counts since another one has ended, and their places."""
        places = [self._parts[i].state_dict() for i in self._left]
        return [list(self._left), list(self._turns.counts), places]

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place.

        Args:
            state: What `state_dict` of the same shard returned.
        """
        left, counts, places = state
        self._restart(list(left))
        self._turns.counts = list(counts)
        for i, place in zip(left, places, strict=True):
            self._parts[i].load_state_dict(place)


class MixedShard(DwindlingShard):
    """A shard of a mixture that ends with the first of its components."""

    def _end(self, turn: int) -> None:
        self._left = []

    def skip(self, num: int) -> None:
        """Passes over samples by the `skip` of each component.

        Args:
            num: Number of samples; all of them exist, so that no component ends before them.
        """
        if num == 0:
            return
        self._turns.go_to(sum(self._turns.counts) + num)
        for part, count in zip(self._parts, self._turns.counts, strict=True):
            part.skip(count - part.num_read)


def _whole_weights(weights: Sequence[int | float | Fraction]) -> tuple[int, ...]:
    """Whole numbers in the same proportions.

    Raises:
        ValueError: A weight is not a positive number.
    """
    exact = []
    for weight in weights:
        _validate.real("a weight", weight, above=0)
        # 0.1 is meant to be a tenth, and not the binary number next to it.
        exact.append(
            Fraction(weight if isinstance(weight, Fraction | int) else repr(float(weight)))
        )
    common = math.lcm(*(weight.denominator for weight in exact))
    return _reduced([int(weight * common) for weight in exact])


def _reduced(weights: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)
