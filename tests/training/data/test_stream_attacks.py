"""Streams that fail, and samples that are unlike others."""

import collections
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

import resilin
from resilin.training.data.shards.fetching import ShardFetcher
from tests.training.data.numbered import Numbered, numbers, plain, seen_around


class FailsOnce(Numbered):
    """A shard that cannot be read at one place, once, in whichever process."""

    def __init__(self, flag: Path, at: int) -> None:
        super().__init__()
        self.flag, self.at = flag, at

    def open(self, shard, num_shards, epoch):
        for number, sample in enumerate(super().open(shard, num_shards, epoch)):
            if (shard, number) == (3, self.at) and not self.flag.exists():
                self.flag.touch()
                raise OSError("the disk is gone")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [0, 2, 5, 12])
@pytest.mark.parametrize("batch_size", [1, 6, 100])
def test_a_shard_that_has_failed_is_opened_again_and_nothing_is_lost(
    tmp_path, at, workers, batch_size
):
    stream = FailsOnce(tmp_path / "failed", at)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=batch_size, num_workers=workers)
    seen = seen_around(loader, pytest.raises(OSError, match="the disk is gone"))
    assert sorted(seen) == sorted(plain(Numbered()))


def test_a_shard_that_always_fails_never_looks_as_if_it_had_ended():
    class Fails(Numbered):
        def open(self, shard, num_shards, epoch):
            for number, sample in enumerate(super().open(shard, num_shards, epoch)):
                if (shard, number) == (3, 5):
                    raise OSError("the disk is gone")
                yield sample

    loader = resilin.AdaptiveDataLoader(Fails(), batch_size=6, num_workers=2)

    def run():
        for _ in loader:
            loader.commit()

    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            run()


class NoSamples(torch.utils.data.Dataset):
    """It has an index, and nothing behind it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise OSError("the disk is gone")


@pytest.mark.parametrize("kind", ["stream", "index"])
def test_workers_end_with_the_job_though_an_error_of_one_is_kept(tmp_path, kind):
    before = set(multiprocessing.active_children())
    data = NoSamples() if kind == "index" else FailsOnce(tmp_path / "failed", 0)
    loader = resilin.AdaptiveDataLoader(data, 6, num_workers=2, persistent_workers=True)
    with pytest.raises(OSError, match="the disk is gone") as kept:
        next(iter(loader))
    assert len(set(multiprocessing.active_children()) - before) == 2
    resilin.reset_job()
    # The frames of the error refer to the iterator, which has workers until its last reference.
    assert kept.tb is not None
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("evaluates", [False, True])
def test_many_shards_that_end_together_are_found_out_in_a_few_rounds(monkeypatch, evaluates):
    fetches = []
    own = ShardFetcher.fetch
    monkeypatch.setattr(
        ShardFetcher, "fetch", lambda self, pairs: (fetches.append(len(pairs)), own(self, pairs))
    )
    net = torch.nn.Linear(1, 1)
    model = resilin.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model.train(not evaluates)
    stream = Numbered((2,) * 500)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=10)
    seen = []
    for batch in loader:
        seen += numbers(batch)
        if not evaluates:
            loader.commit()
    assert seen == plain(stream)
    # 100 steps; then 500 ends, of which each round finds twice as many as the one before.
    assert 100 < len(fetches) < 120


KINDS = [
    *(torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


class AllKinds(Numbered):
    def open(self, shard, num_shards, epoch):
        for _ in super().open(shard, num_shards, epoch):
            yield [torch.ones(2).to(kind) for kind in KINDS]


def test_tensors_of_all_kinds_come_from_workers_as_they_are():
    loader = resilin.AdaptiveDataLoader(AllKinds(), batch_size=3, num_workers=2, collate_fn=list)
    for sample in next(iter(loader)):
        assert [tensor.dtype for tensor in sample] == KINDS
        assert all((tensor.float() == 1).all() for tensor in sample if not tensor.is_complex())


Pair = collections.namedtuple("Pair", "a b")


class Nested(Numbered):
    def open(self, shard, num_shards, epoch):
        for sample in super().open(shard, num_shards, epoch):
            yield {"pair": Pair(sample, [np.array([2]), {"c": (sample, "text")}]), "none": None}


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_within_samples_come_from_workers_as_they_are(workers):
    loader = resilin.AdaptiveDataLoader(
        Nested(), batch_size=6, num_workers=workers, collate_fn=list
    )
    seen = []
    for batch in loader:
        for sample in batch:
            pair = sample["pair"]
            assert type(pair) is Pair
            assert type(pair.b[0]) is np.ndarray
            assert torch.equal(pair.a, pair.b[1]["c"][0])
            assert sample["none"] is None
            seen += numbers(pair.a)
    assert seen == plain(Numbered())
