"""State of callbacks, found by their capabilities and not by their names.

A callback with `state_dict()` and `load_state_dict()` is asked for its state. For any other one its
attributes are kept: plain data (numbers, strings, arrays, tensors and containers of them) that
training has changed, and objects that have a state themselves (variables of Keras, random
generators, `state_dict`), also within helper objects. An attribute that nothing has changed comes
from the script: a patience that is edited between two starts takes effect.

Two limits. Arrays and lists from before training that are larger than `LARGE` are compared by
identity, so a change in place is not noticed. A changed attribute that cannot be kept is named in a
warning when a job resumes, unless the callback has created it again by then.
"""

from __future__ import annotations

import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from resilin.compat.keras_names import REMADE, SET_BY_FIT, choose_comparison
from resilin.compat.torch_names import version_of
from resilin.core._warn import warn

LARGE = 2**17
"""Largest array or list from before training that is compared, in elements."""
_DEPTH = 3
"""Depth to which helper objects of a callback are searched."""
_SCALARS = (bool, int, float, complex, str, bytes)
_SEQUENCES = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, Counter)
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    np.ufunc,
)
"""Code has no state."""
_LIBRARIES = ("keras", "torch", "transformers")
"""Packages whose objects initialise themselves."""
_COMPARISON = "monitor_op"
"""Comparison of a callback that monitors a value; chosen at the end of its first epoch."""
_NUMBERS = {bool, int, float, str}
_ABSENT: Any = object()
_FLOATS = "float64"
"""Key of a packed list of numbers, which as text would take long to write in each copy."""


