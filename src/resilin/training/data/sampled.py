"""Notices an order of samples that another process, or another life of this one, does not repeat.

Files that are shuffled without a seed, or come from a set or from `os.listdir`, have another order
in each process, and positions are then other samples. Samples are not fetched for it: that may be
slow, draw random numbers, or open a file that workers have to open themselves. Lists, arrays and
tensors that the dataset holds, with one entry per sample, are looked at instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

_PLACES = 16
"""Entries of each attribute that are looked at."""
_ATTRIBUTES = 16
"""Attributes that are looked at, at most."""
_WIDTH = 8
"""Hexadecimal digits for each entry."""
_NUMBERS = 64
"""Numbers of an array that are looked at."""

Sampled = dict[str, str]
"""Hashes of entries, by the attribute that holds them."""


def sampled(dataset: Any) -> Sampled:
    """Hashes of some entries of what a dataset holds, by attribute.

    Attributes whose entries are alike, such as labels of two classes, say little of the order and
    are left out.
    """
    found: Sampled = {}
    for name, held in _held(dataset, "dataset", 3):
        num = len(held)
        places = sorted({k * (num - 1) // (_PLACES - 1) for k in range(_PLACES)})
        rows = held.iloc if hasattr(held, "iloc") else held
        entries = _without_prefix([_leaves(rows[place]) for place in places])
        codes = [
            blake2b(repr(each).encode(), digest_size=_WIDTH // 2).hexdigest() for each in entries
        ]
        if all(entries) and len(set(codes)) > max(1, len(codes) // 2):
            # Strings name samples; numbers may be scores that change.
            kind = "s" if any(isinstance(leaf, str) for leaf in entries[0]) else "n"
            found[name] = f"{kind}{len(held)}:{''.join(codes)}"
        if len(found) == _ATTRIBUTES:
            break
    return found


def reordered(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Attributes that tell of another order; none if the order is the same, or nothing tells.

    Another order leaves next to no entry where it was. Where the content has changed, such as by
    negatives that are drawn again, another attribute of the same object stays as it was; only names
    of samples count by themselves.
    """
    moved = {name: _moved(before[name], now[name]) for name in before if name in now}
    owners: dict[str, list[str]] = {}
    for name in moved:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return [
        name
        for name, has_moved in moved.items()
        if has_moved
        and (
            now[name].startswith("s")
            or all(moved[each] for each in owners[name.rpartition(".")[0]])
        )
    ]


def _moved(before: str, now: str) -> bool:
    (kind, _, one), (other_kind, _, other) = before.partition(":"), now.partition(":")
    if kind != other_kind or len(one) != len(other):
        return False  # it is longer or shorter than it was
    places = range(0, len(one), _WIDTH)
    same = sum(one[k : k + _WIDTH] == other[k : k + _WIDTH] for k in places)
    return same <= len(places) // 8


def _held(owner: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """What an object holds with one entry per sample, and what the datasets in it hold."""
    if type(owner) in (list, tuple) or _is_array(owner):
        yield name, owner
        return
    num = len(owner)
    for key, value in getattr(owner, "__dict__", {}).items():
        if _is_rows(value, num) or (type(value) in (list, tuple) and len(value) == num > 1):
            yield f"{name}.{key}", value
            continue
        parts = enumerate(value) if type(value) in (list, tuple) and len(value) <= 16 else ()
        for place, part in [(None, value), *parts]:
            path = f"{name}.{key}" if place is None else f"{name}.{key}[{place}]"
            if place is not None and _is_rows(part, num):
                yield path, part
            elif isinstance(part, Dataset) and depth and not isinstance(part, IterableDataset):
                yield from _held(part, path, depth - 1)


def _is_rows(value: Any, num: int) -> bool:
    return _is_array(value) and len(value) == num > 1


def _is_array(value: Any) -> bool:
    if isinstance(value, Tensor):
        # A device is not read for it.
        return value.dim() > 0 and value.device.type == "cpu" and value.layout is torch.strided
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return type(value).__module__.startswith("pandas.") and hasattr(value, "iloc")


def _leaves(entry: Any) -> list[Any]:
    """Strings, and numbers as text, of one entry; none if it has others."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, os.PathLike):
        return [os.fspath(entry)]
    if isinstance(entry, bool | int | float | np.generic):
        return [(str(entry),)]
    if isinstance(entry, bytes):
        return [(entry[:256],)]
    if isinstance(entry, Tensor | np.ndarray):
        if isinstance(entry, Tensor):
            if entry.device.type != "cpu" or entry.layout is not torch.strided:
                return []
            entry = entry.detach()
        flat = entry.reshape(-1)
        few = flat[:: max(1, len(flat) // _NUMBERS)]
        return [(tuple(entry.shape), tuple(few.tolist()))]
    if type(entry).__module__.startswith("pandas."):
        entry = entry.tolist()
    parts = entry.values() if isinstance(entry, dict) else entry
    if isinstance(parts, str) or not isinstance(entry, dict | list | tuple):
        return []
    return [leaf for part in list(parts)[:8] for leaf in _leaves(part)]


def _without_prefix(entries: list[list[Any]]) -> list[list[Any]]:
    """Entries without what their strings have in common: the directory may be another one."""
    if len({len(each) for each in entries}) != 1:
        return entries
    columns = []
    for column in zip(*entries, strict=True):
        if all(isinstance(leaf, str) for leaf in column):
            low, high = min(column), max(column)
            alike = (k for k, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1])
            start = next(alike, len(low))
            column = tuple(leaf[start:] for leaf in column)
        columns.append(column)
    return [list(each) for each in zip(*columns, strict=True)]
