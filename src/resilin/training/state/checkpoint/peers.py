"""Doing something on all replicas, with one outcome for all of them.

What fails on one replica fails on all, with the same words. Errors travel as text: no replica has
to be able to rebuild an exception of another. A replica that is gone is an error as well, when the
timeout of the group has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from resilin.training.state.checkpoint.errors import CheckpointError, CorruptCheckpoint

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    "CorruptCheckpoint": CorruptCheckpoint,
    "ValueError": ValueError,
}
"""Errors that mean something to the caller; all others are a `CheckpointError`."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """Outcome of a call on one replica."""

    value: T | None
    """The return value."""
    kind: str | None = None
    """The name of the error, if it failed."""
    text: str = ""
    """The words of the error."""


def _error(kind: str | None, text: str) -> Exception:
    return _KINDS.get(kind or "", CheckpointError)(text)


def attempt(function: Callable[[], T]) -> Outcome[T]:
    """Calls a function, and holds what became of it."""
    try:
        return Outcome(function())
    except (CheckpointError, ValueError) as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return Outcome(None, kind, str(error))
    except Exception as error:
        return Outcome(None, "CheckpointError", f"{type(error).__name__}: {error}")


def values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """The values of all replicas.

    Raises:
        CorruptCheckpoint: Every replica that failed found the checkpoint corrupt.
        CheckpointError: Some failed otherwise.
    """
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each.kind is not None]
    if failed:
        kinds = {each.kind for _, each in failed}
        text = "; ".join(f"replica {rank}: {each.text}" for rank, each in failed)
        raise _error(kinds.pop() if len(kinds) == 1 else None, text)
    return [each.value for each in outcomes]  # type: ignore[misc]


class Peers:
    """The replicas of a group; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.num = 1 if group is None else dist.get_world_size(group)
        """Number of replicas."""
        self.rank = 0 if group is None else dist.get_rank(group)
        """Number of this one."""

    def gather(self, function: Callable[[], T]) -> list[Outcome[T]]:
        """Calls a function on every replica; the outcomes are known to the first one only."""
        mine = attempt(function)
        if self._group is None:
            return [mine]
        everyone: list[Any] | None = [None] * self.num if self.rank == 0 else None
        with self._together():
            dist.gather_object(mine, everyone, dst=self._global(0), group=self._group)
        return everyone or []

    def lead(self, function: Callable[[], T]) -> T:
        """Calls a function on the first replica; all return its value or raise its error."""
        outcome: Outcome[T] | None = attempt(function) if self.rank == 0 else None
        if self._group is not None:
            box = [outcome]
            with self._together():
                dist.broadcast_object_list(box, src=self._global(0), group=self._group)
            outcome = box[0]
        assert outcome is not None
        if outcome.kind is not None:
            raise _error(outcome.kind, outcome.text)
        return outcome.value  # type: ignore[return-value]

    def all(self, function: Callable[[], T]) -> list[T]:
        """Calls a function on every replica; all return all values, or all raise."""
        outcomes = self.gather(function)
        return self.lead(lambda: values(outcomes))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fills a tensor with that of the replica `source`."""
        if self._group is not None:
            with self._together():
                dist.broadcast(tensor, src=self._global(source), group=self._group)

    def _global(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"replica {self.rank} lost the other {self.num - 1} of its group: {error}"
            ) from error
