"""Collectives of control: what the processes of a job tell each other outside the steps.

On the wire there are JSON and the raw bytes of tensors, and nothing that could execute code where
it is read. A call that fails on one process fails on all of them, with the same words: errors
travel as text, and no process has to be able to rebuild an exception of another.

Gradients are not reduced here: they have a group of their own, see `Engine.gradient_group`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

Json = Any
"""A JSON value: None, bool, int, float, str, lists, and dicts whose keys are strings."""

_CHUNK = 64 * 2**20
"""Most bytes that are sent at a time."""
_PACK = 16 * 2**20
"""Tensors are sent together up to so many bytes: each sending has a cost of its own."""
_LENGTH = 8
"""Bytes that say how long the JSON of a message is."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Begun(Protocol):
    """A collective that was begun, as `torch.distributed.Work` is one."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Waits for its end.

        Raises:
            RuntimeError: It failed, or has not ended in time.
        """
        ...


Wait = Callable[[Begun], Any]
"""Waits for a collective that was begun."""


class Messages:
    """Messages from one process to another that were begun, as one collective.

    gloo says nothing of the end of a message before it is waited for, and takes a time limit that
    passes for the loss of its group. So a thread waits for them, without one.

    Args:
        works: The messages.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        args = (works,)
        threading.Thread(target=self._run, args=args, name="resilin-messages", daemon=True).start()

    def _run(self, works: Sequence[dist.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self._over.set()

    def is_completed(self) -> bool:
        """Whether all of them have ended, or one has failed."""
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end of all.

        Raises:
            RuntimeError: One failed, or they have not ended in time.
        """
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"messages have not ended within {timeout}")
        if self._error is not None:
            raise self._error
        return True


class Guarded(NamedTuple):
    """A gloo group whose collectives are given up when one of its members is lost."""

    group: dist.ProcessGroup
    """The group."""
    wait: Wait
    """Waits for one of its collectives; raises `PeerLost` if that cannot end any more."""


Group: TypeAlias = dist.ProcessGroup | Guarded
"""A gloo group of processes, with or without a way to give its collectives up."""


def wait_for(work: Begun) -> None:
    """Waits for a collective until it ends, or until the timeout of its group."""
    work.wait()


class State(NamedTuple):
    """A message that has tensors in it."""

    tree: Json
    """All of it but the tensors."""
    tensors: Mapping[str, Tensor]
    """The tensors, by name; those that arrive are on the CPU."""


@dataclass(frozen=True, slots=True)
class Wire(Generic[T]):
    """Codec of one kind of value, to JSON and back."""

    to_json: Callable[[T], Json]
    from_json: Callable[[Json], T]


def _unchanged(value: Any) -> Any:
    return value


PLAIN: Wire[Any] = Wire(_unchanged, _unchanged)
"""The wire of what is JSON already."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result of a call on one process: a value, or an error as text."""

    value: T | None
    """The return value of the call."""
    kind: str | None = None
    """Name of the error, if it failed."""
    text: str = ""
    """Words of the error."""

    def to_json(self, wire: Wire[T]) -> Json:
        """The outcome as JSON."""
        value = None if self.kind is not None else wire.to_json(self.value)  # type: ignore[arg-type]
        return [value, self.kind, self.text]

    @classmethod
    def from_json(cls, state: Json, wire: Wire[T]) -> Outcome[T]:
        """The reverse of `to_json`."""
        value, kind, text = state
        return cls(None if kind is not None else wire.from_json(value), kind, text)


