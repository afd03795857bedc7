"""Time that a step waits for the reduction of its gradient, without synchronising the device.

On the CPU a mark is a time. Where a device queues its work, it is an event in the stream, read some
steps later, when the device has long passed it: nothing on the way of a step ever waits for the
device.
"""

from __future__ import annotations

import time
from collections import deque

import torch

from resilin.engine import devices

_PENDING = 16
"""Steps whose events may be unread; older ones are dropped."""


class Stopwatch:
    """Adds up the time that is spent within `with watch:`."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time so far."""

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class _Mark:
    """A moment on a device."""

    def __init__(self, device: torch.device) -> None:
        self.time = time.perf_counter()
        self.event = devices.of(device).event(device)

    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_to(self, later: _Mark) -> float:
        if self.event is None or later.event is None:
            return later.time - self.time
        return float(self.event.elapsed_time(later.event)) / 1000


class SyncTimer:
    """Seconds from the end of backward on this replica to the end of the reduction, per step."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._computed: _Mark | None = None
        self._pending: deque[tuple[_Mark, _Mark]] = deque(maxlen=_PENDING)
        self._newest: float | None = None

    def computed(self) -> None:
        """This replica has computed all of its gradient."""
        self._computed = _Mark(self._device)

    def dropped(self) -> None:
        """The step is over, or left."""
        self._computed = None

    def reduced(self) -> None:
        """The gradient of all replicas is there."""
        if self._computed is not None:
            self._pending.append((self._computed, _Mark(self._device)))
            self._computed = None

    def seconds(self) -> float | None:
        """Of the newest step that is known; None before the first one."""
        while self._pending and self._pending[0][1].passed():
            computed, reduced = self._pending.popleft()
            self._newest = computed.seconds_to(reduced)
        return self._newest
