import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.streams import FileStream
from resilin.streams.cursor import Cursor
from tests.streams.sources import Seek, State, StatefulLists, check_resumes, read

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=9)


class Disk:
    """Files by name, and which of them were opened; `kind` makes the iterators."""

    def __init__(self, lengths, kind=None):
        self.files = {f"{i}.txt": [(i, j) for j in range(n)] for i, n in enumerate(lengths)}
        self.kind = kind
        self.opened = []
        self.num_read = 0

    def read(self, name):
        self.opened.append(name)
        samples = [list(sample) for sample in self.files[name]]
        return self.kind(self, samples) if self.kind else self.generate(samples)

    def generate(self, samples):
        for sample in samples:
            self.num_read += 1
            yield sample

    def stream(self, num_shards, **settings):
        return FileStream(list(self.files), self.read, num_shards=num_shards, **settings)


@given(LENGTHS, st.data())
def test_a_shard_continues_at_any_place_and_all_shards_are_all_samples(lengths, data):
    num_shards = data.draw(st.integers(1, len(lengths)))
    shuffle, epoch = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    kind = data.draw(st.sampled_from([None, Seek, State]))
    disk = Disk(lengths, kind)
    stream = disk.stream(num_shards, shuffle=shuffle, seed=5)
    shards = [check_resumes(stream, shard, epoch) for shard in range(num_shards)]
    together = sorted(tuple(sample) for shard in shards for sample in shard)
    assert together == [(i, j) for i, n in enumerate(lengths) for j in range(n)]
    again = Disk(lengths).stream(num_shards, shuffle=shuffle, seed=5)
    assert [read(again.open(shard, num_shards, epoch)) for shard in range(num_shards)] == shards


def test_files_are_dealt_in_turn():
    stream = Disk([1] * 7).stream(3)
    assert read(stream.open(1, 3, 0)) == [[1, 0], [4, 0]]
    assert read(stream.open(1, 3, 5)) == [[1, 0], [4, 0]]


def test_each_epoch_shuffles_the_files_anew_and_the_seed_decides_how():
    def order(seed, epoch):
        stream = Disk([1] * 20).stream(1, shuffle=True, seed=seed)
        return [i for i, _ in read(stream.open(0, 1, epoch))]

    orders = [order(0, 0), order(0, 1), order(1, 0), list(range(20))]
    assert len({tuple(each) for each in orders}) == 4
    # A resumed job must see the same order after any upgrade.
    assert order(0, 0)[:6] == [13, 10, 1, 6, 3, 7]


@pytest.mark.parametrize(("kind", "num_read"), [(None, 5), (Seek, 1), (State, 1)])
def test_files_before_the_place_are_not_opened(kind, num_read):
    disk = Disk([3, 3, 9, 3], kind)
    opened = disk.stream(1).open(0, 1, 0)
    assert [next(opened) for _ in range(10)][-1] == [2, 3]
    state = json.loads(json.dumps(opened.state_dict()))
    disk.opened, disk.num_read = [], 0
    resumed = disk.stream(1).open(0, 1, 0)
    resumed.load_state_dict(state)
    assert disk.opened == []
    assert next(resumed) == [2, 4]
    assert disk.opened == ["2.txt"]
    assert disk.num_read == num_read


def test_more_shards_than_files_are_refused():
    with pytest.raises(ValueError, match=r"num_shards \(4\) .* number of files \(3\)"):
        Disk([1, 1, 1]).stream(4)


def test_a_file_that_has_become_shorter_is_recognised():
    resumed = Disk([2]).stream(1).open(0, 1, 0)
    resumed.load_state_dict([0, [5, None]])
    with pytest.raises(ValueError, match=r"has 2 samples, of which 5 were read before"):
        next(resumed)
    with pytest.raises(ValueError, match=r"has 1 files, of which 3 were read before"):
        resumed.load_state_dict([3, None])


def test_a_shard_that_is_not_there_is_refused():
    stream = Disk([1, 1]).stream(2)
    with pytest.raises(ValueError, match=r"shard \(2\) .* num_shards \(2\)"):
        stream.open(2, 2, 0)
    with pytest.raises(ValueError, match=r"num_shards \(3\) must be that of the stream \(2\)"):
        stream.open(0, 3, 0)


def test_the_fingerprint_covers_files_and_settings_that_change_the_order():
    disk = Disk([1, 1, 1, 1])
    different = [
        disk.stream(2),
        disk.stream(3),
        disk.stream(2, shuffle=True),
        disk.stream(2, shuffle=True, seed=1),
        Disk([1, 1, 1]).stream(2),
        disk.stream(2, fingerprint="v1"),
        disk.stream(2, fingerprint="v2"),
    ]
    assert len({stream.fingerprint for stream in different}) == len(different)
    assert disk.stream(2, seed=1).fingerprint == disk.stream(2).fingerprint
    moved = FileStream(["x/a", "x/b"], disk.read, num_shards=1, fingerprint="v1")
    assert moved.fingerprint == (
        FileStream(["y/a", "y/b"], disk.read, num_shards=1, fingerprint="v1").fingerprint
    )


def test_a_cursor_returns_by_reading_where_the_state_came_from_another_kind():
    cursor = Cursor(iter("abcdef"))
    cursor.load_state_dict([4, {"at": 4}])
    assert read(cursor) == ["e", "f"]
    assert cursor.num_read == 6


def test_a_cursor_that_returned_by_a_state_counts_from_there():
    cursor = Cursor(StatefulLists(list("abcdef")).open(0, 1, 0))
    cursor.load_state_dict([4, {"at": 4}])
    assert cursor.num_read == 4
    assert read(cursor) == ["e", "f"]
    assert cursor.num_read == 6
