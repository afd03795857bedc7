"""Tensors within what a model takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from resilin.compat.torch_names import tree_leaves


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """All tensors in containers, dataclasses, and whatever else is registered as a pytree.

    Other objects are not searched: their tensors are not found.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            # Before pytree: it does not know subclasses of dict, such as transformers' outputs.
            yield from tensors_in(*value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from tensors_in(*value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from tensors_in(
                *(getattr(value, field.name, None) for field in dataclasses.fields(value))
            )
        else:
            leaves = tree_leaves(value)
            if len(leaves) != 1 or leaves[0] is not value:
                yield from tensors_in(*leaves)
