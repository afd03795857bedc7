"""Tables for all commands: aligned text for a person, `--json` for a program.

A row is a mapping from field names to plain values. JSON shows all fields; the text shows the
columns that a command chooses, with its own wording and units.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from resilin.core.text import clean

GAP = "  "
"""Separator of columns."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`, which every command with a table has."""
    parser.add_argument("--json", action="store_true", help="Print JSON in place of the table.")


def to_json(value: Any) -> str:
    """Strict JSON: numbers that JSON cannot represent, such as NaN, become null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def to_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns: cells that begin with a number to the right, all others to the left.

    None is shown as a dash. A row may have fewer cells than the header.

    Raises:
        ValueError: A row has more cells than the header.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    if any(len(row) > len(header) for row in cells):
        longest = max(map(len, cells))
        raise ValueError(f"a row has {longest} cells, but the header has {len(header)}")
    # The last cell of a short row is a sentence: it may be long, and does not widen its column.
    whole = [row if len(row) == len(header) else row[:-1] for row in cells]
    columns = [[row[index] for row in whole if index < len(row)] for index in range(len(header))]
    widths = [
        max([len(name), *map(len, column)]) for name, column in zip(header, columns, strict=True)
    ]
    right = [
        all(cell == "-" or cell[:1].isdigit() or cell[:2].strip("+-.")[:1].isdigit() for cell in c)
        for c in columns
    ]

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=False)
        ]
        if len(row) < len(header):
            aligned[-1] = row[-1]
        return GAP.join(aligned).rstrip()

    return "\n".join(map(line, [list(header), *cells]))


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:g}" if isinstance(value, float) else clean(str(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
