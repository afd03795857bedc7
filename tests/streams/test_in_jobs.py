"""Every kind of source in jobs of one to three replicas, with and without worker processes.

What is expected is read shard by shard through `open`, and ordered by `core.shard_order`.
"""

import io
import itertools
import json
import tarfile

import numpy as np
import pytest
from torch.utils.data import IterableDataset

import resilin
from resilin.core.shard_order import ShardOrder
from resilin.streams import (
    FileStream,
    Mixture,
    Packed,
    Shuffled,
    StatefulShards,
    as_stream,
    tar_samples,
)
from resilin.training.data.shards import news, reading
from tests.replicas import gathered, replica, worlds
from tests.streams.sources import plain

LENGTHS = (11, 6, 3, 9, 0, 14)
"""Samples in each file."""
NUM_SHARDS = 4
WORLDS = worlds(1, 2, 3, gate=(3,))


@pytest.fixture(autouse=True)
def _states_are_used(monkeypatch, fresh_job):
    """Places in shards are saved so often that a small job continues from some."""
    monkeypatch.setattr(reading, "BOOKMARK_EVERY", 2)
    monkeypatch.setattr(news, "_MARKS_EVERY", 1)


@pytest.fixture
def folder(shared_path):
    """Files, written by one replica."""
    if replica() == 0:
        for file in range(len(LENGTHS)):
            content = "".join(json.dumps(sample) + "\n" for sample in numbers(file))
            for prefix in "ab":
                (shared_path / f"{prefix}{file}.jsonl").write_text(content)
            write_tar(shared_path / f"{file}.tar", numbers(file))
    gathered([])
    return shared_path


def write_tar(path, samples):
    with tarfile.open(path, "w") as tar:
        for sample in samples:
            for extension in ("json", "cls"):
                content = json.dumps(sample).encode()
                info = tarfile.TarInfo(f"{sample['x']:06d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


# Sources of these files ------------------------------------------------------------------------


def numbers(file):
    """The samples of one file; their tokens are all different."""
    return [{"x": 100 * file + i, "tokens": tokens(file, i)} for i in range(LENGTHS[file])]


def tokens(file, number):
    first = 1 + 10 * (100 * file + number)
    return list(range(first, first + 2 + number % 5))


def lines(folder, prefix="a"):
    return [folder / f"{prefix}{file}.jsonl" for file in range(len(LENGTHS))]


def read_lines(path):
    with open(path) as file:
        for line in file:
            yield json.loads(line)


def files(folder):
    return FileStream(lines(folder), read_lines, num_shards=NUM_SHARDS, shuffle=True)


def tars(folder):
    paths = [folder / f"{file}.tar" for file in range(len(LENGTHS))]
    return FileStream(paths, tar_samples, num_shards=NUM_SHARDS)


class Place(IterableDataset):
    """A dataset with a state, as torchdata wants them."""

    def __init__(self, file):
        self.samples, self.at = numbers(file), 0

    def __iter__(self):
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(folder):
    return StatefulShards([Place(file) for file in range(len(LENGTHS))])


def shuffled(folder):
    return Shuffled(files(folder), 4)


def mixture(folder):
    apart = FileStream(lines(folder, "b"), read_lines, num_shards=NUM_SHARDS)
    return Mixture([Tagged(files(folder), "a"), Tagged(apart, "b")], [2, 1], stop="all")


class Tagged:
    """A stream whose samples say from where they are."""

    def __init__(self, stream, tag):
        self.stream, self.tag = stream, tag
        self.num_shards = stream.num_shards
        self.fingerprint = f"{tag} {stream.fingerprint}"

    def open(self, shard, num_shards, epoch):
        for sample in self.stream.open(shard, num_shards, epoch):
            yield {**sample, "from": self.tag}


def packed(folder):
    return Packed(shuffled(folder), 5, tokens=tokens_of)


def tokens_of(sample):
    return np.array(sample["tokens"], dtype=np.int64)


def hugging_face(folder):
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    datasets.config.HF_DATASETS_CACHE = str(folder / "cache")
    datasets.disable_progress_bars()
    # Its reader refuses empty files.
    paths = [str(path) for path in lines(folder) if path.stat().st_size]
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True)


