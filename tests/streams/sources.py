"""Sources with known samples, and the checks that every stream has to pass."""

import json
from collections.abc import Iterator

import numpy as np


class Lists:
    """A stream of lists in memory, without a state; counts what it reads."""

    def __init__(self, *shards):
        self.shards = shards
        self.num_shards = len(shards)
        self.fingerprint = f"lists {shards}"
        self.num_read = 0

    def open(self, shard, num_shards, epoch):
        for sample in self.shards[shard]:
            self.num_read += 1
            yield sample


class SeekableLists(Lists):
    """The same with `skip`, which reads nothing."""

    def open(self, shard, num_shards, epoch):
        return Seek(self, self.shards[shard])


class StatefulLists(Lists):
    """The same with a state."""

    def open(self, shard, num_shards, epoch):
        return State(self, self.shards[shard])


class Seek(Iterator):
    def __init__(self, stream, samples):
        self.stream, self.samples, self.at = stream, samples, 0

    def __next__(self):
        if self.at == len(self.samples):
            raise StopIteration
        self.stream.num_read += 1
        self.at += 1
        return self.samples[self.at - 1]

    def skip(self, num):
        self.at += num
        assert self.at <= len(self.samples)


class State(Seek):
    skip = None

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def plain(sample):
    """A sample that can be compared."""
    if isinstance(sample, dict):
        return {key: plain(value) for key, value in sample.items()}
    return sample.tolist() if isinstance(sample, np.ndarray) else sample


def read(iterator):
    return [plain(sample) for sample in iterator]


def check_resumes(stream, shard, epoch=0, places=None):
    """Reads a shard from its start, and from each place by state and by skip; returns it."""
    whole = read(stream.open(shard, stream.num_shards, epoch))
    for place in (
        range(len(whole) + 1) if places is None else {n % (len(whole) + 1) for n in places}
    ):
        opened = stream.open(shard, stream.num_shards, epoch)
        for _ in range(place):
            next(opened)
        if hasattr(opened, "state_dict"):
            state = json.loads(json.dumps(opened.state_dict()))
            resumed = stream.open(shard, stream.num_shards, epoch)
            resumed.load_state_dict(state)
            # Before it has read anything, it is where it was.
            again = stream.open(shard, stream.num_shards, epoch)
            again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
            assert read(resumed) == whole[place:]
            assert read(again) == whole[place:]
        if callable(getattr(opened, "skip", None)):
            for begin in {0, place // 2}:
                skipped = stream.open(shard, stream.num_shards, epoch)
                for _ in range(begin):
                    next(skipped)
                skipped.skip(place - begin)
                assert read(skipped) == whole[place:]
        assert read(opened) == whole[place:]
    return whole
