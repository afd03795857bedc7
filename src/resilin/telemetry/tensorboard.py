"""`TensorBoard`: write events with a SummaryWriter of the script.

The writers of torch and tensorboardX have the same interface. Curves are drawn over optimizer
steps, and carry the time of the step; descriptions are on the page of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from resilin.core.events import Event
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
    """A sink that writes with a SummaryWriter. The script opens and closes it.

    Args:
        writer: A SummaryWriter, of torch or tensorboardX.
        prefix: Prefix of the tags.

    Raises:
        ValueError: There is no writer.
    """

    def __init__(self, writer: SummaryWriter, prefix: str = PREFIX) -> None:
        if not (hasattr(writer, "add_scalar") and hasattr(writer, "add_text")):
            raise ValueError(
                f"writer ({writer!r}) must be a SummaryWriter, with add_scalar and add_text"
            )
        self._writer = writer
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Write the numbers of the event and its description."""
        write_scalars(self._writer, scalars(event), event.step, self._prefix, time=event.time)
        text = words(event)
        if text is not None:
            self._writer.add_text(
                f"{self._prefix}{event.name}", text, global_step=event.step, walltime=event.time
            )
