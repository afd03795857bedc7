"""Traces: how the batch size, or the number of replicas, went over a run.

A trace is a step function, given as CSV text with a header: `step,batchsize` or
`time,replicas`. A value holds until the next line. Reading is strict: whatever is not
understood is a `TraceError` that names source and line; nothing is skipped or guessed.
Opening files is the caller's part. Made traces rest on numpy's generators, which may change
with numpy: keep the trace, not only its seed.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from resilin.core import _validate

TraceEnd = Literal["hold", "repeat", "error"]
"""What follows after a trace: its last value, the trace again, or an error."""
TRACE_ENDS: tuple[TraceEnd, ...] = ("hold", "repeat", "error")
"""The names of all ends."""

_LONGEST = 1e12
"""Seconds that a capacity trace may cover: more is a mistake in its units."""


class TraceError(ValueError):
    """A trace that cannot be read or has come to its end; says where."""


def _rows(
    text: str | Iterable[str], source: str, headers: Sequence[tuple[str, ...]]
) -> Iterator[tuple[str, list[str]]]:
    """Yields `(place, fields)` of each data line below one of the known headers."""
    lines = text.splitlines() if isinstance(text, str) else text
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise TraceError(f"{source}, line {reader.line_num}: {error}") from None
        if fields is None:
            break
        place = f"{source}, line {reader.line_num}"
        fields = [field.strip() for field in fields]
        if not any(fields):
            continue
        if header is None:
            header = [field.lower() for field in fields]
            if tuple(header) not in headers:
                known = " or ".join(repr(",".join(names)) for names in headers)
                raise TraceError(f"{place}: the header is {','.join(fields)!r}, expected {known}")
        elif len(fields) != len(header):
            raise TraceError(f"{place}: {len(fields)} columns below {len(header)} in the header")
        else:
            yield place, fields
    if header is None:
        raise TraceError(f"{source}: empty, not even a header")


def _number(place: str, name: str, text: str, *, at_least: int) -> int:
    # Python's own int() would also take '1_000' and digits of other scripts.
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise TraceError(f"{place}: {name} ({text!r}) is not a whole number of up to 18 digits")
    if (number := int(text)) < at_least:
        raise TraceError(f"{place}: {name} ({number}) must be at least {at_least}")
    return number


def _time(place: str, text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        raise TraceError(f"{place}: time ({text!r}) is not a number") from None
    if not math.isfinite(time) or "_" in text:
        raise TraceError(f"{place}: time ({text!r}) must be finite and in plain digits")
    return time


def _check(starts: Sequence[float], values: Sequence[int], name: str, value: str) -> None:
    """What holds for every trace, read or built: it begins at 0 and ascends."""
    if not starts or len(starts) != len(values):
        raise TraceError(
            f"a trace needs one {value} per {name}, got {len(values)} and {len(starts)} of them"
        )
    if starts[0] != 0:
        raise TraceError(f"the first {name} ({starts[0]}) must be 0")
    for before, after in itertools.pairwise(starts):
        if not before < after < math.inf:
            raise TraceError(f"{name} {after} must come after {name} {before} and be finite")


def _past_end(what: str, at: float, length: float) -> TraceError:
    return TraceError(
        f"{what} {at:g} is past the end of the trace ({length:g}); choose end='hold' or 'repeat', "
        "or a longer trace"
    )


@dataclass(frozen=True, slots=True)
class BatchTrace:
    r"""The global batch size of each optimizer step.

    Examples:
        >>> trace = BatchTrace.parse("step,batchsize\n0,64\n2,96\n")
        >>> [trace.at(step) for step in range(4)]
        [64, 64, 96, 96]
    """

    starts: tuple[int, ...]
    """Steps at which a size begins to hold; the first is 0, and they ascend."""
    sizes: tuple[int, ...]
    """The global batch size from each of these steps on."""
    end: TraceEnd = "hold"
    """What follows after the last listed step, which is the last one of the trace."""

    def __post_init__(self) -> None:
        _check(self.starts, self.sizes, "step", "batch size")
        for start, size in zip(self.starts, self.sizes, strict=True):
            _validate.whole("step", start, at_least=0)
            _validate.whole("batch size", size, at_least=1)
        _validate.one_of("end", self.end, TRACE_ENDS)

    @property
    def num_steps(self) -> int:
        """Steps in the trace, the last listed one included."""
        return self.starts[-1] + 1

    def at(self, step: int) -> int:
        """The global batch size of this step.

        Raises:
            TraceError: The step is past the end, and `end` is `error`.
        """
        _validate.whole("step", step, at_least=0)
        if step >= self.num_steps:
            if self.end == "error":
                raise _past_end("step", step, self.num_steps)
            step = step % self.num_steps if self.end == "repeat" else self.num_steps - 1
        return self.sizes[bisect_right(self.starts, step) - 1]

    @classmethod
    def parse(
        cls, text: str | Iterable[str], *, source: str = "trace", end: TraceEnd = "hold"
    ) -> BatchTrace:
        """Reads `step,batchsize` lines.

        Raises:
            TraceError: Names the source and the line of the first fault.
        """
        starts: list[int] = []
        sizes: list[int] = []
        for place, (step_text, size_text) in _rows(text, source, [("step", "batchsize")]):
            step = _number(place, "step", step_text, at_least=0)
            if not starts and step != 0:
                raise TraceError(f"{place}: the first step ({step}) must be 0")
            if starts and step <= starts[-1]:
                raise TraceError(f"{place}: step {step} must come after step {starts[-1]}")
            starts.append(step)
            sizes.append(_number(place, "batchsize", size_text, at_least=1))
        if not starts:
            raise TraceError(f"{source}: no line after the header")
        return cls(tuple(starts), tuple(sizes), end)

    def format(self) -> str:
        """The CSV text that `parse` reads back as this trace."""
        pairs = zip(self.starts, self.sizes, strict=True)
        return "step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in pairs)

    @classmethod
    def from_sizes(cls, sizes: Iterable[int], *, end: TraceEnd = "hold") -> BatchTrace:
        """One size per step."""
        every = tuple(int(size) for size in sizes)
        return cls(tuple(range(len(every))), every, end)

    @classmethod
    def constant(cls, size: int, num_steps: int, *, end: TraceEnd = "hold") -> BatchTrace:
        """The same size at every step."""
        return cls.from_sizes([size] * _validate.whole("num_steps", num_steps, at_least=1), end=end)

    @classmethod
    def ramp(cls, first: int, last: int, num_steps: int, *, end: TraceEnd = "hold") -> BatchTrace:
        """From one size to another, along a straight line."""
        _validate.whole("num_steps", num_steps, at_least=1)
        return cls.from_sizes(np.linspace(first, last, num_steps).round(), end=end)

    @classmethod
    def random_walk(
        cls,
        bounds: tuple[int, int],
        num_steps: int,
        *,
        seed: int,
        step_ratio: float = 1.1,
        end: TraceEnd = "hold",
    ) -> BatchTrace:
        """A seeded walk between two sizes, by a factor of about `step_ratio` at each step.

        It starts in the geometric middle and is reflected at the bounds.
        """
        lower = _validate.whole("lower bound", bounds[0], at_least=1)
        upper = _validate.whole("upper bound", bounds[1], at_least=lower)
        _validate.real("step_ratio", step_ratio, above=1)
        _validate.whole("num_steps", num_steps, at_least=1)
        width = math.log(upper / lower)
        moves = np.random.default_rng(seed).normal(0, math.log(step_ratio), num_steps - 1)
        walk = width / 2 + np.concatenate(([0.0], np.cumsum(moves)))
        if width > 0:
            walk = width - np.abs(walk % (2 * width) - width)
        sizes = np.clip((lower * np.exp(walk)).round(), lower, upper)
        return cls.from_sizes(sizes, end=end)


@dataclass(frozen=True, slots=True)
class CapacityTrace:
    """How many replicas there are over time, as on a spot market. Zero means none at all."""

    times: tuple[float, ...]
    """Seconds from the start of the trace at which a count begins to hold; the first is 0."""
    replicas: tuple[int, ...]
    """The number of replicas from each of these times on."""
    end: TraceEnd = "hold"
    """What follows after the last listed time. `repeat` begins again at that very time."""

    def __post_init__(self) -> None:
        _check(self.times, self.replicas, "time", "number of replicas")
        for count in self.replicas:
            _validate.whole("replicas", count, at_least=0)
        _validate.one_of("end", self.end, TRACE_ENDS)

    @property
    def duration(self) -> float:
        """Seconds from the first listed time to the last."""
        return self.times[-1]

    def at(self, time: float) -> int:
        """The number of replicas at this many seconds after the start.

        Raises:
            TraceError: The time is past the end, and `end` is `error`.
        """
        _validate.real("time", time, at_least=0)
        if self.end == "error" and time > self.duration:
            raise _past_end("time", time, self.duration)
        if self.end == "repeat" and self.duration > 0:
            time %= self.duration
        return self.replicas[bisect_right(self.times, time) - 1]

    @classmethod
    def parse(
        cls, text: str | Iterable[str], *, source: str = "trace", end: TraceEnd = "hold"
    ) -> CapacityTrace:
        """Reads `time,replicas` lines; times count from the first one.

        A leading column of row numbers, as spreadsheets and pandas write it, is understood, and
        so are the headers `GPUs` and `TPU_cores` of public spot traces.

        Raises:
            TraceError: Names the source and the line of the first fault.
        """
        names = ("replicas", "gpus", "tpu_cores")
        headers = [(*index, "time", name) for index in ((), ("",)) for name in names]
        times: list[float] = []
        replicas: list[int] = []
        for place, fields in _rows(text, source, headers):
            time = _time(place, fields[-2])
            if times and not times[-1] < time < times[0] + _LONGEST:
                raise TraceError(
                    f"{place}: time {time} must come after time {times[-1]}, by at most "
                    f"{_LONGEST:g} seconds from the start"
                )
            times.append(time)
            replicas.append(_number(place, "replicas", fields[-1], at_least=0))
        if not times:
            raise TraceError(f"{source}: no line after the header")
        return cls(tuple(time - times[0] for time in times), tuple(replicas), end)

    def format(self) -> str:
        """The CSV text that `parse` reads back as this trace."""
        pairs = zip(self.times, self.replicas, strict=True)
        return "time,replicas\n" + "".join(f"{time!r},{count}\n" for time, count in pairs)

    @classmethod
    def constant(cls, replicas: int, duration: float, *, end: TraceEnd = "hold") -> CapacityTrace:
        """The same number of replicas all the time."""
        return cls((0.0, float(duration)), (replicas, replicas), end)

    @classmethod
    def spot(
        cls,
        max_replicas: int,
        duration: float,
        *,
        seed: int,
        min_replicas: int = 0,
        mean_hold: float = 600.0,
        end: TraceEnd = "hold",
    ) -> CapacityTrace:
        """A seeded market: replicas come back a few at a time and are taken away in bunches.

        Holding times are exponential. At each change, with equal odds, up to a quarter of
        `max_replicas` arrive, or up to all that are held are reclaimed at once.

        Args:
            max_replicas: Most replicas ever held.
            duration: Length of the trace in seconds.
            seed: Chooses the trace.
            min_replicas: Fewest replicas ever held, such as those that are not on the market.
            mean_hold: Mean seconds between two changes.
            end: What follows after the trace.
        """
        _validate.whole("min_replicas", min_replicas, at_least=0)
        _validate.whole("max_replicas", max_replicas, at_least=max(1, min_replicas))
        _validate.real("duration", duration, above=0)
        _validate.real("mean_hold", mean_hold, above=0)
        rng = np.random.default_rng(seed)
        times, counts = [0.0], [max_replicas]
        while (now := times[-1] + float(rng.exponential(mean_hold))) < duration:
            held = counts[-1]
            if rng.random() < 0.5:
                change = int(rng.integers(1, max(1, max_replicas // 4) + 1))
            else:
                change = -int(rng.integers(1, max(1, held) + 1))
            times.append(now)
            counts.append(min(max_replicas, max(min_replicas, held + change)))
        return cls((*times, float(duration)), (*counts, counts[-1]), end)
