"""`StatefulShards`: datasets that keep their own place, in the style of torchdata."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from resilin.core import _validate
from resilin.streams.cursor import check_shard, digest
from resilin.streams.protocol import Json, Stateful


class StatefulShards:
    """Datasets with `state_dict` and `load_state_dict`, one for each shard.

    A dataset is anything that can be iterated over, such as an `IterableDataset` of torch. As with
    the `StatefulDataLoader` of torchdata, the state is that of its iterator if that has one, else
    that of the dataset. It must be a JSON value. The dataset of a shard gives all samples of the
    shard: it must not divide them once more among the workers of a DataLoader (`get_worker_info`).
    """

    def __init__(
        self,
        make: Callable[[int, int, int], Any] | Sequence[Any],
        num_shards: int | None = None,
        fingerprint: str = "",
    ) -> None:
        """Makes a stream; reads nothing.

        Args:
            make: Called with the number of a shard, of all shards, and of the epoch; returns the
                dataset of this shard, at its beginning. Or a list of datasets, each of which is a
                shard: they are copied before they are read, and `set_epoch` is called where they
                have it.
            num_shards: Number of shards; None for a list takes one for each dataset.
            fingerprint: A text that identifies data and settings: a job is not resumed with
                another one.

        Raises:
            ValueError: The number of shards is missing, or not that of the list.
        """
        if callable(make):
            if num_shards is None:
                raise ValueError("num_shards (None) must be given with a function")
            self._make = make
        else:
            if num_shards not in (None, len(make)):
                raise ValueError(
                    f"num_shards ({num_shards}) must be the number of datasets ({len(make)})"
                )
            num_shards = len(make)
            self._make = _Copies(make)
        self.num_shards = _validate.whole("num_shards", num_shards, at_least=1)
        self.fingerprint = digest(
            "stateful", _validate.text("fingerprint", fingerprint), num_shards
        )

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard."""
        check_shard(self, shard, num_shards)
        return StatefulShard(self._make(shard, num_shards, epoch))


class _Copies:
    """Makes a copy of one of some datasets, at the place at which they were given."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = tuple(datasets)

    def __call__(self, shard: int, num_shards: int, epoch: int) -> Any:
        dataset = copy.deepcopy(self._datasets[shard])
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        return dataset


class StatefulShard(Iterator[Any]):
    """One dataset, read once."""

    def __init__(self, dataset: Any) -> None:
        """Begins with the first sample.

        Args:
            dataset: A dataset that nobody else reads.
        """
        self._dataset = dataset
        self._samples: Iterator[Any] | None = None

    def __next__(self) -> Any:
        return next(self._begun())

    def _begun(self) -> Iterator[Any]:
        if self._samples is None:
            self._samples = iter(self._dataset)
        return self._samples

    def state_dict(self) -> Json:
        """The state of the iterator, or else of the dataset.

        Raises:
            ValueError: Neither of them has one.
        """
        for owner in (self._begun(), self._dataset):
            if isinstance(owner, Stateful):
                return owner.state_dict()
        raise ValueError(
            f"a {type(self._dataset).__qualname__} of StatefulShards must have `state_dict` and "
            "`load_state_dict`, or an iterator that has them"
        )

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place.

        Args:
            state: What `state_dict` of the same shard returned.
        """
        samples = self._begun()
        if isinstance(samples, Stateful):
            samples.load_state_dict(state)
        else:
            # It may look at its state when it is iterated over, and not later.
            self._samples = None
            self._dataset.load_state_dict(state)
