"""Strict parsing of small CSV tables.

Anything unexpected is a `TraceError` that names the source and the line; nothing is skipped or
guessed.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence


class TraceError(ValueError):
    """A trace that cannot be read, or that has ended; the message names the place."""


def lines(text: str | Iterable[str], source: str) -> Iterator[tuple[str, list[str]]]:
    """Yields `(place, fields)` of each line that is not blank."""
    reader = csv.reader(text.splitlines() if isinstance(text, str) else text, strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise TraceError(f"{source}, line {reader.line_num}: {error}") from None
        if fields is None:
            return
        fields = [field.strip() for field in fields]
        if any(fields):
            yield f"{source}, line {reader.line_num}", fields


def header(
    numbered: Iterator[tuple[str, list[str]]], source: str, headers: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Read the first line, which must be one of the known headers."""
    place, fields = next(numbered, ("", []))
    if not fields:
        raise TraceError(f"{source}: empty, without a header")
    found = tuple(field.lower() for field in fields)
    if found not in headers:
        known = " or ".join(repr(",".join(names)) for names in headers)
        raise TraceError(f"{place}: the header is {','.join(fields)!r}, expected {known}")
    return found


def rows(
    text: str | Iterable[str], source: str, headers: Sequence[tuple[str, ...]]
) -> Iterator[tuple[str, list[str]]]:
    """Yields `(place, fields)` of each data line below one of the known headers."""
    numbered = lines(text, source)
    columns = len(header(numbered, source, headers))
    for place, fields in numbered:
        if len(fields) != columns:
            raise TraceError(f"{place}: {len(fields)} columns, but the header has {columns}")
        yield place, fields


def number(place: str, name: str, text: str, *, at_least: int) -> int:
    """A whole number of a trace."""
    # Python's own int() would also take '1_000' and digits of other scripts.
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise TraceError(f"{place}: {name} ({text!r}) is not a whole number of up to 18 digits")
    if (value := int(text)) < at_least:
        raise TraceError(f"{place}: {name} ({value}) must be at least {at_least}")
    return value


def time(place: str, text: str) -> float:
    """A time of a trace, in seconds."""
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{place}: time ({text!r}) is not a number") from None
    if not math.isfinite(value) or "_" in text:
        raise TraceError(f"{place}: time ({text!r}) must be finite and in plain digits")
    return value
