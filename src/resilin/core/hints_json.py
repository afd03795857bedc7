"""Reading of hints and answers as JSON from a network: strict, bounded, and named in each error.

Jobs and schedulers may be of different versions, and either side may be wrong or hostile. So each
field is checked for its type and its range, lists and texts have a largest length, and what an
error quotes is short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from resilin.core.text import clean

MAX_BYTES = 1 << 20
"""Largest size of the JSON text."""
MAX_ENTRIES = 1000
"""Largest number of entries of a list."""
MAX_KINDS = 32
"""Largest number of kinds of accelerators."""
MAX_TEXT = 100
"""Largest number of characters in a text."""
MAX_WHOLE = 2**53
"""Largest whole number: JSON of other languages has no larger ones."""

T = TypeVar("T")


class HintsError(ValueError):
    """Not the hints of a job, or of a later version; names the field."""


def parse(text: str | bytes, what: str) -> Any:
    """The value of a JSON text.

    Args:
        text: The text.
        what: Its name in errors.

    Raises:
        HintsError: It is too long, or not JSON. NaN and infinity are not JSON.
    """
    if len(text) > MAX_BYTES:
        raise HintsError(f"{what} ({len(text)} characters) must have at most {MAX_BYTES}")
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise HintsError(f"{what} must be JSON: {clean(str(error), 100)}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _short(value: object) -> str:
    """A value as an error quotes it: on one line, and not long."""
    try:
        quoted = clean(repr(value), 200)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, for example
        return f"<{type(value).__name__}>"
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


class Fields:
    """The fields of a JSON object, by paths such as `batch.current`.

    Args:
        told: The value of the JSON text.
        what: Its name in errors.
    """

    def __init__(self, told: Any, what: str = "the hints") -> None:
        self._told = told
        self._what = what

    def get(self, path: str, default: Any = ...) -> Any:
        """The value of a field.

        Args:
            path: Its path.
            default: Value if the last part of the path is missing; `...` makes that an error.

        Raises:
            HintsError: It is missing, or what it should be in is not an object.
        """
        value, seen = self._told, ""
        for name in path.split("."):
            if not isinstance(value, Mapping):
                raise HintsError(f"{seen or self._what} ({_short(value)}) must be an object")
            seen = f"{seen}.{name}" if seen else name
            if name not in value:
                if default is ...:
                    raise HintsError(f"{seen} is missing")
                return default
            value = value[name]
        return value

    def optional(self, path: str, read: Callable[[str], T]) -> T | None:
        """The result of `read` for the path; None if the value is null."""
        return None if self.get(path) is None else read(path)

    def whole(self, path: str, *, at_least: int = 0, at_most: int = MAX_WHOLE) -> int:
        """A whole number."""
        return whole(path, self.get(path), at_least=at_least, at_most=at_most)

    def real(self, path: str) -> float:
        """A finite number of at least 0."""
        return real(path, self.get(path))

    def text(self, path: str) -> str:
        """A text that is not empty and has no control characters."""
        return text(path, self.get(path))

    def truth(self, path: str) -> bool:
        """True or false."""
        value = self.get(path)
        if not isinstance(value, bool):
            raise HintsError(f"{path} ({_short(value)}) must be true or false")
        return value

    def entries(self, path: str, read: Callable[[str, Any], T]) -> tuple[T, ...]:
        """A list, each entry as `read` returns it for its path and value."""
        value = self.get(path)
        if not isinstance(value, list | tuple):
            raise HintsError(f"{path} ({_short(value)}) must be a list")
        if len(value) > MAX_ENTRIES:
            raise HintsError(
                f"{path} has {len(value)} entries, and must have at most {MAX_ENTRIES}"
            )
        return tuple(read(f"{path}[{i}]", each) for i, each in enumerate(value))

    def kinds(self, path: str) -> dict[str, Any]:
        """An object whose names are kinds of accelerators."""
        value = self.get(path)
        if not isinstance(value, Mapping):
            raise HintsError(f"{path} ({_short(value)}) must be an object")
        if len(value) > MAX_KINDS:
            raise HintsError(f"{path} has {len(value)} kinds, and must have at most {MAX_KINDS}")
        return {text(f"a kind in {path}", kind): each for kind, each in value.items()}


def whole(path: str, value: Any, *, at_least: int = 0, at_most: int = MAX_WHOLE) -> int:
    """The value as a whole number; an error names the path."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise HintsError(f"{path} ({_short(value)}) must be a whole number")
    if value < at_least:
        raise HintsError(f"{path} ({_short(value)}) must be at least {at_least}")
    if value > at_most:
        raise HintsError(f"{path} ({_short(value)}) must be at most {at_most}")
    return value


def real(path: str, value: Any) -> float:
    """The value as a finite number of at least 0; an error names the path."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HintsError(f"{path} ({_short(value)}) must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise HintsError(f"{path} ({_short(value)}) must be finite")
    if number < 0:
        raise HintsError(f"{path} ({number}) must be at least 0")
    return number


def text(path: str, value: Any) -> str:
    """The value as a text that is neither empty nor long; an error names the path."""
    if not isinstance(value, str):
        raise HintsError(f"{path} ({_short(value)}) must be a text")
    if not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise HintsError(
            f"{path} ({_short(value)}) must have 1 to {MAX_TEXT} characters, without control "
            "characters"
        )
    return value
