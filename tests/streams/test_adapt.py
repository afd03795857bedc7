import json
import subprocess
import sys

import datasets
import pytest
from torch.utils.data import IterableDataset, TensorDataset

import resilin.streams
from resilin.streams import HuggingFaceStream, Indexed, OneShard, as_stream
from tests.streams.sources import Lists, check_resumes


def test_a_stream_is_taken_as_it_is():
    stream = Lists([1], [2])
    assert as_stream(stream) is stream
    assert as_stream(stream, 2) is stream
    with pytest.raises(ValueError, match=r"num_shards \(3\) must be that of the stream \(2\)"):
        as_stream(stream, 3)


@pytest.mark.parametrize("data", [[1, 2], TensorDataset(), datasets.Dataset.from_dict({"x": [1]})])
def test_datasets_with_an_index_need_no_stream(data):
    assert as_stream(data) is None


def test_a_dataset_of_hugging_face_is_adapted():
    data = datasets.Dataset.from_dict({"x": [1, 2, 3, 4]}).to_iterable_dataset(num_shards=4)
    assert isinstance(as_stream(data), HuggingFaceStream)
    assert as_stream(data).num_shards == 4
    assert as_stream(data, 2).num_shards == 2


def test_a_dict_of_splits_is_refused_with_its_splits():
    data = datasets.Dataset.from_dict({"x": [1]})
    for splits in (
        datasets.IterableDatasetDict({"train": data.to_iterable_dataset()}),
        datasets.DatasetDict({"train": data}),
    ):
        with pytest.raises(ValueError, match=r"several splits \(train\); .* `data\['train'\]`"):
            as_stream(splits)


class InOrder(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class WithLength(InOrder):
    def __len__(self):
        return 5


class OfOneRank(WithLength):
    """As litdata and Mosaic have it: any sample, and the length of one rank's part."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("data", [InOrder(), WithLength(), iter([1]), 3])
def test_what_has_no_shards_is_refused_with_a_way_out(data):
    with pytest.raises(
        ValueError, match=r"`open\(shard, num_shards, epoch\)`.*OneShard"
    ) as refused:
        as_stream(data)
    assert type(data).__qualname__ in str(refused.value)


def test_a_dataset_that_divides_its_index_among_ranks_is_refused_and_can_be_wrapped():
    with pytest.raises(ValueError, match=r"OfOneRank has an index, .* resilin\.streams\.Indexed"):
        as_stream(OfOneRank())
    wrapped = Indexed(OfOneRank(), 10)
    assert as_stream(wrapped) is None
    assert [wrapped[i] for i in range(len(wrapped))] == list(range(10))


def test_anything_that_can_be_read_again_is_a_stream_of_one_shard():
    class Epochs(InOrder):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch, 7])

    assert check_resumes(OneShard(InOrder()), 0) == [0, 1, 2, 3, 4]
    assert check_resumes(OneShard(Epochs()), 0, epoch=3) == [3, 7]
    assert OneShard([1], "a").fingerprint != OneShard([1], "b").fingerprint
    with pytest.raises(ValueError, match=r"list_iterator can be read only once"):
        OneShard(iter([1]))


def test_every_public_name_is_there_and_loads_neither_torch_nor_datasets():
    code = (
        "import json, sys, resilin.streams as s; [getattr(s, name) for name in s.__all__];"
        "s.as_stream([1]); print(json.dumps(sorted({'torch', 'datasets'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == []
    assert set(resilin.streams.__all__) <= set(dir(resilin.streams))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = resilin.streams.Nothing
