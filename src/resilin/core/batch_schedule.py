"""Batch schedules as recipes of language models write them: `0:768 250B:1536 500B:3072`.

Each entry is a position and the global batch size, in samples, from there on. Positions are tokens,
or samples, that were used since the beginning, exactly as the clock counts them; so the sizes
depend on neither the number of replicas nor restarts, and there is no state but the clock.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from resilin.core import _validate
from resilin.core.clock import Clock

Counted = Literal["tokens", "samples"]
"""Units of the positions in a batch schedule."""
COUNTED: tuple[Counted, ...] = ("tokens", "samples")
"""The names of all these units."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*):(\d+)", re.ASCII)
_MOST = 2**53
"""Largest position: above it, a clock of 64-bit floats cannot count single tokens."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch size by the tokens, or samples, that were used so far.

    A size holds from the first step on that begins at or after its position.

    Examples:
        >>> schedule = BatchSchedule.parse("0:768 250B:1536 500B:3072")
        >>> [schedule(Clock(tokens=tokens)) for tokens in (0, 250e9 - 1, 250e9, 1e12)]
        [768, 768, 1536, 3072]
    """

    starts: tuple[int, ...]
    """Positions at which a size begins to hold; the first is 0, and they ascend."""
    sizes: tuple[int, ...]
    """The global batch size, in samples, from each of these positions on."""
    unit: Counted = "tokens"
    """Unit of the positions. Tokens are the weights of batches that the clock has added up."""

    def __post_init__(self) -> None:
        _validate.one_of("unit", self.unit, COUNTED)
        if not self.starts or len(self.starts) != len(self.sizes):
            raise ValueError(
                f"a batch schedule needs one size per position, got {len(self.sizes)} sizes and "
                f"{len(self.starts)} positions"
            )
        for start, size in zip(self.starts, self.sizes, strict=True):
            if _validate.whole("position", start, at_least=0) > _MOST:
                raise ValueError(f"position ({start}) must be at most {_MOST}")
            _validate.whole("batch size", size, at_least=1)
        if self.starts[0] != 0:
            raise ValueError(f"the first position ({self.starts[0]}) must be 0")
        for before, after in itertools.pairwise(self.starts):
            if after <= before:
                raise ValueError(f"position {after} must come after position {before}")

    def __call__(self, clock: Clock) -> int:
        """The global batch size of a step that begins now."""
        used = clock.tokens if self.unit == "tokens" else clock.samples
        return self.sizes[bisect_right(self.starts, used) - 1]

    @classmethod
    def parse(cls, text: str, *, unit: Counted = "tokens") -> BatchSchedule:
        """Reads entries `POSITION:SIZE` with space between them.

        Args:
            text: The schedule. A position may have a fraction and one of the suffixes K, M, B, T
                (10^3, 10^6, 10^9, 10^12), and is a whole number in the end: `1.5K` is 1500.
            unit: Unit of the positions.

        Raises:
            ValueError: The text is not a schedule; the message names the entry.
        """
        entries = text.split()
        if not entries:
            raise ValueError(f"a batch schedule ({text!r}) needs at least one POSITION:SIZE")
        pairs = [_entry(entry) for entry in entries]
        try:
            return cls(tuple(start for start, _ in pairs), tuple(size for _, size in pairs), unit)
        except ValueError as error:
            raise ValueError(f"batch schedule {text!r}: {error}") from None

    def format(self) -> str:
        """The text that `parse` reads back as this schedule."""
        return " ".join(f"{at}:{size}" for at, size in zip(self.starts, self.sizes, strict=True))


def _entry(entry: str) -> tuple[int, int]:
    found = _ENTRY.fullmatch(entry)
    if found is None or found[2] not in _SUFFIXES:
        raise ValueError(
            f"entry {entry!r} of a batch schedule must be POSITION:SIZE, such as 250B:1536: a "
            "number with none of the suffixes K, M, B, T or one, and a whole number"
        )
    position = Fraction(found[1]) * _SUFFIXES[found[2]]
    if position.denominator != 1:
        raise ValueError(
            f"position {found[1]}{found[2]} of entry {entry!r} ({float(position):g}) must be whole"
        )
    return int(position), int(found[3])
