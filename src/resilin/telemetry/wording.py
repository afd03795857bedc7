"""Short texts for numbers, durations and events."""

from __future__ import annotations

import math
from collections.abc import Iterable

from resilin.core import events

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def span(seconds: float | None) -> str:
    """A duration: `25 ms`, `0.4 s`, `12 s`, `2 min 05 s`, `3 h 07 min`, `4 d 3 h`; or `-`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if 0 < seconds < 0.0995:
        return f"{sign}{1000 * seconds:.2g} ms"
    if seconds < 9.95:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{sign}{whole} s"
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{sign}{hours // 24} d {hours % 24} h"


def ago(seconds: float) -> str:
    """The age of something in its largest unit: `12 s ago`, `4 min ago`, `3 h ago`."""
    if not math.isfinite(seconds):
        return "-"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def amount(value: float | None, digits: int = 4) -> str:
    """A number with few digits: `12,345`, `1.235M`, `0.5`; `-` for unknown.

    Args:
        value: The number. None and NaN are unknown.
        digits: Significant digits.
    """
    value = _float(value)
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    for unit, name in _UNITS:
        if size >= unit:
            return f"{value / unit:.{digits}g}{name}" if size < 1e15 else f"{value:.{digits - 1}e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def extent(values: Iterable[float]) -> str:
    """Smallest and largest of some numbers: `2 to 8`, or `4` if they are all the same."""
    known = [value for value in map(_float, values) if not math.isnan(value)]
    if not known:
        return "-"
    low, high = amount(min(known)), amount(max(known))
    return low if low == high else f"{low} to {high}"


def describe(event: events.Event) -> str:
    """Description of an event in one sentence. Empty for steps, epochs and metrics."""
    if isinstance(event, events.RescaleEvent):
        change = f"{event.replicas_before} -> {event.replicas} replicas"
        if event.replicas_before == event.replicas:
            change = f"restarted with {event.replicas} replica" + "s" * (event.replicas != 1)
        pause = "" if event.seconds is None else f" after {span(event.seconds)}"
        return f"{change}{pause}: {event.reason}"
    if isinstance(event, events.FaultEvent):
        where = "" if event.replica is None else f" on replica {event.replica}"
        return f"{event.kind}{where}: {event.detail}"
    if isinstance(event, events.DecisionEvent):
        if event.batch_size == event.batch_size_before:
            return f"batch {event.batch_size:,} kept: {event.reason}"
        return f"batch {event.batch_size_before:,} -> {event.batch_size:,}: {event.reason}"
    if isinstance(event, events.CheckpointEvent):
        took = "" if event.seconds is None else f" in {span(event.seconds)}"
        size = "" if event.num_bytes is None else f", {amount(event.num_bytes)}B"
        why = f": {event.detail}" if event.detail else ""
        return f"{event.action} {event.path}{took}{size}{why}"
    return ""


def _float(value: float | None) -> float:
    """A float; NaN for None, and infinity for integers that are too large."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf if value is not None and value > 0 else -math.inf
