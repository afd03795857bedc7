"""`Supply`: what a pass needs of the data behind a loader, whether they have an index or not."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from resilin.core.batches import Batches
from resilin.core.clock import Clock, Reference
from resilin.core.membership import Membership
from resilin.training.data.cursor import Cursor, Order
from resilin.training.data.iteration import Closable, Iteration
from resilin.training.data.planned import Share
from resilin.training.data.sampled import Sampled


class Place(NamedTuple):
    """The beginning of a pass."""

    position: int
    """Start of the first step."""
    end: int | None
    """End of the data of this epoch, if that is known."""


class Supply(Protocol):
    """The data of one loader: who gets which samples of which step."""

    @property
    def batches(self) -> Batches | None:
        """The data by positions and epochs; None if nobody knows how many samples there are."""
        ...

    @property
    def fetcher(self) -> Closable:
        """Fetches samples ahead of the steps."""
        ...

    @property
    def order(self) -> Order:
        """The order of the samples."""
        ...

    @property
    def reference(self) -> Reference:
        """The run that the learning rate was tuned for."""
        ...

    def new_cursor(self, name: str) -> Cursor:
        """A cursor at the beginning of the data."""
        ...

    def renew(self, cursor: Cursor) -> None:
        """Takes up the length that the data have now; no pass over them is under way."""
        ...

    def sampled(self) -> Sampled:
        """Hashes of some entries of what the data hold, which tell their order."""
        ...

    def begin(self, cursor: Cursor) -> None:
        """Takes up that members, or the cursor, have changed: what was fetched may not fit."""
        ...

    def open(self, cursor: Cursor, membership: Membership, epoch: int, *, moves: bool) -> Place:
        """Begins a pass.

        Args:
            cursor: The cursor of the loader.
            membership: Members that take part.
            epoch: The epoch of the loop.
            moves: Whether the pass moves the cursor; an evaluation does not.
        """
        ...

    def span(self, current: Iteration, batch_size: int) -> range | None:
        """The positions of the next step of a pass; none at its end.

        Returns:
            The positions; None if the replicas could not agree, because one was lost.
        """
        ...

    def span_ahead(self, position: int, batch_size: int) -> range | None:
        """The positions of a step that begins at this position; None if only the step tells."""
        ...

    def share(self, current: Iteration, span: range) -> Share:
        """This replica's part of a step."""
        ...

    def is_over(self, current: Iteration, position: int, clock: Clock | None = None) -> bool:
        """Whether the data of the epoch end at this position, as far as is known.

        Args:
            current: The pass.
            position: The position.
            clock: The clock there, if steps before it are still to be made.
        """
        ...

    def sample_steps(self, span: range, scale: float) -> float:
        """Reference steps that the reference run made with these samples."""
        ...

    def close(self, current: Iteration, *, complete: bool) -> None:
        """Ends a pass.

        Args:
            current: The pass.
            complete: Whether all its data were used.
        """
        ...

    def example(self) -> Any:
        """A batch of one sample, which is not used up."""
        ...
