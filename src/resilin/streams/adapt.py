"""`as_stream`: whatever a user has, as a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from resilin.compat import hf_datasets
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
    # An IterableDataset of torch inherits a `__getitem__` that raises.
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if indexed and not _is_iterable_dataset_of_torch(data):
        return None
    raise ValueError(
        f"a {type(data).__qualname__} can be read in order only, and does not say how it is "
        "divided: give it `num_shards` and `open(shard, num_shards, epoch)`, which returns an "
        "iterator over one shard, wrap one dataset for each shard in "
        "resilin.streams.StatefulShards, or wrap it in resilin.streams.OneShard if one replica may "
        "read it all"
    )


class OneShard:
    """Any data that can be iterated over again and again, as a stream of a single shard.

    It works without further ado, and it does not scale: one replica reads all samples, one after
    the other, and a resumed job reads those again that it has used. For data that fits one machine.
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
