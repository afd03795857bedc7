"""News of shards: ends and saved places, told by the replicas that read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from resilin.core.shard_order import UNKNOWN
from resilin.engine.base import Engine
from resilin.engine.lost import PeerLost
from resilin.training.data.shards.cursor import ShardCursor
from resilin.training.data.shards.fetching import Pair, ShardFetcher

_MARKS_EVERY = 32
"""Steps between two exchanges of saved places."""


class News:
    """Exchange of what replicas find out about shards. Collective.

    Args:
        engine: Who is in the job.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num = 0
        self._complete = False
        self._told: tuple[int, int] | None = None  # pass, and ends that all know of it

    def begin(self) -> None:
        """Members, or the cursor, have changed: what one knows, another may not know."""
        self._num, self._complete, self._told = 0, False, None

    def tell(self, cursor: ShardCursor, fetcher: ShardFetcher) -> int | None:
        """Tells and hears what is new.

        Returns:
            How many shards have ended that all believed to continue; None if a replica was lost
            meanwhile.
        """
        ends: list[Pair] = []
        met = (cursor.number, len(fetcher.ends))
        if met != self._told:
            ends = [each for each in fetcher.ends.items() if cursor.lengths[each[0]] != each[1]]
        self._num += 1
        marks = fetcher.marks() if self._num % _MARKS_EVERY == 0 else []
        if self._engine.membership.num_processes == 1:
            cursor.mark(marks)
            self._told = met
            return cursor.learn(ends)
        if not self._complete:
            known = np.flatnonzero(cursor.lengths < UNKNOWN)
            ends += zip(known.tolist(), cursor.lengths[known].tolist(), strict=True)
        try:
            everyone = self._exchange(ends, marks, cursor)
        except PeerLost:
            return None  # the next generation tells it all again
        self._complete, self._told = True, met
        if everyone is None:
            return 0
        for _, _, theirs in everyone:
            cursor.mark(map(tuple, theirs))
        return cursor.learn((shard, length) for _, told, _ in everyone for shard, length in told)

    def _exchange(self, ends: list[Pair], marks: list[Any], cursor: ShardCursor) -> Any:
        collectives = self._engine.collectives()
        if self._complete:
            num = torch.tensor([len(ends) + len(marks)])
            collectives.reduce(num)
            if not num.item():
                return None
        place = [cursor.number, cursor.position]
        everyone = collectives.gather([place, ends, marks])
        places = [each[0] for each in everyone]
        if any(each != place for each in places):
            raise RuntimeError(
                f"replicas are at different places (pass, position) of a stream: {places}; all of "
                "them have to iterate over its loader, with the same batch sizes"
            )
        return everyone
