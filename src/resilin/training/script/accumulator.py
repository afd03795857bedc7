"""`Accumulator`: sums over all replicas, for metrics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from resilin.engine import devices
from resilin.engine.collectives import Collectives
from resilin.training.job import current_job
from resilin.training.state.snapshot import join, split

_Sum: TypeAlias = float | Tensor
"""A sum of this replica: a number, or one that is on a device whose queue the host does not read.

It is of type float64 there, so that it has the bits that a number of the host would have.
"""


class _Term:
    """The value of `stats[key]` outside `synchronized()`: it can only be added to."""

    def __init__(self, value: _Sum, key: Any) -> None:
        self._value = value
        self._key = key

    def __add__(self, other: Any) -> Any:
        return self._refuse()

    def __sub__(self, other: Any) -> Any:
        return self._refuse()

    def __iadd__(self, other: Any) -> _Term:
        return _Term(_add(self._value, _number(other)), self._key)

    def __isub__(self, other: Any) -> _Term:
        return _Term(_add(self._value, -_number(other)), self._key)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            f"stats[{self._key!r}] is a part of a sum: other replicas have the rest. Read it "
            "within `with stats.synchronized():`, on all replicas"
        )

    __radd__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __float__ = __int__ = __bool__ = __format__ = __repr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _same_everywhere(peers: Collectives, text: str) -> bool:
    """Whether all replicas hold the same text; decided by all of them alike."""
    digest = float(zlib.crc32(text.encode()))
    extremes = torch.tensor([digest, -digest], dtype=torch.float64)
    peers.reduce(extremes, "max")
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def _number(value: Any) -> _Sum:
    """A copy of a number, on its device if reading it would wait for what is queued there."""
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    if value.numel() != 1 or value.is_complex() or not devices.of(value.device).queues:
        return float(value)
    copied: Tensor = value.to(torch.float64, copy=True)
    return copied.reshape(())


def _add(one: _Sum, other: _Sum) -> _Sum:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # A script may train on several devices.
        return one + other.to(one.device, non_blocking=True)
    return one + other


def _fetch(sums: Mapping[Any, _Sum]) -> Callable[[], dict[Any, float]]:
    """Begins to read sums, all those of a device together.

    Returns:
        A function that waits for the numbers and returns them; any thread may call it.
    """
    by_device: dict[torch.device, list[Any]] = {}
    for key, value in sums.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(key)
    known = dict(sums)
    fetched = [
        (keys, devices.Fetched(torch.stack([known[key] for key in keys])))
        for keys in by_device.values()
    ]

    def read() -> dict[Any, float]:
        for keys, numbers in fetched:
            known.update(zip(keys, numbers.read(), strict=True))
        return known

    return read


class Accumulator(MutableMapping[Any, Any]):
    """A dict of sums that are added to on each replica and read over all of them.

    Values start at 0. Outside `synchronized()` a value can only be added to (`+=`, `-=`, `update`)
    or set (`=`, on this replica); within it, all values are sums over all replicas. Adding a tensor
    of a GPU does not wait for it: the sum stays there until `synchronized()` reads all values at
    once.

    Examples:
        >>> stats = Accumulator()
        >>> stats["correct"] += 3
        >>> with stats.synchronized():
        ...     stats["correct"]
        3.0
    """

    def __init__(self) -> None:
        self._sums: dict[Any, _Sum] = {}
        self._total: dict[Any, float] | None = None
        self._job = job = current_job()
        # One created in the middle of an epoch is created there again, and starts from zero.
        if job.recovery is None or job.timeline.epoch_is_new:
            when = "start" if job.recovery is None else f"epoch {job.epoch}"
            job.registry.add_summed(when, self, first_replica=job.engine.membership.is_first)

    def __getitem__(self, key: Any) -> Any:
        if self._total is not None:
            return self._total[key]
        return _Term(self._sums.get(key, 0.0), key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._total is not None:
            raise RuntimeError(
                f"stats[{key!r}] cannot be changed within synchronized(): it holds the sum over "
                "all replicas"
            )
        self._sums[key] = value._value if isinstance(value, _Term) else _number(value)
        self._keep_for_others()

    def __delitem__(self, key: Any) -> None:
        if self._total is None:
            del self._sums[key]
            self._keep_for_others()
            return
        del self._total[key]
        # Only others may have added to it.
        self._sums.pop(key, None)
        self._keep_for_others()

    def _keep_for_others(self) -> None:
        """Keeps the sums where those that outlive this replica find them, in a live job.

        What is on a device stays there: they lack it.
        """
        live = self._job.live
        if live is not None and not any(isinstance(each, Tensor) for each in self._sums.values()):
            live.sums_changed()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sums if self._total is None else self._total)

    def __len__(self) -> int:
        return len(self._sums if self._total is None else self._total)

    def __repr__(self) -> str:
        if self._total is None:
            return f"Accumulator({list(self._sums)}, not synchronized)"
        return f"Accumulator({self._total})"

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Adds each value to the sum of its key."""
        for key, value in {**dict(other), **more}.items():
            self[key] += value

    def subtract(self, other: Mapping[Any, Any]) -> None:
        """Subtract each value from the sum of its key."""
        for key, value in other.items():
            self[key] -= value

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sums over all replicas, all keys at once; within the block values can be read.

        All replicas must enter it. They may have different keys, at a higher cost.
        """
        self._total = self._reduce()
        try:
            yield self
        finally:
            self._total = None

    def _reduce(self) -> dict[Any, float]:
        # From here on they are numbers, which are not read again.
        self._sums = dict(_fetch(self._sums)())
        # As JSON: a replica that was lost to the others meanwhile is told the answer.
        answer = self._job.engine.ask(lambda peers: split("Accumulator", self._add_up(peers))[0])
        total: dict[Any, float] = join(answer, {})
        live = self._job.live
        if live is not None:
            live.sums_read()
        return total

    def _add_up(self, peers: Collectives) -> dict[Any, float]:
        # The processes of one replica have seen the same data.
        membership = self._job.engine.membership
        share = membership.num_replicas / membership.num_processes
        sums = {key: value * share for key, value in _fetch(self._sums)().items()}
        if peers.num == 1:
            return sums
        keys = sorted(sums, key=repr)
        if _same_everywhere(peers, repr(keys)):
            values = torch.tensor([sums[key] for key in keys], dtype=torch.float64)
            peers.reduce(values)
            return dict(zip(keys, values.tolist(), strict=True))
        total: dict[Any, float] = {}
        for tree in peers.gather(split("Accumulator", sums)[0]):
            for key, value in join(tree, {}).items():
                total[key] = total.get(key, 0.0) + value
        return total

    def state_dict(self) -> dict[str, Any]:
        """This replica's sums. Waits for the device that has them."""
        return {"sums": _fetch(self._sums)()}

    def begin_state_dict(self) -> Callable[[], dict[str, Any]]:
        """Begin to take the state, without waiting for a device.

        Returns:
            A function that waits, and returns what `state_dict` would have returned now; any thread
            may call it.
        """
        read = _fetch(self._sums)
        return lambda: {"sums": read()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._sums = dict(state["sums"])
