"""Traces: the batch size, or the number of replicas, over a run.

A trace is a step function, given as CSV text with a header: `step,batchsize` or
`time,replicas`. A value holds until the next line. Parsing is strict: anything unexpected is a
`TraceError` that names the source and the line; nothing is skipped or guessed. The caller opens
files. Generated traces depend on numpy's generators, which may change with numpy: keep the trace,
not only its seed.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from resilin.core import _table, _validate
from resilin.core._table import TraceError as TraceError

TraceEnd = Literal["hold", "repeat", "error"]
"""Continuation after the end of a trace: its last value, the trace again, or an error."""
TRACE_ENDS: tuple[TraceEnd, ...] = ("hold", "repeat", "error")
"""The names of all ends."""
TraceRestarts = Literal["error", "append"]
"""Treatment of steps that restart at 0: reject them, or append them."""
TRACE_RESTARTS: tuple[TraceRestarts, ...] = ("error", "append")
"""All values of `TraceRestarts`."""

_LONGEST = 1e12
"""Longest duration of a capacity trace, in seconds: more is an error in its units."""
_LARGEST = 10**18 - 1
"""Largest whole number in a trace: 18 digits, which every reader of CSV can hold."""
_MOST_CHANGES = 10**7
"""Largest mean number of changes of a generated market."""
_BATCH_HEADERS = [("step", "batchsize")]
_CAPACITY_HEADERS = [
    (*index, "time", name) for index in ((), ("",)) for name in ("replicas", "gpus", "tpu_cores")
]


def _check(
    starts: Sequence[float], values: Sequence[int], name: str, value: str, *, longest: float
) -> None:
    """Check the rules for every trace: it begins at 0 and ascends."""
    if not starts or len(starts) != len(values):
        raise TraceError(
            f"a trace needs one {value} per {name}, got {len(values)} and {len(starts)} of them"
        )
    if starts[0] != 0:
        raise TraceError(f"the first {name} ({starts[0]}) must be 0")
    for before, after in itertools.pairwise(starts):
        if not before < after < math.inf:
            raise TraceError(f"{name} {after} must come after {name} {before} and be finite")
    if starts[-1] > longest:
        raise TraceError(f"the last {name} ({starts[-1]}) must be at most {longest:g}")
    if max(values) > _LARGEST:
        raise TraceError(f"{value} ({max(values)}) must have at most 18 digits")


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
    """Continuation after the last listed step, which is the last one of the trace."""

    def __post_init__(self) -> None:
        _check(self.starts, self.sizes, "step", "batch size", longest=_LARGEST)
        for start, size in zip(self.starts, self.sizes, strict=True):
            _validate.whole("step", start, at_least=0)
            _validate.whole("batch size", size, at_least=1)
        _validate.one_of("end", self.end, TRACE_ENDS)

    @property
    def num_steps(self) -> int:
        """Number of steps in the trace, including the last listed one."""
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
        cls,
        text: str | Iterable[str],
        *,
        source: str = "trace",
        end: TraceEnd = "hold",
        restarts: TraceRestarts = "error",
    ) -> BatchTrace:
        """Reads `step,batchsize` lines.

        Args:
            text: The whole text, or its lines.
            source: Name of the trace in errors, such as a file name.
            end: Continuation after the end of the trace.
            restarts: Treatment of steps that restart at 0, as in a file that contains two traces.
                `append` appends the second to the first. It assumes that the first part ends with
                the last step it lists, so that the value of its last line holds for one step; a
                part that held longer is shortened, which the file does not show.

        Raises:
            TraceError: The text is not a trace; the message names the source and the line.
        """
        _validate.one_of("restarts", restarts, TRACE_RESTARTS)
        starts: list[int] = []
        sizes: list[int] = []
        base = 0
        for place, (step_text, size_text) in _table.rows(text, source, _BATCH_HEADERS):
            step = _table.number(place, "step", step_text, at_least=0)
            if not starts and step != 0:
                raise TraceError(f"{place}: the first step ({step}) must be 0")
            if starts and step == 0 and restarts == "append":
                base = starts[-1] + 1
            if starts and base + step <= starts[-1]:
                raise TraceError(
                    f"{place}: step {step} must come after step {starts[-1] - base}"
                    + ("" if step else "; restarts='append' appends steps that restart at 0")
                )
            if base + step > _LARGEST:
                raise TraceError(
                    f"{place}: step {step} after {base} steps must have at most 18 digits"
                )
            starts.append(base + step)
            sizes.append(_table.number(place, "batchsize", size_text, at_least=1))
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
    """The number of replicas over time, as on a spot market. Zero means none."""

    times: tuple[float, ...]
    """Seconds from the start of the trace at which a count begins to hold; the first is 0."""
    replicas: tuple[int, ...]
    """The number of replicas from each of these times on."""
    end: TraceEnd = "hold"
    """Continuation after the last listed time. `repeat` starts again at that time."""

    def __post_init__(self) -> None:
        _check(self.times, self.replicas, "time", "number of replicas", longest=_LONGEST)
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

        A leading column of row numbers, as written by spreadsheets and pandas, is accepted, and
        so are the headers `GPUs` and `TPU_cores` of public spot traces.

        Raises:
            TraceError: The text is not a trace; the message names the source and the line.
        """
        times: list[float] = []
        replicas: list[int] = []
        first = before = 0.0
        for place, fields in _table.rows(text, source, _CAPACITY_HEADERS):
            time = _table.time(place, fields[-2])
            first = first if times else time
            # Two different times may become equal when the first one is subtracted.
            if times and not times[-1] < time - first <= _LONGEST:
                raise TraceError(
                    f"{place}: time {time} must come after time {before}, by at most "
                    f"{_LONGEST:g} seconds from the start"
                )
            before = time
            times.append(time - first)
            replicas.append(_table.number(place, "replicas", fields[-1], at_least=0))
        if not times:
            raise TraceError(f"{source}: no line after the header")
        return cls(tuple(times), tuple(replicas), end)

    def format(self) -> str:
        """The CSV text that `parse` reads back as this trace."""
        pairs = zip(self.times, self.replicas, strict=True)
        return "time,replicas\n" + "".join(f"{float(time)!r},{count}\n" for time, count in pairs)

    def scaled(self, max_replicas: int) -> CapacityTrace:
        """The same trace, scaled to at most this many replicas.

        A count becomes `ceil(count * max_replicas / peak)`: a positive count never becomes 0. A
        trace whose peak is not higher than that is returned unchanged.
        """
        _validate.whole("max_replicas", max_replicas, at_least=1)
        peak = max(self.replicas)
        if peak <= max_replicas:
            return self
        counts = tuple(-(-count * max_replicas // peak) for count in self.replicas)
        return replace(self, replicas=counts)

    def compressed(self, speed: float) -> CapacityTrace:
        """The same trace in a shorter time: `speed` of its seconds pass in one."""
        _validate.real("speed", speed, above=0)
        return replace(self, times=tuple(time / speed for time in self.times))

    def simplified(self) -> CapacityTrace:
        """The trace without lines that change nothing; the last line stays as its end."""
        before = (None, *self.replicas)
        last = len(self.times) - 1
        kept = [i for i, count in enumerate(self.replicas) if count != before[i] or i == last]
        return replace(
            self,
            times=tuple(self.times[i] for i in kept),
            replicas=tuple(self.replicas[i] for i in kept),
        )

    def batches(
        self,
        local_bsz: int,
        *,
        step_seconds: float,
        max_replicas: int | None = None,
        end: TraceEnd | None = None,
    ) -> BatchTrace:
        """The batch sizes of a job with a constant batch on each replica.

        Each step takes `step_seconds` of the trace's time, and its global batch is `local_bsz`
        for each replica that is present when it begins. While there are none, time passes without
        steps. The real duration of a step depends on the job and on the number of replicas; this
        and the cost of a rescale are ignored.

        Args:
            local_bsz: Samples per replica and step.
            step_seconds: Duration of a step in seconds of the trace.
            max_replicas: First scale the counts to at most this many, as `scaled` does.
            end: Continuation after the end of the trace; None uses the trace's own. `hold` adds a
                step with the replicas at the end, if there are any; otherwise the last size is
                held. A trace that repeats begins its first step again at its start.

        Raises:
            TraceError: No step can begin at any time, or there are too many steps.
        """
        _validate.whole("local_bsz", local_bsz, at_least=1)
        _validate.real("step_seconds", step_seconds, above=0)
        end = self.end if end is None else end
        _validate.one_of("end", end, TRACE_ENDS)
        trace = self if max_replicas is None else self.scaled(max_replicas)
        runs: list[tuple[int, int]] = []
        num_steps = 0
        for count, length in trace._runs(step_seconds, end):
            if num_steps + length > _LARGEST:
                raise TraceError(
                    f"step_seconds ({step_seconds:g}) makes more than {_LARGEST:g} steps of a "
                    f"trace of {self.duration:g} seconds"
                )
            if not runs or count * local_bsz != runs[-1][1]:
                runs.append((num_steps, count * local_bsz))
            num_steps += length
        if not runs:
            raise TraceError(
                f"no step can begin: there are no replicas at any time before the end of the trace "
                f"({self.duration:g} seconds, then {end!r})"
            )
        if runs[-1][0] != num_steps - 1:
            runs.append((num_steps - 1, runs[-1][1]))
        starts, sizes = zip(*runs, strict=True)
        return BatchTrace(starts, sizes, end)

    def _runs(self, step_seconds: float, end: TraceEnd) -> Iterator[tuple[int, int]]:
        """Yields `(replicas, steps)` of successive steps, line by line and not step by step."""
        # Steps follow each other without a gap from `base` on; `done` of them have begun.
        base, done = 0.0, 0

        def steps_before(time: float) -> int:
            # A step that begins exactly at a change must not come before it through rounding.
            steps = (time - base) / step_seconds
            if not steps < _LARGEST:
                return _LARGEST + 1
            return math.ceil(steps - 1e-9 * max(1.0, steps))

        for count, until in zip(self.replicas, self.times[1:], strict=False):
            length = steps_before(until) - done
            if length <= 0:  # the last step lasts beyond this line
                continue
            if count:
                yield count, length
                done += length
            else:
                base, done = until, 0
        # The last line holds from the end on, or only at that moment, or not at all.
        now = base + done * step_seconds
        is_at_end = now <= self.duration * (1 + 1e-9)
        has_last = end == "hold" or self.duration == 0 or (end == "error" and is_at_end)
        if self.replicas[-1] and has_last:
            yield self.replicas[-1], 1

    @classmethod
    def constant(cls, replicas: int, duration: float, *, end: TraceEnd = "hold") -> CapacityTrace:
        """A constant number of replicas."""
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
        """A seeded market: replicas arrive a few at a time and are reclaimed in bunches.

        Holding times are exponential. At each change, with equal odds, up to a quarter of
        `max_replicas` arrive, or up to all that are held are reclaimed at once.

        Args:
            max_replicas: Largest number of replicas.
            duration: Length of the trace in seconds.
            seed: Seed of the trace.
            min_replicas: Smallest number of replicas, such as those that are not on the market.
            mean_hold: Mean seconds between two changes.
            end: Continuation after the end of the trace.
        """
        _validate.whole("min_replicas", min_replicas, at_least=0)
        _validate.whole("max_replicas", max_replicas, at_least=max(1, min_replicas))
        _validate.real("duration", duration, above=0)
        _validate.real("mean_hold", mean_hold, above=0)
        if duration / mean_hold > _MOST_CHANGES:
            raise ValueError(
                f"duration ({duration:g}) must be at most {_MOST_CHANGES} times mean_hold "
                f"({mean_hold:g})"
            )
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


def parse_trace(
    text: str | Iterable[str],
    *,
    source: str = "trace",
    end: TraceEnd = "hold",
    restarts: TraceRestarts = "error",
) -> BatchTrace | CapacityTrace:
    r"""Read a trace of either kind, distinguished by its header.

    Args:
        text: The whole text, or its lines.
        source: Name of the trace in errors, such as a file name.
        end: Continuation after the end of the trace.
        restarts: Treatment of steps of a batch-size trace that restart at 0.

    Raises:
        TraceError: The text is not a trace; the message names the source and the line.

    Examples:
        >>> parse_trace("time,replicas\n0,4\n60,2\n").at(59)
        4
    """
    lines = text.splitlines() if isinstance(text, str) else list(text)
    headers = [*_BATCH_HEADERS, *_CAPACITY_HEADERS]
    if _table.header(_table.lines(lines, source), source, headers) in _CAPACITY_HEADERS:
        return CapacityTrace.parse(lines, source=source, end=end)
    return BatchTrace.parse(lines, source=source, end=end, restarts=restarts)
