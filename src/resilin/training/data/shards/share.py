"""The samples of one step that a replica has read from its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from resilin.training.data.shards.fetching import Pair, ShardFetcher


class StreamShare(NamedTuple):
    """Samples of one step that this replica has read."""

    slot: int
    """This replica."""
    shares: tuple[int, ...]
    """Samples of each replica."""
    mine: list[Pair]
    """Its samples, by shard and number."""
    fetcher: ShardFetcher
    """Has them."""
    by_samples: bool = False
    """Whether the gradient of a micro-batch is weighed by its samples."""

    def take(self, used: int, sizes: Sequence[int]) -> Any:
        """A micro-batch, collated; see `Share`."""
        batch = self.fetcher.collate(self.mine[used : used + sizes[0]])
        if self.by_samples:
            alone = len(sizes) == 1 and not used and len(self.shares) == 1
            self.fetcher.rows.check(sizes[0], alone=alone)
        return batch

    def filler(self) -> Any:
        """A batch of one sample that is not of this share."""
        pair = self.fetcher.any
        return self.fetcher.example() if pair is None else self.fetcher.collate([pair])
