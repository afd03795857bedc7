"""The step-time profile: measured step times as one bounded value.

A live job measures each step. A list of all measurements would grow without bound, and a garbage
collection or a burst of another process would count as much as a normal step. The profile keeps,
for each way of running a step (its key: hosts, replicas, micro-batch, accumulation), the last few
measurements, and returns their medians: up to four outliers among nine do not change it.

Measurements decay. With each observed step, all earlier ones lose a little weight, so `fit`
prefers recent steps, and the tuner can tell which sizes to measure again. If the median of the
current key jumps, conditions have changed for the other keys as well: then all of them decay at
once. Decay counts steps, not seconds: a paused job forgets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from resilin.core import _validate
from resilin.core.fit import StepTime

WINDOW = 9
"""Measurements kept per key, and the largest weight of a key."""
HALF_LIFE = 300.0
"""Steps after which a measurement counts half."""
JUMP = 0.1
"""Change of the log of a key's median in one step that ages all measurements by a half-life."""
MAX_KEYS = 256
"""Largest number of keys."""


class Key(NamedTuple):
    """One way of running a step."""

    hosts: int
    """Machines that the replicas run on."""
    replicas: int
    """Data-parallel members."""
    local_bsz: float
    """Samples of a micro-batch; the mean, if they are uneven."""
    accumulation_steps: int
    """Micro-batches that each replica runs in the step."""


class Measured(NamedTuple):
    """One measured step of a key."""

    at: float
    """The profile's clock when it was measured."""
    compute_seconds: float
    """Seconds of one micro-batch."""
    sync_seconds: float | None
    """Seconds of waiting for the reduction; None if not measured."""
    weight: float
    """Number of steps that it represents."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Step times seen so far. A value: `observe` returns the next one.

    Examples:
        >>> profile = StepProfile()
        >>> for seconds in (0.1, 0.12, 9.0, 0.11, 0.1):
        ...     step = StepTime(hosts=1, replicas=1, local_bsz=32, compute_seconds=seconds)
        ...     profile = profile.observe(step)
        >>> [(step.local_bsz, step.compute_seconds) for step in profile.observations()]
        [(32.0, 0.11)]
    """

    clock: float = 0.0
    """Total number of observed steps, plus the ageing by jumps."""
    windows: Mapping[Key, tuple[Measured, ...]] = field(default_factory=dict, hash=False)
    """The last measurements of each key, oldest first."""

    def observe(self, time: StepTime) -> StepProfile:
        """Add one measured step; earlier measurements lose a little weight."""
        key = Key(time.hosts, time.replicas, float(time.local_bsz), time.accumulation_steps)
        before = self.windows.get(key, ())
        now = self.clock + 1
        new = Measured(now, time.compute_seconds, time.sync_seconds, time.weight)
        after = (*before[1 - WINDOW :], new)
        # Only a full window of recent steps distinguishes a jump from an outlier or from old data.
        if len(before) == WINDOW and now - before[0].at < HALF_LIFE:
            shift = abs(math.log(_median_step(key, after) / _median_step(key, before)))
            if shift > JUMP:
                now += HALF_LIFE * shift / JUMP
                after = (*after[:-1], new._replace(at=now))
        windows = {**self.windows, key: after}
        return StepProfile(now, _bounded(windows, now))

    def observations(self) -> tuple[StepTime, ...]:
        """Input of `fit`: one entry per key, with medians and their remaining weight."""
        return tuple(
            StepTime(
                hosts=key.hosts,
                replicas=key.replicas,
                local_bsz=key.local_bsz,
                accumulation_steps=key.accumulation_steps,
                compute_seconds=median(item.compute_seconds for item in window),
                sync_seconds=_median_wait(window),
                weight=_weight(window, self.clock),
            )
            for key, window in self.windows.items()
        )

    def largest_batch(self, replicas: int) -> float:
        """The largest global batch that was run with this many replicas; 0 if none was."""
        sizes = (
            key.replicas * key.local_bsz * key.accumulation_steps
            for key in self.windows
            if key.replicas == replicas
        )
        return max(sizes, default=0.0)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; JSON-compatible."""
        windows = [
            {"key": list(key), "measured": [list(item) for item in window]}
            for key, window in self.windows.items()
        ]
        return {"clock": self.clock, "windows": windows}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepProfile:
        """The inverse of `state`.

        Raises:
            ValueError: A number in it cannot be a measured step.
        """
        clock = _validate.real("clock", state["clock"], at_least=0)
        windows = {}
        for entry in state["windows"]:
            hosts, replicas, local_bsz, accumulation_steps = entry["key"]
            key = Key(int(hosts), int(replicas), float(local_bsz), int(accumulation_steps))
            windows[key] = tuple(_read(key, item, clock) for item in entry["measured"])
            if not 1 <= len(windows[key]) <= WINDOW:
                raise ValueError(
                    f"{key} has {len(windows[key])} measurements; it must have 1 to {WINDOW}"
                )
        return cls(clock, _bounded(windows, clock))


def _read(key: Key, item: Iterable[Any], clock: float) -> Measured:
    at, compute, sync, weight = item
    if _validate.real("time of a measurement", at, at_least=0) > clock:
        raise ValueError(f"time of a measurement ({at}) must be at most clock ({clock})")
    # Constructing the step checks its numbers.
    checked = StepTime(
        hosts=key.hosts,
        replicas=key.replicas,
        local_bsz=key.local_bsz,
        accumulation_steps=key.accumulation_steps,
        compute_seconds=compute,
        sync_seconds=sync,
        weight=weight,
    )
    return Measured(float(at), checked.compute_seconds, checked.sync_seconds, checked.weight)


def _median_wait(window: tuple[Measured, ...]) -> float | None:
    waits = [item.sync_seconds for item in window if item.sync_seconds is not None]
    return median(waits) if waits else None


def _median_step(key: Key, window: tuple[Measured, ...]) -> float:
    return median(
        key.accumulation_steps * item.compute_seconds + (item.sync_seconds or 0.0)
        for item in window
    )


def _weight(window: tuple[Measured, ...], now: float) -> float:
    return math.fsum(item.weight * 0.5 ** ((now - item.at) / HALF_LIFE) for item in window)


def _bounded(
    windows: dict[Key, tuple[Measured, ...]], now: float
) -> dict[Key, tuple[Measured, ...]]:
    """The keys with the largest weights, if there are too many."""
    if len(windows) <= MAX_KEYS:
        return windows
    # Of equal ones the latest are kept: by age first, since small weights underflow.
    rank = {key: (_weight(window, now), window[-1].at) for key, window in windows.items()}
    keep = set(sorted(windows, key=rank.__getitem__)[-MAX_KEYS:])
    return {key: window for key, window in windows.items() if key in keep}