def hugging_face_mapped(folder):
    return hugging_face(folder).map(doubled).filter(kept)


def doubled(sample):
    return {"y": 2 * sample["x"]}


def kept(sample):
    return sample["x"] % 5 > 0


def hugging_face_shuffled(folder):
    return hugging_face(folder).shuffle(seed=3, buffer_size=4)


OWN = [files, tars, stateful, shuffled, mixture, packed]


# Checks ----------------------------------------------------------------------------------------


def named(samples):
    """What a sample has, as text: it can be sorted, and stands for itself."""
    return [
        json.dumps(plain({k: _text(v) for k, v in sample.items()}), sort_keys=True)
        for sample in samples
    ]


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


def in_order(stream, epoch):
    """All samples of an epoch, in the order of the job."""
    num = stream.num_shards
    shards = [named(stream.open(shard, num, epoch)) for shard in range(num)]
    lengths = np.array([len(shard) for shard in shards], dtype=np.int64)
    taken, _ = ShardOrder(num, shuffle=True).begin(epoch).take(int(lengths.sum()), lengths)
    return [
        shards[v][i] for v, i in zip(taken.shards.tolist(), taken.indices.tolist(), strict=True)
    ]


def cut(samples, size):
    """Batches of a size, each sorted."""
    samples = iter(samples)
    return list(iter(lambda: sorted(itertools.islice(samples, size)), []))


def steps_of(loader, num=None):
    """The samples of each step, over all replicas; of the first `num` steps."""
    mine = {}
    for batch in loader:
        step = loader._passes.iteration.span.start
        mine.setdefault(step, []).extend(batch[: loader.current_samples])
        if loader._passes.iteration.micro_batch.last and len(mine) == num:
            loader.commit()
            break
    everyone = gathered([mine])
    steps = sorted({step for each in everyone for step in each})
    return [sorted(n for each in everyone for n in each.get(step, ())) for step in steps]


def check(source, folder, workers, before):
    """A job, saved after some steps of its second epoch, continued with other batches."""
    data = source(folder)
    first, second, third = (in_order(as_stream(data), epoch) for epoch in range(3))
    assert len(set(first)) == len(first) > 18
    settings = {"shuffle": True, "collate_fn": named}
    loader = resilin.AdaptiveDataLoader(data, batch_size=6, num_workers=workers, **settings)
    assert steps_of(loader) == cut(first, 6)
    assert steps_of(loader, before) == cut(second, 6)[:before]
    state = json.loads(json.dumps(loader.state_dict()))
    resilin.reset_job()
    again = resilin.AdaptiveDataLoader(
        source(folder), batch_size=4, num_workers=2 - workers, max_local_bsz=3, **settings
    )
    again.load_state_dict(state)
    assert steps_of(again) == cut(second[6 * before :], 4)
    assert steps_of(again) == cut(third, 4)
    return state


@pytest.mark.parametrize("source", OWN)
@pytest.mark.parametrize("world", WORLDS)
def test_batches_are_the_same_on_any_replicas_and_after_a_save(world, source, folder):
    for workers in (0, 2):
        state = check(source, folder, workers, before=3)
        assert len(state["bookmarks"]) > 1
        resilin.reset_job()


@pytest.mark.parametrize("world", WORLDS)
def test_batches_of_hugging_face_are_the_same_on_any_replicas_and_after_a_save(world, folder):
    # In one test: each process has to load the library.
    for workers in (0, 2):
        for source in (hugging_face_mapped, hugging_face_shuffled):
            state = check(source, folder, workers, before=3)
            assert bool(state["bookmarks"]) == (source is hugging_face_mapped)
            resilin.reset_job()
