"""`TensorBoard`: write events with a SummaryWriter of the script.

The writers of torch and tensorboardX have the same interface. Curves are drawn over optimizer
steps, and carry the time of the step; descriptions are on the page of texts.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

from resilin.core.events import Event
from resilin.telemetry.opening import first_step, opens
from resilin.telemetry.scalars import scalars, words

PREFIX = "resilin/"
"""Default prefix of the names."""


class SummaryWriter(Protocol):
    """The interface required of a writer."""

    def add_scalar(
        self,
        tag: str,
        scalar_value: Any,
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> Any:
        """Writes one point of a curve."""
        ...

    def add_text(
        self,
        tag: str,
        text_string: str,
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> Any:
        """Writes a text."""
        ...


def is_writer(thing: object) -> TypeGuard[SummaryWriter]:
    """Whether an object has the interface of a writer."""
    return hasattr(thing, "add_scalar") and hasattr(thing, "add_text")


def write_scalars(
    writer: SummaryWriter,
    values: Mapping[str, float],
    step: int,
    prefix: str = PREFIX,
    *,
    time: float | None = None,
) -> None:
    """Writes one point of each curve.

    Args:
        writer: A SummaryWriter, of torch or tensorboardX.
        values: Numbers by name.
        step: Their position on the axis.
        prefix: Prefix of the tags.
        time: Unix time of the step; the current one if None.
    """
    for name, number in values.items():
        writer.add_scalar(prefix + name, number, global_step=step, walltime=time)


class TensorBoard:
    """A sink that writes with a SummaryWriter. The script opens it, or says how.

    Args:
        writer: A SummaryWriter, of torch or tensorboardX; the script closes it. Or a function that
            opens one, on the process that reports: it is called with the first event, and gets the
            first step that is written. Passed on as `purge_step`, this step hides what was written
            of it and of later steps before a restart, so that steps that are redone are not shown
            twice. The sink closes such a writer when the process exits.
        prefix: Prefix of the tags.

    Raises:
        ValueError: There is no writer.
    """

    def __init__(
        self, writer: SummaryWriter | Callable[[int], SummaryWriter], prefix: str = PREFIX
    ) -> None:
        self._open: Callable[[int], SummaryWriter] | None = None
        self._writer: SummaryWriter | None = None
        if is_writer(writer):
            self._writer = writer
        elif callable(writer):
            self._open = writer
        else:
            raise ValueError(
                f"writer ({writer!r}) must be a SummaryWriter, with add_scalar and add_text, or a "
                "function that opens one"
            )
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Write the numbers of the event and its description."""
        writer = self._writer_for(event)
        if writer is None:
            return
        write_scalars(writer, scalars(event), event.step, self._prefix, time=event.time)
        text = words(event)
        if text is not None:
            writer.add_text(
                f"{self._prefix}{event.name}", text, global_step=event.step, walltime=event.time
            )

    def _writer_for(self, event: Event) -> SummaryWriter | None:
        if self._writer is None and self._open is not None and opens(event):
            opened = self._open(first_step(event))
            if not is_writer(opened):
                raise ValueError(f"the function returned {opened!r}, which is no SummaryWriter")
            self._writer = opened
            if close := getattr(opened, "close", None):
                atexit.register(close)
        return self._writer
