"""`History`: one number over a whole run, in bounded memory.

Time is divided into intervals of equal length, each with the mean of its values. When there are too
many, the length doubles and neighbours are merged: detail decreases as the run gets longer, and no
past value has to be kept.
"""

from __future__ import annotations

import math

MOST = 240
"""Largest number of intervals: more than the columns of a terminal."""
SHORTEST = 0.25
"""Initial length of an interval, in seconds."""
LONGEST = 1e10
"""Seconds that no run takes: a time further from the first one is an error in the log."""


class History:
    """The mean of a number in each interval of a run."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._length = SHORTEST
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, time: float, value: float | None) -> None:
        """Add a value. None and non-finite values are ignored."""
        began = time if self._began is None else self._began
        if value is None or not math.isfinite(value) or not abs(time - began) < LONGEST:
            return
        self._began = began
        # A time before the first one, from a clock that was set back, counts as the first.
        place = max(0.0, time - began) / self._length
        while place >= MOST:
            self._halve()
            place /= 2
        index = int(place)
        missing = index + 1 - len(self._sums)
        self._sums += [0.0] * missing
        self._counts += [0] * missing
        self._sums[index] += value
        self._counts[index] += 1

    def _halve(self) -> None:
        self._length *= 2
        odd = len(self._sums) % 2
        sums, counts = self._sums + [0.0] * odd, self._counts + [0] * odd
        self._sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        self._counts = [a + b for a, b in zip(counts[::2], counts[1::2], strict=True)]

    def means(self, width: int) -> list[float]:
        """The history in `width` values; empty if nothing was added.

        An interval without values repeats the one before it.
        """
        values: list[float] = []
        num = len(self._sums)
        for column in range(width if num else 0):
            first = column * num // width
            last = max(first + 1, (column + 1) * num // width)
            count = sum(self._counts[first:last])
            # The first interval always has a value.
            values.append(sum(self._sums[first:last]) / count if count else values[-1])
        return values
