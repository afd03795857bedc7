"""Datasets of Hugging Face, made here of real files: what is exact, and what is refused."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import IterableDataset as TorchIterable

from resilin.streams import HuggingFaceStream, Packed, Shuffled
from tests.examples import examples
from tests.streams.sources import check_resumes, plain, read

LENGTHS = (5, 0, 7, 3)


@pytest.fixture(scope="module", autouse=True)
def quiet(tmp_path_factory):
    """No progress bars, no wait for threads of pyarrow, and a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    for i, num in enumerate(LENGTHS):
        rows = [{"x": 100 * i + j} for j in range(num)]
        (path / f"{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = pa.table({"x": pa.array([row["x"] for row in rows], pa.int64())})
        pq.write_table(table, path / f"{i}.parquet", row_group_size=3)
    return path


def generate(files):
    for i in files:
        for j in range(LENGTHS[i]):
            yield {"x": 100 * i + j}


def source(kind, folder):
    """The same samples by different readers."""
    if kind == "generator":
        return IterableDataset.from_generator(generate, gen_kwargs={"files": [0, 1, 2, 3]})
    if kind == "memory":
        rows = [row["x"] for row in generate(range(4))]
        return Dataset.from_dict({"x": rows}).to_iterable_dataset(num_shards=4)
    # The readers of datasets refuse an empty file.
    files = [str(folder / f"{i}.{kind}") for i in (0, 1, 2, 3) if LENGTHS[i]]
    reader = "json" if kind == "jsonl" else kind
    return datasets.load_dataset(reader, data_files=files, split="train", streaming=True)


def others():
    return Dataset.from_dict({"x": list(range(1000, 1011))}).to_iterable_dataset(num_shards=4)


def repeated(batch):
    """One to many: a sample as often as its last digit says, up to three times."""
    return {"x": [x for x in batch["x"] for _ in range(x % 4)]}


def bumped(sample):
    return {"x": sample["x"], "y": sample["x"] + 1}


def even(sample):
    return sample["x"] % 2 == 0


EXACT = {
    "plain": lambda data: data,
    "map": lambda data: data.map(bumped),
    "filter": lambda data: data.filter(even),
    "batched map": lambda data: data.map(repeated, batched=True, batch_size=2),
    "batched filter": lambda data: data.filter(
        lambda batch: [x % 3 == 0 for x in batch["x"]], batched=True, batch_size=3
    ),
    "last batch dropped": lambda data: data.map(
        repeated, batched=True, batch_size=3, drop_last_batch=True
    ),
    "several": lambda data: (
        data.map(bumped).filter(even).map(repeated, batched=True, batch_size=2, remove_columns="y")
    ),
    "batch": lambda data: data.batch(2),
    "columns": lambda data: data.map(bumped).select_columns(["y"]).rename_column("y", "x"),
    "cast": lambda data: data.cast(datasets.Features({"x": datasets.Value("float32")})),
    "repeat": lambda data: data.filter(even).repeat(2),
    "concatenate": lambda data: concatenate_datasets([data, others()]),
    "interleave": lambda data: interleave_datasets([data, others()]),
    "interleave all": lambda data: interleave_datasets(
        [data.filter(even), others().map(bumped)],
        stopping_strategy="all_exhausted_without_replacement",
    ),
    "interleave at random": lambda data: interleave_datasets(
        [data, others()], probabilities=[0.3, 0.7], seed=3, stopping_strategy="all_exhausted"
    ),
    "arrays": lambda data: data.with_format("numpy").map(bumped),
}
INEXACT = {
    "shuffle": lambda data: data.shuffle(seed=4, buffer_size=4),
    "shuffle, then map": lambda data: data.shuffle(seed=4, buffer_size=3).map(bumped),
    "tables": lambda data: (
        data.with_format("arrow").map(lambda table: table, batched=True, batch_size=2)
    ).with_format(None),
}
KINDS = ["jsonl", "parquet", "generator", "memory"]


@pytest.mark.parametrize("steps", [*EXACT, *INEXACT])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_continues_at_any_place(kind, steps, folder):
    make = (EXACT | INEXACT)[steps]
    stream = HuggingFaceStream(make(source(kind, folder)))
    assert stream.has_state == (steps in EXACT)
    again = HuggingFaceStream(make(source(kind, folder)))
    assert again.fingerprint == stream.fingerprint
    assert again.num_shards == stream.num_shards > 2
    for epoch, shard in ((0, 0), (1, stream.num_shards - 1)):
        samples = check_resumes(stream, shard, epoch)
        assert samples == read(again.open(shard, stream.num_shards, epoch))


@given(st.sampled_from(list(EXACT)), st.integers(1, 3), st.integers(0, 2), st.lists(st.integers(0)))
@examples(30)
def test_any_shard_continues_at_any_place(steps, num_shards, epoch, places):
    stream = HuggingFaceStream(EXACT[steps](source("memory", None)), num_shards)
    for shard in range(num_shards):
        check_resumes(stream, shard, epoch, places[:3])


@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("steps", ["plain", "filter", "batched map", "shuffle", "several"])
def test_all_shards_are_all_samples_in_each_epoch(steps, num_shards, folder):
    for kind in KINDS:
        data = (EXACT | INEXACT)[steps](source(kind, folder))
        stream = HuggingFaceStream(data, num_shards)
        expected = sorted(sample["x"] for sample in data)
        for epoch in (0, 1, 2):
            shards = [read(stream.open(v, num_shards, epoch)) for v in range(num_shards)]
            assert sorted(sample["x"] for shard in shards for sample in shard) == expected


def test_epochs_of_a_shuffle_have_orders_of_their_own(folder):
    stream = HuggingFaceStream(source("jsonl", folder).shuffle(seed=0, buffer_size=5), 1)
    orders = [tuple(sample["x"] for sample in stream.open(0, 1, epoch)) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 3


class InWorkers(TorchIterable):
    """Reads one shard, the same in each worker."""

    def __init__(self, stream, shard):
        self.stream, self.shard = stream, shard

    def __iter__(self):
        return (plain(sample) for sample in self.stream.open(self.shard, self.stream.num_shards, 0))


@pytest.mark.parametrize("steps", ["several", "shuffle", "interleave", "arrays"])
def test_a_worker_of_a_dataloader_reads_the_whole_shard(steps, folder):
    # The dataset would divide itself among the workers, and so leave most of a shard out.
    stream = HuggingFaceStream((EXACT | INEXACT)[steps](source("parquet", folder)))
    loader = DataLoader(InWorkers(stream, 2), batch_size=None, num_workers=2)
    whole = read(stream.open(2, stream.num_shards, 0))
    assert len(whole) > 1
    found = list(loader)
    assert found[::2] == found[1::2] == whole


def test_packs_and_shuffles_of_a_dataset_continue_at_any_place(folder):
    data = source("jsonl", folder).map(lambda row: {"input_ids": list(range(row["x"] % 7))})
    stream = Packed(Shuffled(HuggingFaceStream(data), 3), 4, separator=-1)
    for shard in range(stream.num_shards):
        check_resumes(stream, shard)


def test_two_shards_of_one_dataset_do_not_disturb_each_other(folder):
    side = Dataset.from_dict({"y": list(range(15))}).to_iterable_dataset()
    data = concatenate_datasets([source("memory", folder), side], axis=1)
    stream = HuggingFaceStream(data)
    first = stream.open(0, 1, 0)
    head = [next(first) for _ in range(4)]
    whole = read(stream.open(0, 1, 0))
    assert head + list(first) == whole
    assert len(whole) == 15


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda data: data.take(6), r"`take\(6\)` is divided among 3 shards"),
        (lambda data: data.map(bumped).skip(2), r"`skip\(2\)` is divided among 3 shards"),
        (
            lambda data: data.map(lambda row, i: {"i": i}, with_indices=True).filter(even),
            r"`with_indices=True` counts from 0 in each of 3 shards",
        ),
        (lambda data: data.shuffle(buffer_size=3), "without a seed"),
        (
            lambda data: interleave_datasets([data, others()], probabilities=[0.5, 0.5]),
            "without a seed",
        ),
        (
            lambda data: split_dataset_by_node(data, 0, 2),
            "after `split_dataset_by_node` cannot be read by all replicas",
        ),
    ],
)
def test_what_cannot_be_divided_exactly_is_refused_by_name(make, said, folder):
    with pytest.raises(ValueError, match=said):
        HuggingFaceStream(make(source("jsonl", folder)), 3 if "node" not in said else None)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: data.take(6),
        lambda data: data.skip(2).take(9),
        lambda data: data.map(lambda row, i: {"i": i}, with_indices=True),
        lambda data: data.map(
            lambda rows, i: {"i": i}, with_indices=True, batched=True, batch_size=4
        ),
    ],
)
def test_in_one_shard_they_are_exact(make, folder):
    for kind in KINDS:
        data = make(source(kind, folder))
        assert check_resumes(HuggingFaceStream(data, 1), 0) == list(data)


def test_more_shards_than_sources_are_refused(folder):
    with pytest.raises(ValueError, match=r"num_shards \(5\) .* data sources of the dataset \(3\)"):
        HuggingFaceStream(source("parquet", folder), 5)
    finer = source("parquet", folder).reshard()
    assert HuggingFaceStream(finer).num_shards > 4


def test_the_fingerprint_covers_files_steps_and_settings(folder):
    data = source("parquet", folder)
    different = [
        HuggingFaceStream(data),
        HuggingFaceStream(data, 2),
        HuggingFaceStream(source("jsonl", folder), 2),
        HuggingFaceStream(data.map(bumped)),
        HuggingFaceStream(data.filter(even)),
        HuggingFaceStream(data.shuffle(seed=1, buffer_size=2)),
        HuggingFaceStream(data.shuffle(seed=2, buffer_size=2)),
        HuggingFaceStream(data.shuffle(seed=2, buffer_size=3)),
        HuggingFaceStream(data, fingerprint="v1"),
        HuggingFaceStream(data, fingerprint="v2"),
    ]
    assert len({stream.fingerprint for stream in different}) == len(different)