class Collectives:
    """The processes of a group; without a group, this process alone.

    All processes must make the same calls in the same order, and no two threads may use one group
    at the same time. A process that is gone is an error, when its connection breaks or when the
    timeout of the group has passed.

    Args:
        group: A gloo group; None for a job of one process.
    """

    kinds: ClassVar[Mapping[str, type[Exception]]] = {"ValueError": ValueError}
    """Errors that mean something to the caller, by the names they travel under."""
    failure: ClassVar[type[Exception]] = RuntimeError
    """Exception for all other errors."""

    def __init__(self, group: Group | None) -> None:
        self._wait: Wait = wait_for
        if isinstance(group, Guarded):
            group, self._wait = group
        self._group = group
        self.num = 1 if group is None else dist.get_world_size(group)
        """Processes in the group."""
        self.process = 0 if group is None else dist.get_rank(group)
        """Number of this process in the group."""

    # Values --------------------------------------------------------------------------------

    def gather(self, value: Json) -> list[Json]:
        """The values of all processes, known to all of them. For small things."""
        return [state.tree for state in self.gather_states(State(value, {}))]

    def gather_states(self, state: State) -> list[State]:
        """The same for messages with tensors."""
        mine = _packed(state)
        return [_unpacked(each) for each in self._exchange(mine)]

    def broadcast(self, value: Json, source: int) -> Json:
        """The value of the process `source`, known to all of them. For small things."""
        return self.broadcast_state(State(value, {}), source).tree

    def broadcast_state(self, state: State, source: int) -> State:
        """The same for a message with tensors; what other processes give is not looked at."""
        data = _packed(state) if self.process == source else torch.empty(0, dtype=torch.uint8)
        if self._group is not None:
            size = torch.tensor([data.numel()])
            self._send_bytes(size.view(torch.uint8), source)
            if self.process != source:
                data = torch.empty(int(size), dtype=torch.uint8)
            self._send_bytes(data, source)
        return _unpacked(data)

    def _exchange(self, mine: Tensor, *, to_first: bool = False) -> list[Tensor]:
        """The bytes of all processes; with `to_first` the others get nothing."""
        if self._group is None:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num)]
        with self._together():
            told = torch.tensor([mine.numel()])
            self._wait(dist.all_gather(sizes, told, group=self._group, async_op=True))
            most = max(int(size) for size in sizes)
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            found: list[Tensor] = []
            if self.process == 0 or not to_first:
                found = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
            if to_first:
                first = self._global(0)
                work = dist.gather(
                    padded, found or None, dst=first, group=self._group, async_op=True
                )
            else:
                work = dist.all_gather(found, padded, group=self._group, async_op=True)
            self._wait(work)
        return [data[: int(size)] for data, size in zip(found, sizes, strict=False)]

    # Calls with one outcome for all --------------------------------------------------------

    @classmethod
    def attempt(cls, function: Callable[[], T]) -> Outcome[T]:
        """Calls a function here, and holds what became of it."""
        try:
            return Outcome(function())
        except Exception as error:
            for kind, known in cls.kinds.items():
                if isinstance(error, known):
                    return Outcome(None, kind, str(error))
            if isinstance(error, cls.failure):
                return Outcome(None, cls.failure.__name__, str(error))
            return Outcome(None, cls.failure.__name__, f"{type(error).__name__}: {error}")

    @classmethod
    def value(cls, outcome: Outcome[T]) -> T:
        """The value of an outcome.

        Raises:
            Exception: The call failed; one of `kinds`, or `failure`.
        """
        if outcome.kind is not None:
            raise cls._error(outcome.kind, outcome.text)
        return outcome.value  # type: ignore[return-value]

    @classmethod
    def values(cls, outcomes: Sequence[Outcome[T]]) -> list[T]:
        """The values of all processes.

        Raises:
            Exception: Some failed: the error of `kinds` that all of those had, or `failure`.
        """
        failed = [(number, each) for number, each in enumerate(outcomes) if each.kind is not None]
        if failed:
            kinds = {each.kind for _, each in failed}
            text = "; ".join(f"replica {number}: {each.text}" for number, each in failed)
            raise cls._error(kinds.pop() if len(kinds) == 1 else None, text)
        return [each.value for each in outcomes]  # type: ignore[misc]

    @classmethod
    def _error(cls, kind: str | None, text: str) -> Exception:
        return cls.kinds.get(kind or "", cls.failure)(text)

    def outcomes(self, function: Callable[[], T], wire: Wire[T] = PLAIN) -> list[Outcome[T]]:
        """Calls a function on every process; the outcomes are known to the first one only."""
        mine = self.attempt(function)
        if self._group is None:
            return [mine]
        found = self._exchange(_packed(State(mine.to_json(wire), {})), to_first=True)
        return [Outcome.from_json(_unpacked(each).tree, wire) for each in found]

    def lead(self, function: Callable[[], T], wire: Wire[T] = PLAIN) -> T:
        """Calls a function on the first process; all return its value or raise its error."""
        first = self.process == 0
        outcome: Outcome[T] | None = self.attempt(function) if first else None
        if self._group is not None:
            said = self.broadcast(None if outcome is None else outcome.to_json(wire), 0)
            outcome = outcome if first else Outcome.from_json(said, wire)
        assert outcome is not None
        return self.value(outcome)

    def all(self, function: Callable[[], T], wire: Wire[T] = PLAIN) -> list[T]:
        """Calls a function on every process; all return all values, or all raise."""
        outcomes = self.outcomes(function, wire)
        many = Wire(
            lambda values: [wire.to_json(each) for each in values],
            lambda values: [wire.from_json(each) for each in values],
        )
        return self.lead(lambda: self.values(outcomes), many)

    # Tensors -------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], source: int) -> None:
        """Fills tensors on the CPU with those of one process, as bytes: any dtype will do.

        Args:
            tensors: The same types and shapes on all processes; contiguous.
            source: The process that has their content.
        """
        if self._group is None:
            return
        assert all(tensor.is_contiguous() for tensor in tensors)
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        for pack in _packs(flat):
            if len(pack) == 1:
                self._send_bytes(pack[0], source)
                continue
            packed = torch.cat(pack)
            self._send_bytes(packed, source)
            if self.process != source:
                sizes = [len(each) for each in pack]
                for mine, sent in zip(pack, torch.split(packed, sizes), strict=True):
                    mine.copy_(sent)

    def fill(self, tensors: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
        """Fills in tensors on the CPU: each is sent by its owner to all processes.

        Args:
            tensors: The same names, types and shapes on all processes; contiguous.
            owners: The process that has the content of each of them; others are left alone.
        """
        for source in sorted(set(owners.values())):
            self.send([tensors[name] for name in owners if owners[name] == source], source)

    def reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduces a tensor on the CPU over all processes, in place."""
        if self._group is not None:
            with self._together():
                work = dist.all_reduce(tensor, op=_OPS[op], group=self._group, async_op=True)
                self._wait(work)

    def _send_bytes(self, data: Tensor, source: int) -> None:
        for start in range(0, data.numel(), _CHUNK):
            with self._together():
                part, first = data[start : start + _CHUNK], self._global(source)
                self._wait(dist.broadcast(part, src=first, group=self._group, async_op=True))

    def _end(self, works: Sequence[dist.Work]) -> None:
        """Waits for messages between two processes each."""
        if self._wait is not wait_for:
            self._wait(Messages(works))
            return
        for work in works:
            work.wait()

    def _global(self, process: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, process)

    def _together(self) -> AbstractContextManager[None]:
        """Surrounds every communication, for errors of it that are to be raised as others."""
        return nullcontext()


def _packs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    pack: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if pack and size + tensor.nbytes > _PACK:
            yield pack
            pack, size = [], 0
        pack.append(tensor)
        size += tensor.nbytes
    if pack:
        yield pack


def _packed(state: State) -> Tensor:
    """A message as bytes: the length of its JSON, the JSON, and the tensors one after another."""
    table = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in state.tensors.items()
    ]
    head = json.dumps([state.tree, table]).encode()
    data = bytearray(len(head).to_bytes(_LENGTH, "little") + head)
    parts = [torch.frombuffer(data, dtype=torch.uint8)]
    for tensor in state.tensors.values():
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1)
            parts.append(flat.view(torch.uint8))
    return torch.cat(parts)


def _unpacked(data: Tensor) -> State:
    offset = _LENGTH + int.from_bytes(data[:_LENGTH].numpy().tobytes(), "little")
    tree, table = json.loads(data[_LENGTH:offset].numpy().tobytes())
    tensors = {}
    for name, kind, shape in table:
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {kind!r}, which this torch does not have")
        # A tensor of its own: its bytes begin where that dtype may begin.
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raw = tensor.view(-1).view(torch.uint8)
            raw.copy_(data[offset : offset + raw.numel()])
            offset += raw.numel()
        tensors[name] = tensor
    return State(tree, tensors)
