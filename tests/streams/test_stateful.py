import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from resilin.streams import StatefulShards
from tests.streams.sources import check_resumes, read


class OfDataset(IterableDataset):
    """Keeps its place in the dataset; skips odd samples, and gives multiples of three twice."""

    def __init__(self, shard, num):
        self.shard, self.num, self.at, self.epoch = shard, num, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def outputs(self):
        numbers = (i for i in range(self.num) if i % 2 == 0)
        return [[self.shard, self.epoch, i, k] for i in numbers for k in range(2 - (i % 3 > 0))]

    def __iter__(self):
        outputs = self.outputs()
        while self.at < len(outputs):
            self.at += 1
            yield outputs[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Both(OfDataset):
    """Has a state that says nothing; that of its iterator counts."""

    def __iter__(self):
        return Iterator(self.outputs())


class Eager(OfDataset):
    """Looks at its state when it is iterated over, and not later."""

    def __iter__(self):
        return iter(Counted(self, self.outputs()[self.at :]))


class Counted:
    def __init__(self, dataset, outputs):
        self.dataset, self.outputs = dataset, outputs

    def __iter__(self):
        return self

    def __next__(self):
        if not self.outputs:
            raise StopIteration
        self.dataset.at += 1
        return self.outputs.pop(0)


class OfIterator(IterableDataset):
    """Keeps its place in the iterator."""

    def __init__(self, shard, num):
        self.dataset = OfDataset(shard, num)

    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)

    def __iter__(self):
        return Iterator(self.dataset.outputs())


class Iterator:
    def __init__(self, outputs):
        self.outputs, self.at = outputs, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.outputs):
            raise StopIteration
        self.at += 1
        return self.outputs[self.at - 1]

    def state_dict(self):
        return [self.at]

    def load_state_dict(self, state):
        (self.at,) = state


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from([OfDataset, OfIterator, Both, Eager]),
    st.booleans(),
)
def test_a_shard_continues_at_any_place_and_all_shards_are_all_samples(lengths, kind, as_list):
    def make(shard, num_shards, epoch):
        assert num_shards == len(lengths)
        dataset = kind(shard, lengths[shard])
        dataset.set_epoch(epoch)
        return dataset

    datasets = [kind(shard, num) for shard, num in enumerate(lengths)]
    stream = StatefulShards(datasets) if as_list else StatefulShards(make, len(lengths))
    for epoch in (0, 2):
        found = [check_resumes(stream, shard, epoch) for shard in range(len(lengths))]
        for shard, num in enumerate(lengths):
            expected = OfDataset(shard, num)
            expected.set_epoch(epoch)
            assert found[shard] == expected.outputs()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata
@pytest.mark.parametrize("kind", [OfDataset, OfIterator, Both, Eager])
def test_the_state_is_the_one_that_torchdata_would_use(kind):
    opened = StatefulShards([kind(0, 30)]).open(0, 1, 0)
    loader = StatefulDataLoader(kind(0, 30), batch_size=None)
    loaded = iter(loader)
    for _ in range(7):
        assert next(opened) == next(loaded)
    states = json.dumps(loader.state_dict(), default=str)
    assert json.dumps(opened.state_dict()) in states


def test_a_list_of_datasets_is_not_used_up():
    dataset = OfDataset(0, 8)
    stream = StatefulShards([dataset])
    assert read(stream.open(0, 1, 0)) == read(stream.open(0, 1, 0)) != []
    assert dataset.at == 0


def test_a_dataset_without_a_state_is_refused():
    opened = StatefulShards([[1, 2, 3]]).open(0, 1, 0)
    with pytest.raises(ValueError, match=r"a list of StatefulShards must have `state_dict`"):
        opened.state_dict()


def test_numbers_of_shards_have_to_fit():
    with pytest.raises(ValueError, match=r"num_shards \(3\) must be the number of datasets \(1\)"):
        StatefulShards([OfDataset(0, 1)], 3)
    with pytest.raises(ValueError, match=r"num_shards \(None\) must be given with a function"):
        StatefulShards(lambda shard, num_shards, epoch: [])


def test_the_fingerprint_is_what_was_given_and_the_number_of_shards():
    def make(shard, num_shards, epoch):
        return []

    streams = [StatefulShards(make, 2, "a"), StatefulShards(make, 2, "b"), StatefulShards(make, 3)]
    assert len({stream.fingerprint for stream in streams}) == 3
