"""`HuggingFaceStream`: an `IterableDataset` of Hugging Face datasets as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from resilin.compat import hf_datasets
from resilin.core import _validate
from resilin.streams.cursor import check_shard, digest
from resilin.streams.protocol import Json


class HuggingFaceStream:
    """The samples of an `IterableDataset`, in the shards of its data sources.

    Shard v of V has sources (files, mostly) v, v + V, v + 2 V and so on, with everything that was
    done to the dataset: `map`, `filter`, `shuffle`, `interleave_datasets` and so on happen within a
    shard, as in a worker of a DataLoader. From epoch 1 on, `set_epoch` gives each epoch an order of
    its own.

    Where the state of the dataset is exact, a shard has a state. Else, as with `shuffle`, whose
    buffer is not part of the state of the dataset, the samples before the place are read again:
    `Shuffled` around the stream has the same use, and a state.
    """

    def __init__(
        self, dataset: Any, num_shards: int | None = None, *, fingerprint: str | None = None
    ) -> None:
        """Makes a stream; reads nothing.

        Args:
            dataset: A `datasets.IterableDataset`.
            num_shards: Number of shards; None takes one for each data source.
            fingerprint: A text that identifies the dataset, in place of the files and settings that
                it was made with: for files that may move to another place between two parts of a
                job.

        Raises:
            ValueError: The dataset has fewer data sources, or a step that cannot be divided
                exactly.
        """
        hf_datasets.check()
        most = int(dataset.num_shards)
        self.num_shards = most if num_shards is None else num_shards
        _validate.whole("num_shards", self.num_shards, at_least=1)
        if self.num_shards > most:
            raise ValueError(
                f"num_shards ({self.num_shards}) must be at most the number of data sources of the "
                f"dataset ({most}): use more files, or `dataset.reshard()`"
            )
        if hf_datasets.is_split_by_node(dataset):
            raise ValueError(
                "a dataset after `split_dataset_by_node` cannot be read by all replicas: leave "
                "that call out, the loader divides the dataset"
            )
        steps = hf_datasets.steps(dataset)
        for step in steps:
            if reason := hf_datasets.refusal(step, self.num_shards):
                raise ValueError(f"this IterableDataset cannot be divided exactly: {reason}")
        self._dataset = dataset
        self.has_state = hf_datasets.has_exact_state(dataset)
        self.fingerprint = digest(
            "huggingface",
            self.num_shards,
            [hf_datasets.description(step) for step in steps]
            if fingerprint is None
            else fingerprint,
        )

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard."""
        check_shard(self, shard, num_shards)
        part = self._dataset.shard(num_shards=num_shards, index=shard, contiguous=False)
        part.set_epoch(epoch)
        return StatefulShard(part) if self.has_state else hf_datasets.samples(part)


class StatefulShard(Iterator[Any]):
    """A shard of a dataset whose state is exact."""

    def __init__(self, dataset: Any) -> None:
        """Begins with the first sample.

        Args:
            dataset: The shard, an `IterableDataset` that nobody else reads.
        """
        self._dataset = dataset
        self._samples: Iterator[Any] | None = None
        self._loaded: Json = None

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = hf_datasets.samples(self._dataset)
        return next(self._samples)

    def state_dict(self) -> Json:
        """The state of the dataset."""
        # Before the first sample, the dataset has the state of its beginning.
        if self._samples is None and self._loaded is not None:
            return self._loaded
        return self._dataset.state_dict()

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place.

        Args:
            state: What `state_dict` of the same shard returned.
        """
        self._loaded = state
        self._dataset.load_state_dict(state)
