"""Steps of a pass as they are planned, and this replica's samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from resilin.core.plan import BatchPlan


class Share(Protocol):
    """The samples of one step that this replica runs."""

    @property
    def slot(self) -> int:
        """The place of this replica in the plan of the step."""
        ...

    @property
    def shares(self) -> tuple[int, ...] | None:
        """Samples of each replica, if the plan does not determine them."""
        ...

    def take(self, used: int, sizes: Sequence[int]) -> Any:
        """A micro-batch, collated.

        Args:
            used: Samples of the share that earlier micro-batches had.
            sizes: Sizes of this micro-batch and of those that follow it in the step.
        """
        ...

    def filler(self) -> Any:
        """A batch of one sample that is not of this share."""
        ...


class Planned:
    """A step of a pass: its positions, and the micro-batches of this replica.

    Args:
        span: Its positions.
        batch_size: The global batch size; the remainder of an epoch has fewer positions.
        plan: The split over all replicas.
        share: The samples of this replica.
        sizes: Sizes of its micro-batches; 0 for one that fills up.
    """

    __slots__ = ("_used", "batch_size", "plan", "read", "share", "sizes", "span", "steps")

    def __init__(
        self, span: range, batch_size: int, plan: BatchPlan, share: Share, sizes: tuple[int, ...]
    ) -> None:
        self.span = span
        self.batch_size = batch_size
        self.plan = plan
        self.share = share
        self.sizes = sizes
        self.read = 0
        """Micro-batches of it that were fetched."""
        self.steps: int | None = None
        """Steps of the job when it began; None before it did."""
        self._used = 0

    @property
    def is_read(self) -> bool:
        """Whether all of it was fetched."""
        return self.read == len(self.sizes)

    def fetch(self) -> Any:
        """The next micro-batch, collated."""
        size = self.sizes[self.read]
        batch = self.share.take(self._used, self.sizes[self.read :]) if size else None
        self.read, self._used = self.read + 1, self._used + size
        return batch if size else self.share.filler()

    def again(self, sizes: tuple[int, ...]) -> None:
        """Fetches its micro-batches once more, in other sizes."""
        self.sizes = sizes
        self.read = self._used = 0
