"""A progress bar that counts reference steps, so that it keeps its word when the batch changes.

A bar over optimizer steps or batches has to guess how many are to come, and is wrong as soon as the
batch size is another one. Reference steps are what the length of a run is given in: they are told
to this display as they are made, at whatever batch size. It knows numbers only; where they come
from is its caller's affair. It needs no package beyond Python's own.
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
"""Seconds between two pictures on a terminal."""
LINE = 60.0
"""Seconds between two lines where there is no terminal."""
RECENT = 60.0
"""Seconds of the past that the rate, and with it the time left, is taken from."""
_NARROWEST, _WIDEST = 10, 24


class Display:
    """One line that shows how far training has come.

    Args:
        total_steps: Length of the whole in reference steps; None if it is unknown.
        stream: Where to write; None takes stderr. Where this is no terminal, there is a line a
            minute instead of a picture.
        clock: Gives the time in seconds; tests bring their own.
    """

    def __init__(
        self,
        total_steps: float | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        """Length of the whole in reference steps; may become known later."""
        self._stream = sys.stderr if stream is None else stream
        self.live = self._stream.isatty()
        """Whether it is a picture on a terminal."""
        self._clock = clock
        self._past: deque[tuple[float, float]] = deque()
        self._steps = 0.0
        self._notes: tuple[str, ...] = ()
        self._written: float | None = None
        self._shown = False

    @property
    def fraction(self) -> float | None:
        """The part of the whole that is done, from 0 to 1; None if the length is unknown."""
        if not self.total_steps:
            return None
        return min(1.0, self._steps / self.total_steps)

    @property
    def rate(self) -> float | None:
        """Reference steps per second in the recent past; None before there is one."""
        if len(self._past) < 2:
            return None
        (began, first), (now, last) = self._past[0], self._past[-1]
        return (last - first) / (now - began) if now > began else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at that rate; None if there is no end or no rate."""
        rate = self.rate
        if not self.total_steps or not rate:
            return None
        return max(0.0, self.total_steps - self._steps) / rate

    def due(self) -> bool:
        """Whether an update would be shown: ask it before working out what to show."""
        now = self._clock()
        if self._written is None:
            # The first line of a log comes when there is something to tell.
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
        """Shows where training is.

        Args:
            progress: Reference steps done. Less than before is taken for what it was before.
            epoch: The epoch, in words, such as `3/90`.
            batch_size: The global batch size.
            replicas: Data-parallel members.
            gain: Reference steps that a step is worth.
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
        """Leaves the line as it is, and the next one to others."""
        if self.live and self._shown:
            self._write("\r", "\n")
        self._shown = False

    def text(self, width: int) -> str:
        """The line, at most this wide: what matters least goes first when there is little room."""
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
        # Blanks wipe out the rest of a longer line that was there before.
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
        # Something that says it is a terminal and has no size, such as a notebook's stream.
        return 80
