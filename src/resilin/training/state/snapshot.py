"""A snapshot: the whole state of a job between two steps, as JSON and tensors and nothing else.

The result of `state_dict()` is split into tensors, by name, and a tree that JSON can hold. Nothing
in it can execute code when it is read, neither from memory nor from a checkpoint. Both the memory
copy and the checkpoint store snapshots; this module knows neither.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from resilin.core.recovery import Version as Version
from resilin.training.state.meshes import is_split, sharded
from resilin.training.state.shards import Held, Sharded

Json = Any
"""A JSON value: None, bool, int, float, str, and lists and dicts of them."""

_KIND = "$"
"""The one key of a JSON object that stands for something JSON has no form for."""
_MAPPINGS: dict[str, type[Any]] = {"ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "deque": deque, "size": torch.Size}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a job."""

    version: Version
    """Version of the state."""
    tree: dict[str, Json]
    """Per registered name, its state with tensors replaced by their names."""
    tensors: dict[str, Held] = field(repr=False)
    """All tensors, by a name that begins with that of their owner: whole, or pieces of them."""

    @property
    def num_bytes(self) -> int:
        """Size of what is here of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self, name: str) -> Any:
        """The state of one registered name, as its `state_dict()` gave it."""
        return join(self.tree[name], self.tensors)


class Branch:
    """A mapping with nothing but tensors in it, as it was last taken apart.

    A state is taken apart again and again, and most of it has the same tensors each time. Where
    types and keys are the same, so are the tree and the names: those that a tensor has that comes
    first to its path, so that all replicas have the same, whatever they remember.

    Args:
        kind: Type of the mapping.
        items: Its keys, each with the name of its tensor, or with a branch of the same kind.
        tree: What `split` made of it.
    """

    __slots__ = ("items", "kind", "tree")

    def __init__(self, kind: Any, items: list[tuple[Any, str | Branch]], tree: Json) -> None:
        self.kind = kind
        self.items = items
        self.tree = tree

    def follow(self, value: Any, found: list[tuple[str, Held]]) -> bool:
        """Finds the tensors of the mapping as it is now; False if it is not the same any more."""
        if type(value) is not self.kind or len(value) != len(self.items):
            return False
        for (key, item), (known, below) in zip(value.items(), self.items, strict=True):
            # 1 is True, in Python and not in JSON.
            if key != known or type(key) is not type(known):
                return False
            if isinstance(below, Branch):
                if not below.follow(item, found):
                    return False
            elif type(item) is Tensor and item.layout is torch.strided:
                found.append((below, item.detach() if item.requires_grad else item))
            elif is_split(item):
                found.append((below, sharded(below, item)))
            else:
                return False
        return True


Branches: TypeAlias = dict[str, Branch]
"""Parts of states by their paths, for `split`."""


def split(
    name: str,
    state: Any,
    tensors: dict[str, Held] | None = None,
    branches: Branches | None = None,
) -> tuple[Json, dict[str, Held]]:
    """Takes a state apart.

    Args:
        name: Whose state it is; the names of its tensors begin with it.
        state: Numbers, strings, bytes, None, tensors (whole, DTensors or `Sharded`), numpy arrays
            and numbers, and lists, tuples, sets, deques and dicts of them.
        tensors: Tensors of other states, to which those of this one are added.
        branches: What earlier calls have found, and this one adds to. Trees have parts in common
            then, and must not be changed.

    Returns:
        The tree, and the tensors by name. Tensors are those of the state and not copies.

    Raises:
        ValueError: Something else is in it; the message says what, and where.
    """
    tensors = {} if tensors is None else tensors
    return _split(name, state, tensors, {} if branches is None else branches), tensors


def _split(path: str, value: Any, tensors: dict[str, Held], branches: Branches) -> Json:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "of": repr(float(value))}
    if is_split(value):
        value = sharded(path, value)
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return {_KIND: "tensor", "of": _put(tensors, path, value.detach())}
    if isinstance(value, Sharded):
        return {_KIND: "tensor", "of": _put(tensors, path, value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
        tensor = torch.from_numpy(np.require(value, requirements=("C", "W")))
        return {_KIND: "array", "of": _put(tensors, path, tensor)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _split_mapping(path, value, tensors, branches)
    if isinstance(value, list | tuple | set | deque):
        items = [_split(f"{path}.{i}", item, tensors, branches) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        kind = next(name for name, cls in _SEQUENCES.items() if isinstance(value, cls))
        if isinstance(value, torch.Size):
            kind = "size"
        if isinstance(value, deque) and value.maxlen is not None:
            return {_KIND: kind, "of": items, "maxlen": value.maxlen}
        return {_KIND: kind, "of": items}
    raise ValueError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
        "a state is made of numbers, strings, tensors and containers of them, because reading it "
        "back must not execute anything"
    )


def _put(tensors: dict[str, Held], path: str, tensor: Held) -> str:
    """Files a tensor under its path, or beside it: keys with dots make the same path twice."""
    name = path
    for number in itertools.count(1):
        if name not in tensors:
            break
        name = f"{path}#{number}"
    tensors[name] = tensor
    return name


def _split_mapping(
    path: str, value: Mapping[Any, Any], tensors: dict[str, Held], branches: Branches
) -> Json:
    known = branches.pop(path, None)
    if known is not None:
        found: list[tuple[str, Held]] = []
        if known.follow(value, found) and tensors.keys().isdisjoint(dict(found)):
            tensors.update(found)
            branches[path] = known
            return known.tree
    simple = type(value) is dict and _KIND not in value and all(type(key) is str for key in value)
    trees: list[Json] = []
    for key, item in value.items():
        if not simple and not isinstance(key, str | int | float | bool | tuple | None):
            raise ValueError(
                f"{path} has the key {key!r} of type {type(key).__qualname__}; keys must be "
                "strings, numbers, or tuples of them"
            )
        trees.append(_split(f"{path}.{key}", item, tensors, branches))
    tree: Json
    if simple:
        tree = dict(zip(value, trees, strict=True))
    else:
        keys = [_split(path, key, tensors, branches) for key in value]
        kind = next((name for name, cls in _MAPPINGS.items() if isinstance(value, cls)), "dict")
        tree = {_KIND: kind, "of": [list(pair) for pair in zip(keys, trees, strict=True)]}
    items = [
        (key, _below(f"{path}.{key}", item, sub, branches))
        for (key, item), sub in zip(value.items(), trees, strict=True)
    ]
    if items and all(type(key) in (str, int) and below is not None for key, below in items):
        branches[path] = Branch(type(value), cast("list[tuple[Any, str | Branch]]", items), tree)
    return tree


def _below(path: str, value: Any, tree: Json, branches: Branches) -> str | Branch | None:
    """The name of a tensor, or the branch of a mapping; None if it has other things in it."""
    if type(value) is Tensor or is_split(value):
        # A name that had to avoid another one may be free the next time.
        return path if tree["of"] == path else None
    branch = branches.get(path)
    # Keys with dots make the same path twice.
    return branch if branch is not None and branch.tree is tree else None


def join(tree: Json, tensors: Mapping[str, Held]) -> Any:
    """Puts a state together again.

    Raises:
        ValueError: The tree is not one that `split` made, or a tensor is missing.
    """
    try:
        return _join(tree, tensors)
    except TypeError as error:
        raise ValueError(f"this is not the tree of a snapshot: {error}") from error


def _join(tree: Json, tensors: Mapping[str, Held]) -> Any:
    if isinstance(tree, list):
        return [_join(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _KIND not in tree:
        return {key: _join(item, tensors) for key, item in tree.items()}
    kind, of = tree[_KIND], tree.get("of")
    if kind in ("tensor", "array"):
        if of not in tensors:
            raise ValueError(f"the tensor {of!r} is missing from the snapshot")
        tensor = tensors[str(of)]
        if kind == "tensor":
            return tensor
        assert isinstance(tensor, Tensor), "arrays are not split"
        return tensor.numpy().copy()
    if kind == "float":
        return float(of)  # type: ignore[arg-type]
    if kind == "bytes":
        return base64.b64decode(of)  # type: ignore[arg-type]
    if kind == "dtype":
        dtype = getattr(torch, str(of), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    elif kind in _SEQUENCES:
        items = [_join(item, tensors) for item in of or ()]
        return deque(items, tree.get("maxlen")) if kind == "deque" else _SEQUENCES[kind](items)
    elif kind == "dict" or kind in _MAPPINGS:
        pairs = {_join(key, tensors): _join(item, tensors) for key, item in of or ()}
        return _MAPPINGS.get(kind, dict)(pairs)
    raise ValueError(f"a snapshot cannot hold a {kind!r} of {of!r}")


def names(tree: Json) -> Iterator[str]:
    """The names of the tensors in a tree."""
    if isinstance(tree, list):
        for item in tree:
            yield from names(item)
    elif isinstance(tree, dict):
        if tree.get(_KIND) in ("tensor", "array"):
            yield tree["of"]
        else:
            yield from names(list(tree.values()))