class Memory:
    """The memory of one object: a callback, or a helper that it holds.

    Args:
        thing: The object, as the script has made it.
        without: Objects that are kept elsewhere, such as the model.
        made: Whether it was created during training: then all of its state is kept.
        depth: Depth to which its attributes are searched.
    """

    def __init__(
        self,
        thing: Any,
        without: Collection[int] = (),
        *,
        made: bool = False,
        depth: int = _DEPTH,
    ) -> None:
        self.thing = thing
        self._without = without
        self._depth = depth
        self._asked = _has_state_dict(thing)
        self._before: dict[str, Any] = {}
        self._held: dict[str, _Held | Memory] = {}
        self._changed: set[str] = set()
        if self._asked or made:
            return
        for name, value in self._attributes():
            plain = _is_plain(value, value)
            self._before[name] = _copy(value) if plain else value
            if not plain:
                self._hold(name, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, value in list(self.thing.__dict__.items()):
            skipped = name in SET_BY_FIT or name in REMADE
            if not skipped and id(value) not in self._without:
                yield name, value

    def _hold(self, name: str, value: Any) -> _Held | Memory | None:
        """Access to the state of an attribute that is not plain data; None if it has none."""
        held = self._held.get(name)
        if held is not None and held.thing is value:
            return held
        made = name in self._before and self._before[name] is not value
        held = _Held.of(value, self._without, made=made)
        if held is None and self._depth and _is_helper(value, self.thing):
            within = {*self._without, id(self.thing)}
            held = Memory(value, within, made=made, depth=self._depth - 1)
        if held is not None:
            self._held[name] = held
        return held

    def take(self) -> dict[str, Any]:
        """The current state: numbers, strings, arrays and containers of them."""
        if self._asked:
            return {"asked": self.thing.state_dict()}
        plain: dict[str, Any] = {}
        inner: dict[str, Any] = {}
        lost: dict[str, str] = {}
        for name, value in self._attributes():
            before = self._before.get(name, _ABSENT)
            if _is_plain(value, before):
                if name in self._changed or not _same(value, before):
                    self._changed.add(name)
                    plain[name] = _pack(value)
            elif (held := self._hold(name, value)) is not None:
                if state := held.take():
                    inner[name] = state
            elif value is not before:
                lost[name] = type(value).__name__
        return {"plain": plain, "inner": inner, "lost": lost} if plain or inner or lost else {}

    def give(self, taken: Mapping[str, Any], path: str) -> None:
        """Restore a state; other changes since the object was created are undone.

        Args:
            taken: Result of `take`.
            path: Name of the object in warnings.
        """
        if self._asked:
            if "asked" in taken:
                self.thing.load_state_dict(taken["asked"])
            return
        own = self.thing.__dict__
        plain = taken.get("plain", {})
        if own.get(_COMPARISON, _ABSENT) is None and "min_delta" in plain:
            # Keras gives `min_delta` its sign when it chooses the comparison, and then only.
            choose_comparison(self.thing)
        known = {name for part in ("plain", "inner", "lost") for name in taken.get(part, ())}
        for name in self._before.keys() & own.keys() - known:
            before = self._before[name]
            if _is_plain(before, before) and not _same(own[name], before):
                own[name] = _copy(before)
        for name, value in plain.items():
            own[name] = _refill(own.get(name), _unpack(value))
            self._changed.add(name)
        for name, state in taken.get("inner", {}).items():
            held = self._hold(name, own[name]) if name in own else None
            if held is None:
                _warn(path, name, "an object")
            else:
                held.give(state, f"{path}.{name}")
        for name, kind in taken.get("lost", {}).items():
            if name not in own or own[name] is self._before.get(name, _ABSENT):
                _warn(path, name, f"a {kind}")


def _warn(path: str, name: str, kind: str) -> None:
    warn(
        f"{path}.{name} ({kind}) has changed in training and cannot be kept: after this restart it "
        f"starts from its initial state; give {path.partition('.')[0]} state_dict() and "
        "load_state_dict()"
    )


class _Held:
    """An object within a callback that has a state of its own, and access to it."""

    def __init__(
        self,
        thing: Any,
        take: Callable[[], Any],
        give: Callable[[Any], Any],
        mark: Callable[[], Any] | None = None,
    ) -> None:
        self.thing = thing
        self._take, self._give, self._mark = take, give, mark
        self._before = None if mark is None else mark()

    def take(self) -> dict[str, Any]:
        """Its state; empty if it is known not to have changed."""
        if self._mark is not None and self._mark() == self._before:
            return {}
        self._before = None
        return {"state": self._take()}

    def give(self, taken: Mapping[str, Any], path: str) -> None:
        self._before = None
        self._give(taken["state"])

    @classmethod
    def of(cls, thing: Any, without: Collection[int], *, made: bool) -> _Held | None:
        """Access to the state of an object; None if it has none that is known."""
        held = cls._of(thing, without)
        if held is not None and made:
            held._before = None
        return held

    @classmethod
    def _of(cls, thing: Any, without: Collection[int]) -> _Held | None:
        if isinstance(thing, np.random.Generator):
            bits = thing.bit_generator

            def set_bits(state: Any) -> None:
                bits.state = state

            return cls(thing, lambda: bits.state, set_bits)
        if isinstance(thing, np.random.RandomState):
            return cls(thing, lambda: thing.get_state(legacy=False), thing.set_state)
        if isinstance(thing, random.Random):
            return cls(thing, thing.getstate, thing.setstate)
        if isinstance(thing, torch.Generator):
            return cls(thing, thing.get_state, thing.set_state)
        variables = [thing] if _is_variable(thing) else getattr(thing, "variables", None)
        if isinstance(variables, list) and all(map(_is_variable, variables)):
            return cls._variables(thing, variables, without)
        return (
            cls(thing, thing.state_dict, thing.load_state_dict) if _has_state_dict(thing) else None
        )

    @classmethod
    def _variables(cls, thing: Any, variables: list[Any], without: Collection[int]) -> _Held:
        own = [variable for variable in variables if id(variable) not in without]

        def take() -> list[Tensor]:
            return [variable.value.detach() for variable in own]

        def give(state: list[Tensor]) -> None:
            for variable, value in zip(own, state, strict=True):
                variable.assign(value)

        def mark() -> list[tuple[int, int]]:
            return [(id(variable.value), version_of(variable.value)) for variable in own]

        if not own:
            return cls(thing, list, lambda state: None, lambda: None)

        return cls(thing, take, give, mark)


def _is_variable(thing: Any) -> bool:
    """Whether it is a variable of Keras, whose value a tensor holds."""
    return callable(getattr(thing, "assign", None)) and isinstance(
        getattr(thing, "value", None), Tensor
    )


def _has_state_dict(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_helper(value: Any, owner: Any) -> bool:
    """Whether an object is from the package of the class that holds it, and not of a library."""
    if isinstance(value, _CODE) or not hasattr(value, "__dict__"):
        return False
    packages = [type(thing).__module__.partition(".")[0] for thing in (value, owner)]
    return packages[0] == packages[1] not in _LIBRARIES


# Plain data ----------------------------------------------------------------------------------


def _is_plain(value: Any, before: Any = None) -> bool:
    """Whether it is data that can be saved and restored exactly."""
    kind = type(value)
    if value is None or kind in _SCALARS:
        return kind is not complex
    if isinstance(value, Tensor):
        return value.layout is torch.strided
    if kind is np.ndarray:
        return bool(value.dtype.kind in "biufc" and value.dtype.isnative)
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufSU"
    if kind in _SEQUENCES:
        # First by their types: long lists of numbers are common.
        return {*map(type, value)} <= _NUMBERS or all(map(_is_plain, value))
    if kind in _MAPPINGS or (kind is defaultdict and type(before) is defaultdict):
        return all(type(key) in (str, int, float, bool, tuple) for key in value) and all(
            map(_is_plain, value.values())
        )
    return False


def _copy(value: Any) -> Any:
    """A copy, so that later changes in place can be seen; large values are not copied."""
    kind = type(value)
    if kind in (np.ndarray, list, deque) and _size(value) > LARGE:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= LARGE else value
    if kind is np.ndarray:
        return value.copy()
    if kind is deque:
        return deque(map(_copy, value), value.maxlen)
    if kind in _SEQUENCES:
        return kind(map(_copy, value))
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: _copy(item) for key, item in value.items()})
        return made
    return value


def _size(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else len(value)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


def _pack(value: Any) -> Any:
    if type(value) is list and len(value) > 64 and {*map(type, value)} == {float}:
        return {_FLOATS: np.array(value, dtype=np.float64).tobytes()}
    if type(value) is dict:
        return {key: _pack(item) for key, item in value.items()}
    return dict(value) if type(value) is defaultdict else value


def _unpack(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_FLOATS} and type(value[_FLOATS]) is bytes:
            return np.frombuffer(value[_FLOATS], dtype=np.float64).tolist()
        return {key: _unpack(item) for key, item in value.items()}
    return value


def _refill(present: Any, value: Any) -> Any:
    """Fill a defaultdict in place: its factory cannot be saved."""
    if type(present) is defaultdict and type(value) is dict:
        present.clear()
        present.update(value)
        return present
    return value
