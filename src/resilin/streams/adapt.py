"""`as_stream`: whatever a user has, as a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from resilin.compat import hf_datasets
from resilin.core import _validate
from resilin.streams.cursor import check_shard, digest
from resilin.streams.huggingface import HuggingFaceStream
from resilin.streams.protocol import Stream, is_stream


def as_stream(data: object, num_shards: int | None = None) -> Stream | None:
    """A stream of what was given to a loader.

    Args:
        data: A stream, an `IterableDataset` of Hugging Face, or a dataset with an index.
        num_shards: Number of shards, for data that can be divided in several ways; None takes as
            many as possible.

    Returns:
        The stream; None for a dataset with `__len__` and `__getitem__`, which needs none.

    Raises:
        ValueError: The data can be read in order only and has no shards, or not so many.
    """
    if hf_datasets.is_dict_of_splits(data):
        splits = ", ".join(map(str, data))  # type: ignore[call-overload]
        raise ValueError(
            f"a {type(data).__qualname__} has several splits ({splits}); give the loader one of "
            "them, such as `data['train']`"
        )
    if hf_datasets.is_iterable_dataset(data):
        return HuggingFaceStream(data, num_shards)
    if is_stream(data):
        if num_shards not in (None, data.num_shards):
            raise ValueError(
                f"num_shards ({num_shards}) must be that of the stream ({data.num_shards})"
            )
        return data
    if _is_iterable_dataset_of_torch(data):
        _refuse_index_of_one_rank(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return None
    raise ValueError(
        f"a {type(data).__qualname__} can be read in order only, and does not say how it is "
        "divided: give it `num_shards` and `open(shard, num_shards, epoch)`, which returns an "
        "iterator over one shard; or wrap it, in resilin.streams.StatefulShards with a dataset for "
        "each shard, or in resilin.streams.OneShard if each replica may read it all"
    )


def _refuse_index_of_one_rank(data: object) -> None:
    """Refuses a dataset with an index of its own whose length is that of one rank.

    Raises:
        ValueError: It is one, such as those of litdata and Mosaic.
    """
    # The base class has a `__getitem__` that raises.
    inherited = sys.modules["torch.utils.data"].Dataset.__getitem__
    if hasattr(data, "__len__") and getattr(type(data), "__getitem__", inherited) != inherited:
        raise ValueError(
            f"a {type(data).__qualname__} has an index, and divides its samples among ranks, as "
            "the loader does: wrap it in resilin.streams.Indexed with the number of all samples"
        )


class Indexed:
    """A dataset with an index whose length is not the number of its samples.

    The `StreamingDataset`s of litdata and of Mosaic are such: they have any sample of the whole by
    its number, and the length of the part of one rank. Wrapped, they are datasets like any other,
    and a job is resumed without reading anything again.
    """

    def __init__(self, data: Any, num_samples: int) -> None:
        """Wraps a dataset.

        Args:
            data: A dataset with `__getitem__`.
            num_samples: Number of all its samples.

        Raises:
            ValueError: The number is not positive.
        """
        self._data = data
        self._num_samples = _validate.whole("num_samples", num_samples, at_least=1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


class OneShard:
    """Any data that can be iterated over again and again, as a stream of a single shard.

    It works without further ado, and it does not scale: each replica reads all samples, of which it
    keeps its own, and a resumed job reads those again that it has used. For small data.
    """

    def __init__(self, data: Iterable[Any], fingerprint: str = "") -> None:
        """Makes a stream; reads nothing.

        Args:
            data: Something whose iterators always give the same samples in the same order.
                `set_epoch` is called before, if it has that.
            fingerprint: A text that identifies data and settings: a job is not resumed with
                another one.

        Raises:
            ValueError: It is an iterator, which can be read only once.
        """
        if isinstance(data, Iterator):
            raise ValueError(
                f"a {type(data).__qualname__} can be read only once, and a job that is resumed "
                "reads it again; give an object with `__iter__`"
            )
        self.num_shards = 1
        self._data = data
        self.fingerprint = digest("one", fingerprint)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read the shard."""
        check_shard(self, shard, num_shards)
        set_epoch = getattr(self._data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(self._data)


def _is_iterable_dataset_of_torch(data: object) -> bool:
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(data, torch.IterableDataset)
