"""Checks of numbers from users; errors are one sentence with the value and the rule."""

from __future__ import annotations

import math
import operator
from typing import Any


def whole(name: str, value: Any, *, at_least: int) -> int:
    """Return `value` as an `int`; an error if it is not a whole number of at least `at_least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} ({value!r}) must be a whole number") from None
    if number < at_least:
        raise ValueError(f"{name} ({number}) must be at least {at_least}")
    return number


def real(
    name: str, value: Any, *, at_least: float | None = None, above: float | None = None
) -> float:
    """Return `value` as a finite `float`; an error if it violates a bound."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} ({value!r}) must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} ({number}) must be finite")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} ({number}) must be at least {at_least}")
    if above is not None and number <= above:
        raise ValueError(f"{name} ({number}) must be above {above}")
    return number


def text(name: str, value: Any) -> str:
    """Return `value`; an error if it is not a text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} ({value!r}) must be a text")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of texts as a tuple; an error if it is something else."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} ({value!r}) must be a list of texts")
    return tuple(text(name, each) for each in value)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(choices)}")
