"""A stream of numbered samples, for tests, and its order told as a story."""

from __future__ import annotations

import torch

from resilin.core.shard_order import ShardOrder

LENGTHS = (9, 4, 0, 13, 7, 7, 1, 22)


class Numbered:
    """Shards of given lengths; a sample is 1000 times its shard plus its number."""

    def __init__(self, lengths=LENGTHS, per_epoch=0):
        self.lengths = lengths
        self.num_shards = len(lengths)
        self.fingerprint = f"numbered {lengths}"
        self.per_epoch = per_epoch

    def open(self, shard, num_shards, epoch):
        assert num_shards == self.num_shards
        for index in range(self.lengths[shard] + epoch * self.per_epoch):
            yield torch.tensor([float(1000 * shard + index)], dtype=torch.float64)


class _Shard:
    def __init__(self, stream, shard, epoch):
        self.length = stream.lengths[shard] + epoch * stream.per_epoch
        self.shard, self.place, self.log = shard, 0, stream.log

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.length:
            raise StopIteration
        self.place += 1
        self.log.append(("read", self.shard))
        return torch.tensor([float(1000 * self.shard + self.place - 1)], dtype=torch.float64)


class _Seekable(_Shard):
    def skip(self, num):
        self.log.append(("skip", self.shard, num))
        self.place += num
        assert self.place <= self.length


class _Stateful(_Shard):
    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        assert self.place == 0
        self.log.append(("load", self.shard, state["place"]))
        self.place = state["place"]


class NumberedSeekable(Numbered):
    shard_type = _Seekable

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.log = []

    def open(self, shard, num_shards, epoch):
        assert num_shards == self.num_shards
        return self.shard_type(self, shard, epoch)


class NumberedStateful(NumberedSeekable):
    shard_type = _Stateful


def plain(stream, epoch=0, seed=0, shuffle=False):
    """All samples of an epoch in order."""
    order = ShardOrder(stream.num_shards, seed=seed, shuffle=shuffle)
    seats, seat, samples = order.begin(epoch).seats.tolist(), 0, []
    given = [0] * stream.num_shards
    while seats:
        seat %= len(seats)
        shard = seats[seat]
        if given[shard] < stream.lengths[shard] + epoch * stream.per_epoch:
            samples.append(1000 * shard + given[shard])
            given[shard] += 1
            seat += 1
        else:
            seats[seat] = seats[-1]
            seats.pop()
            if seat == len(seats):
                seat = 0
    return samples


def seen_around(loader, expects):
    """Samples of a pass that raises, as `expects` says, and of the next one, which does not."""
    seen = []

    def run():
        for batch in loader:
            seen.extend(numbers(batch))
            loader.commit()

    with expects:
        run()
    run()
    return seen


def numbers(batch):
    return [int(value) for value in batch.flatten()]
