"""Tickets: what the loader sends to a stock DataLoader's workers, and how they come back.

A ticket names some of this replica's positions in the sample stream. The worker turns it into
samples and collates them. Tickets are cut ahead of time by the sizes of that time; since ownership
does not depend on the batch size, those already on their way stay valid when it changes: they are
split where a step needs less, and joined where it needs more.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, get_worker_info

from resilin.core.stream import SampleStream
from resilin.training.data.left_out import collated
from resilin.training.data.sampling import Reading, seed_globals

T = TypeVar("T")


class Ticket(NamedTuple):
    """Some positions of the stream, in order."""

    generation: int
    """Tickets of an earlier generation are dropped on arrival."""
    start: int
    """The first position."""
    stride: int
    """Distance between two positions: the number of replicas."""
    num: int
    """Their number; 0 where a pass ends and nothing is to be fetched."""
    again: bool = False
    """Whether they were on their way before, in batches of other sizes."""

    @property
    def positions(self) -> range:
        """The positions themselves."""
        return range(self.start, self.start + self.stride * self.num, self.stride)


class TicketOffice(Protocol):
    """Source of the next positions."""

    def next_ticket(self) -> Any:
        """The next ticket, as of now."""
        ...


class TicketSampler(Sampler[Any]):
    """Endless: a DataLoader asks it for a ticket whenever a worker is free."""

    def __init__(self, office: TicketOffice) -> None:
        # The office owns the DataLoader that owns this. In a cycle, the queues of workers could be
        # gone before the workers are told to end, and each would be waited for.
        self._office = weakref.proxy(office)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._office.next_ticket()


def ticket_loader(
    dataset: Dataset[T], office: TicketOffice, seed: int, options: Mapping[str, Any]
) -> DataLoader[T]:
    """A stock DataLoader over tickets.

    Args:
        dataset: Turns a ticket into what it asks for.
        office: The source of the tickets; it owns the DataLoader.
        seed: Seed of the workers.
        options: The user's arguments of the DataLoader, but for those that tickets replace.
    """
    options = dict(options)
    if options.get("num_workers", 0):
        options["worker_init_fn"] = WorkerInit(options.pop("worker_init_fn", None))
    # Its own: a DataLoader draws a seed for its workers, from the global one if it has none.
    options["generator"] = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=TicketSampler(office),
        collate_fn=_as_it_is,
        **options,
    )


def _as_it_is(item: Any) -> Any:
    return item


class TicketDataset(Dataset[tuple[Ticket, Any, int | None]]):
    """The user's dataset, read by tickets. Runs in the workers."""

    def __init__(
        self, dataset: Any, stream: SampleStream, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self.stream = stream
        """Says which sample is at which position."""
        self._collate = collate

    def __getitem__(self, ticket: Ticket) -> tuple[Ticket, Any, int | None]:
        """A micro-batch, and its rows if its collate function has left samples out."""
        if not ticket.num:
            return ticket, None, None
        indices: list[int] = self.stream.indices(ticket.positions).tolist()
        keys: list[int] = self.stream.keys(ticket.positions).tolist()
        # In the training process the global generators are the user's, as in any PyTorch loop.
        in_worker = get_worker_info() is not None
        if _fetches_many(self._dataset):
            # What it draws depends on how the step is split; the sample is not known here.
            if in_worker:
                seed_globals(keys[0])
            with Reading(many=keys[0]):
                samples = self._dataset.__getitems__(indices)
        else:
            item, samples = self._dataset.__getitem__, []
            with Reading() as reading:
                for index, key in zip(indices, keys, strict=True):
                    if in_worker:
                        seed_globals(key)
                    reading.begin(key)
                    samples.append(item(index))
        return ticket, *collated(self._collate, samples, indices)


def _fetches_many(dataset: Any) -> bool:
    """Whether a dataset fetches several samples at once, and not one by one as a Subset may."""
    if type(dataset) is Subset:
        return _fetches_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


class WorkerInit:
    """Runs first in each worker, before the user's own function for that.

    Launchers signal a replica's whole process group when they want it to stop. The workers leave
    the group, because the replica still needs their data to finish its step; without it they end.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        """Makes this worker ready."""
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        if self._own is not None:
            self._own(worker)


class CannotResize(Exception):
    """A collated batch that cannot be split, or two that cannot be joined."""


def split(batch: Any, at: int, size: int) -> tuple[Any, Any]:
    """Splits a batch of `size` samples in two, which the default collate function has made.

    It has tensors with the samples along the first dimension, in any nesting of tuples, lists and
    dicts, and lists with one entry per sample.

    Raises:
        CannotResize: It is anything else; the caller then fetches the samples again.
    """
    if isinstance(batch, Tensor):
        if batch.dim() == 0 or batch.shape[0] != size:
            raise CannotResize
        return batch[:at], batch[at:]
    if isinstance(batch, dict):
        pairs = {key: split(value, at, size) for key, value in batch.items()}
        first = {key: pair[0] for key, pair in pairs.items()}
        return first, {key: pair[1] for key, pair in pairs.items()}
    if isinstance(batch, list | tuple) and batch:
        if _per_sample(batch):
            if len(batch) != size:
                raise CannotResize
            return batch[:at], batch[at:]
        parts = [split(item, at, size) for item in batch]
        return _like(batch, [p[0] for p in parts]), _like(batch, [p[1] for p in parts])
    raise CannotResize


def join(first: Any, num_first: int, second: Any, num_second: int) -> Any:
    """Joins two collated batches, of `num_first` and `num_second` samples: the inverse of `split`.

    Raises:
        CannotResize: They are not of the kind that `split` splits, or not alike, such as padded to
            different lengths.
    """
    if type(first) is not type(second):
        raise CannotResize
    if isinstance(first, Tensor):
        alike = first.dim() > 0 and first.shape[1:] == second.shape[1:]
        if not alike or (len(first), len(second)) != (num_first, num_second):
            raise CannotResize
        if (first.dtype, first.layout) != (second.dtype, second.layout):
            raise CannotResize
        joined = torch.cat((first, second))
        return joined.pin_memory() if first.is_pinned() else joined
    if isinstance(first, dict):
        if first.keys() != second.keys():
            raise CannotResize
        return {key: join(first[key], num_first, second[key], num_second) for key in first}
    if isinstance(first, list | tuple) and first and second:
        if _per_sample(first) and _per_sample(second):
            if (len(first), len(second)) != (num_first, num_second):
                raise CannotResize
            return first + second
        if len(first) != len(second):
            raise CannotResize
        pairs = zip(first, second, strict=True)
        return _like(first, [join(a, num_first, b, num_second) for a, b in pairs])
    raise CannotResize


def _per_sample(batch: Sequence[Any]) -> bool:
    return all(isinstance(item, str | bytes | int | float) for item in batch)


def _like(batch: Any, items: Sequence[Any]) -> Any:
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
