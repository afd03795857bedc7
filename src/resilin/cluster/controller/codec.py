"""Frozen records to and from the types of JSON, by their type hints."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_R = TypeVar("_R")


def to_json(value: Any) -> Any:
    """A value of records, tuples, mappings, enums and plain values as JSON has it.

    Fields that have their default are left out.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(item)
            for field in fields(value)
            if (item := getattr(value, field.name)) != _default(field)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[_R], told: Any) -> _R:
    """The record of this type that `to_json` was given.

    Fields that it does not know are ignored: a later version may have written them.

    Raises:
        ValueError: A field is missing, or has another type.
    """
    value: _R = _read(kind, told, kind.__name__)
    return value


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, told: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return told
    if origin in (Union, types.UnionType):
        return _read_union(arguments, told, path)
    if origin is tuple:
        if not isinstance(told, list):
            raise ValueError(f"{path} ({told!r}) must be a list")
        if arguments[1:] == (...,):
            return tuple(_read(arguments[0], item, path) for item in told)
        if len(told) != len(arguments):
            raise ValueError(f"{path} ({told!r}) must have {len(arguments)} items")
        return tuple(_read(each, item, path) for each, item in zip(arguments, told, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(told, Mapping):
            raise ValueError(f"{path} ({told!r}) must be an object")
        return {name: _read(arguments[1], item, f"{path}.{name}") for name, item in told.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return _read_record(kind, told, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(told)
    if kind is float and isinstance(told, int) and not isinstance(told, bool):
        return float(told)
    if not isinstance(told, kind) or (isinstance(told, bool) and kind is not bool):
        raise ValueError(f"{path} ({told!r}) must be of type {kind.__name__}")
    return told


def _read_union(arguments: tuple[Any, ...], told: Any, path: str) -> Any:
    if told is None and type(None) in arguments:
        return None
    (kind,) = (each for each in arguments if each is not type(None))
    return _read(kind, told, path)


def _read_record(kind: type, told: Any, path: str) -> Any:
    if not isinstance(told, Mapping):
        raise ValueError(f"{path} ({told!r}) must be an object")
    hints = _hints(kind)
    given = {}
    for field in fields(kind):
        if field.name in told:
            given[field.name] = _read(hints[field.name], told[field.name], f"{path}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}.{field.name} is missing")
    return kind(**given)
