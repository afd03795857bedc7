"""A progress bar that counts reference steps, so that it stays right when the batch size changes.

A bar over optimizer steps or batches has to guess how many are left, and is wrong as soon as the
batch size changes. The length of a run is given in reference steps, and each step reports how many
of them it was worth, whatever its batch size. The bar only displays numbers that the caller passes.
It needs nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from resilin.telemetry.wording import amount, span

REDRAW = 0.1
"""Seconds between two updates on a terminal."""
LINE = 60.0
"""Seconds between two lines without a terminal."""
RECENT = 60.0
"""Window for the rate and the remaining time, in seconds."""
_NARROWEST, _WIDEST = 10, 24


class Display:
    """One line that shows the progress of training.

    Args:
        total_steps: Length of the run in reference steps; None if it is unknown.
        stream: Output stream; None writes to stderr. If it is not a terminal, a line is written
            each minute instead of a live bar.
        clock: Source of time, in seconds.
    """

    def __init__(
        self,
        total_steps: float | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        """Length of the run in reference steps; may become known later."""
        self._stream = sys.stderr if stream is None else stream
        self.live = self._stream.isatty()
        """Whether it is a live bar on a terminal."""
        self._clock = clock
        self._past: deque[tuple[float, float]] = deque()
        self._steps = 0.0
        self._notes: tuple[str, ...] = ()
        self._written: float | None = None
        self._shown = False

    @property
    def fraction(self) -> float | None:
        """The completed part of the run, from 0 to 1; None if the length is unknown."""
        if not self.total_steps:
            return None
        return min(1.0, self._steps / self.total_steps)

    @property
    def rate(self) -> float | None:
        """Recent reference steps per second; None before there are two updates."""
        if len(self._past) < 2:
            return None
        (began, first), (now, last) = self._past[0], self._past[-1]
        return (last - first) / (now - began) if now > began else None

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the recent rate; None if the length or the rate is unknown."""
        rate = self.rate
        if not self.total_steps or not rate:
            return None
        return max(0.0, self.total_steps - self._steps) / rate

    def due(self) -> bool:
        """Whether an update would be shown; check it before computing the arguments of `update`."""
        now = self._clock()
        if self._written is None:
            # The first line of a log comes after the first interval.
            self._written = now if not self.live else now - REDRAW
        return now - self._written >= (REDRAW if self.live else LINE)

    def update(
        self,
        *,
        progress: float,
        epoch: str = "",
        batch_size: int | None = None,
        replicas: int | None = None,
        gain: float | None = None,
    ) -> None:
        """Show the current state of training.

        Args:
            progress: Completed reference steps. A value below the previous one is ignored.
            epoch: The epoch as text, such as `3/90`.
            batch_size: The global batch size.
            replicas: Data-parallel members.
            gain: Worth of a step in reference steps.
        """
        now = self._clock()
        self._steps = max(self._steps, progress)
        self._past.append((now, self._steps))
        while len(self._past) > 2 and now - self._past[1][0] >= RECENT:
            self._past.popleft()
        notes = [f"batch {batch_size:,}"] if batch_size is not None else []
        if replicas is not None:
            notes.append(f"{replicas} replica" + ("s" if replicas != 1 else ""))
        if gain is not None:
            notes.append(f"gain {gain:.3g}")
        self._notes = (f"epoch {epoch}" if epoch else "", *notes)
        self._written = now
        self._write("\r" if self.live else "", "" if self.live else "\n")

    def close(self) -> None:
        """Finish the line, so that other output starts on the next one."""
        if self.live and self._shown:
            self._write("\r", "\n")
        self._shown = False

    def text(self, width: int) -> str:
        """The line with at most `width` characters; the least important parts are dropped first."""
        fraction, rate, left = self.fraction, self.rate, self.seconds_left
        done = amount(self._steps)
        if self.total_steps:
            done += f"/{amount(self.total_steps)}"
        epoch, *notes = self._notes or ("",)
        facts = [f"{done} steps"]
        if left is not None:
            facts.append(f"{span(left)} left")
        if rate is not None:
            facts.append(f"{amount(rate, 3)}/s")
        facts += notes
        head = f"{epoch} " if epoch else ""
        percent = "" if fraction is None else f"{int(100 * fraction):3d}% "
        while facts:
            tail = "  ".join(facts)
            room = width - len(head) - len(percent) - len(tail) - 3
            if fraction is None and room >= -3:
                return f"{head}{tail}"
            if fraction is not None and room >= _NARROWEST:
                return f"{head}{percent}{_bar(fraction, min(room, _WIDEST))} {tail}"
            facts.pop()
        return f"{head}{percent}".rstrip()[:width]

    def _write(self, before: str, after: str) -> None:
        width = _columns(self._stream) - 1 if self.live else 200
        line = self.text(width)
        # Blanks erase the rest of a longer previous line.
        self._stream.write(before + (line.ljust(width) if self.live else line) + after)
        self._stream.flush()
        self._shown = True


def _bar(fraction: float, width: int) -> str:
    full = int(fraction * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        # A stream that claims to be a terminal but has no size, such as that of a notebook.
        return 80
