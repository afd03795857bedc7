"""Columns: fields of many events as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from resilin.core.events import Event

Array = npt.NDArray[np.float64]
"""One column."""
_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The reported steps in order of time, one column per field. NaN marks unknown values.

    The columns are the fields of `StepEvent`.
    """

    time: Array
    step: Array
    generation: Array
    epoch: Array
    replicas: Array
    batch_size: Array
    local_bsz: Array
    accumulation_steps: Array
    samples: Array
    progress: Array
    scale: Array
    gain: Array
    lr_factor: Array
    lr: Array
    sqr_norm: Array
    trace: Array
    seconds: Array
    loss: Array

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, slots=True)
class Series:
    """One of the user's numbers over a run, in order of time."""

    time: Array
    """Unix time in seconds."""
    step: Array
    """Steps committed when it was recorded."""
    progress: Array
    """Reference steps completed by then, interpolated between reported steps."""
    value: Array
    """The number."""
    generation: Array
    """The generation in which it was recorded."""

    def __len__(self) -> int:
        return len(self.time)


STEP_FIELDS = tuple(column.name for column in fields(Steps))
"""The columns, in order."""
STEP_ROW = cast("Callable[[Event], tuple[Any, ...]]", attrgetter(*STEP_FIELDS))
"""Reads the columns from a `StepEvent`."""


class Columns:
    """Rows that are converted to arrays in chunks: Python objects take ten times the memory."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[tuple[Any, ...]] = []
        self._done: list[Array] = []

    def append(self, row: tuple[Any, ...]) -> None:
        """Adds a row; None stands for NaN."""
        self._rows.append(row)
        if len(self._rows) == _CHUNK:
            self._convert()

    def arrays(self) -> list[Array]:
        """The columns."""
        self._convert()
        return list(np.concatenate(self._done).T.copy())

    def _convert(self) -> None:
        try:
            table = np.array(self._rows, dtype=np.float64)
        except OverflowError:
            table = np.array([[number(value) for value in row] for row in self._rows])
        self._done.append(table.reshape(-1, self._width))
        self._rows.clear()


def number(value: float | None) -> float:
    """The value as a float: NaN for None, infinity for integers that are too large."""
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        # JSON has integers of any length.
        return math.inf if value > 0 else -math.inf
