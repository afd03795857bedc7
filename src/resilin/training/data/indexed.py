"""Data with an index: any sample can be fetched at any time, by its position in the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from resilin.core.batches import Batches
from resilin.core.clock import Clock, Reference
from resilin.core.membership import Membership
from resilin.core.stream import Ownership, SampleStream
from resilin.training.data.cursor import Cursor, SampleCursor
from resilin.training.data.fetching import Fetcher
from resilin.training.data.iteration import Iteration
from resilin.training.data.order import DataOrder
from resilin.training.data.sampled import Sampled, sampled
from resilin.training.data.supply import Place

if TYPE_CHECKING:
    from resilin.training.step_plans import StepPlans


class IndexedShare(NamedTuple):
    """Positions of one step that this replica fetches."""

    slot: int
    """The place of this replica in the plan of the step."""
    mine: range
    """Its positions."""
    span: range
    """The positions of the step."""
    fetcher: Fetcher
    """Fetches them."""
    by_samples: bool
    """Whether the gradient of a micro-batch is weighed by its samples."""
    shares: None = None
    """The plan says how many each replica has."""

    def take(self, used: int, sizes: Sequence[int]) -> Any:
        """A micro-batch, collated; see `Share`."""
        batch = self.fetcher.take(self.mine[used:], sizes, behind=self.span.stop)
        if self.by_samples:
            alone = len(sizes) == 1 and not used and self.mine.step == 1
            self.fetcher.rows.check(sizes[0], alone=alone)
        return batch

    def filler(self) -> Any:
        """A batch of one sample that is not of this share."""
        return self.fetcher.one(self.span.start)


class IndexedSupply:
    """The samples of a dataset with `__len__` and `__getitem__`.

    Args:
        dataset: The user's dataset.
        batches: The data by positions.
        plans: Sizes of steps.
        dataloader_kwargs: The user's arguments of the DataLoader.
        by_samples: Whether micro-batches are weighed by their samples.
    """

    def __init__(
        self,
        dataset: Any,
        batches: Batches,
        plans: StepPlans,
        dataloader_kwargs: dict[str, Any],
        *,
        by_samples: bool = True,
    ) -> None:
        self._by_samples = by_samples
        self._dataset = dataset
        self.batches: Batches = batches
        """The data by positions and epochs."""
        self._plans = plans
        self._owners = Ownership(0, 1)
        self._current: Iteration | None = None
        self.fetcher = Fetcher(dataset, batches.stream, self._cut, dataloader_kwargs)
        """Micro-batches that are fetched ahead."""

    @property
    def order(self) -> SampleStream:
        """The order of the samples."""
        return self.batches.stream

    @property
    def reference(self) -> Reference:
        """The run that the learning rate was tuned for."""
        return self.batches.reference

    def new_cursor(self, name: str) -> Cursor:
        """A cursor at the beginning of the data."""
        return SampleCursor(name, self.batches.stream)

    def renew(self, cursor: Cursor) -> None:
        """Takes up the length that the dataset has now; see `Supply`.

        Raises:
            ValueError: It has changed, and is 0, or workers persist.
        """
        before, now = self.order.num_samples, num_samples(self._dataset)
        if now == before:
            return
        if self.fetcher.persistent:
            raise ValueError(
                f"the dataset of {self.order.fingerprint!r} had {before} samples and has {now}, "
                "and persistent_workers (True) keeps worker processes that have it as it was: a "
                "dataset that changes between two passes needs persistent_workers=False"
            )
        if self.batches.tail == "drop" and cursor.position % before:
            # A remainder that is dropped is no part of the pass.
            start = self.batches.span(cursor.position, self._plans.batch_size()).start
            cursor.position = cursor.position if start % before else start
        stream = replace(self.order, num_samples=now)
        self.batches = replace(self.batches, stream=stream)
        self.fetcher.follow(stream)

    def sampled(self) -> Sampled:
        """Hashes of some entries of what the dataset holds."""
        return sampled(self._dataset)

    def begin(self, cursor: Cursor) -> None:
        """Drops what was fetched ahead."""
        self.fetcher.begin(cursor.position)

    def open(self, cursor: Cursor, membership: Membership, epoch: int, *, moves: bool) -> Place:
        """Begins a pass; see `Supply`."""
        # An evaluation is apart from the cursor, and depends on the epoch alone.
        position = cursor.position if moves else epoch * self.order.num_samples
        # The epoch is that of the next batch: the cursor may stand before a dropped tail.
        end = self.batches.epoch_end(position, self._plans.batch_size())
        self.fetcher.open(position, end)
        return Place(position, end)

    def span(self, current: Iteration, batch_size: int) -> range:
        """The positions of the next step."""
        return self.batches.span(current.position, batch_size)

    def span_ahead(self, position: int, batch_size: int) -> range:
        """The positions of a step that begins at this position."""
        return self.batches.span(position, batch_size)

    def share(self, current: Iteration, span: range) -> IndexedShare:
        """This replica's part of a step."""
        self._current, self._owners = current, _owners(current)
        replica = current.membership.replica
        mine = self._owners.positions(replica, span)
        slot, by_samples = self._owners.slot(replica, span.start), self._by_samples
        by_samples = by_samples and current.training
        return IndexedShare(slot, mine, span, self.fetcher, by_samples)

    def is_over(self, current: Iteration, position: int, clock: Clock | None = None) -> bool:
        """Whether the data of the epoch end at this position; see `Supply`."""
        assert current.data_end is not None
        if position >= current.data_end:
            # No step follows: a batch size that is a function of the clock must not be asked.
            return True
        return self.batches.are_over(position, current.data_end, self._plans.batch_size(clock))

    def sample_steps(self, span: range, scale: float) -> float:
        """Reference steps that the reference run made with these samples."""
        return self.batches.reference_steps(span.start, span.stop)

    def close(self, current: Iteration, *, complete: bool) -> None:
        """Ends a pass: after a tail that was dropped, the cursor moves to the end of the epoch."""
        if self._current is current:
            self.fetcher.end_pass()
        if complete and current.moves:
            assert current.data_end is not None
            current.advance(max(current.position, current.data_end))

    def example(self) -> Any:
        """A batch of one sample, which is not used up."""
        return self.fetcher.one(0)

    def _cut(self, position: int) -> tuple[list[range], int]:
        """A step at this position with the current sizes, and its end."""
        batch_size, current = self._plans.batch_size(), self._current
        span = self.batches.span(position, batch_size)
        assert current is not None
        replica = current.membership.replica
        plan = self._plans.pieces(len(span), batch_size, training=current.training)
        mine = self._owners.positions(replica, span)
        sizes = plan.micro_batches(self._owners.slot(replica, span.start))
        ends = accumulate(sizes)
        parts = [mine[end - size : end] for size, end in zip(sizes, ends, strict=True) if size]
        return parts, span.stop


def batches_of(dataset: Any, batch_size: int, order: DataOrder) -> Batches:
    """The data of a dataset by positions.

    Args:
        dataset: The user's dataset.
        batch_size: The reference batch.
        order: The settings of the loader.

    Raises:
        ValueError: The dataset is empty.
    """
    num = num_samples(dataset)
    stream = SampleStream(
        num,
        seed=order.seed,
        shuffle=order.shuffle,
        fingerprint=order.fingerprint or f"{type(dataset).__qualname__}[{num}]",
    )
    return Batches(stream=stream, tail=order.tail, batch_size=batch_size)


def num_samples(dataset: Any) -> int:
    """The length of a dataset.

    Raises:
        ValueError: It is empty.
    """
    num = len(dataset)
    if num == 0:
        raise ValueError("the dataset is empty: len(dataset) must be at least 1, and is 0")
    return num


def _owners(current: Iteration) -> Ownership:
    """Assignment of positions in a pass; that of an evaluation is apart from the cursor."""
    if not current.moves:
        return Ownership(0, current.membership.num_replicas)
    assert isinstance(current.cursor, SampleCursor)
    return current.cursor.deal(current.membership)
