import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.streams import Shuffled
from tests.streams.sources import Lists, SeekableLists, StatefulLists, check_resumes, read

KINDS = st.sampled_from([Lists, SeekableLists, StatefulLists])


def numbered(kind, lengths):
    return kind(*([[v, i] for i in range(n)] for v, n in enumerate(lengths)))


@given(
    KINDS, st.lists(st.integers(0, 24), min_size=1, max_size=3), st.integers(1, 9), st.integers(0)
)
def test_a_shard_continues_at_any_place_and_all_shards_are_all_samples(kind, lengths, size, seed):
    stream = Shuffled(numbered(kind, lengths), size, seed)
    for shard, length in enumerate(lengths):
        samples = check_resumes(stream, shard, epoch=1)
        assert sorted(samples) == [[shard, i] for i in range(length)]
        # The source changes nothing but the cost.
        assert samples == read(
            Shuffled(numbered(Lists, lengths), size, seed).open(shard, len(lengths), 1)
        )


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 9))
def test_no_sample_moves_two_blocks(length, size, seed):
    order = read(Shuffled(Lists(list(range(length))), size, seed).open(0, 1, 0))
    assert max(abs(i - at) for at, i in enumerate(order)) < 2 * size


def test_samples_leave_their_block():
    order = read(Shuffled(Lists(list(range(1000))), 100).open(0, 1, 0))
    assert sum(i // 100 != at // 100 for at, i in enumerate(order)) > 300
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert neighbours < 50
    # A resumed job must see the same order after any upgrade.
    assert order[:6] == [49, 26, 43, 29, 35, 11]


def test_epochs_shards_and_seeds_have_orders_of_their_own():
    lists = Lists(list(range(30)), list(range(30)))
    orders = [
        tuple(read(Shuffled(lists, 10, seed).open(shard, 2, epoch)))
        for seed in (0, 1)
        for shard in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 8


@pytest.mark.parametrize("kind", [SeekableLists, StatefulLists])
@pytest.mark.parametrize("place", [0, 49, 50, 51, 149, 150, 777, 1000])
def test_two_blocks_are_read_again_at_most(kind, place):
    opened = Shuffled(kind(list(range(1000))), 100).open(0, 1, 0)
    for _ in range(place):
        next(opened)
    state = json.loads(json.dumps(opened.state_dict()))
    source = kind(list(range(1000)))
    resumed = Shuffled(source, 100).open(0, 1, 0)
    resumed.load_state_dict(state)
    assert next(resumed, None) == next(opened, None)
    assert source.num_read <= 200
    assert len(json.dumps(state)) < 50


def test_skip_reads_two_blocks():
    source = SeekableLists(list(range(10_000)))
    opened = Shuffled(source, 100).open(0, 1, 0)
    next(opened)
    opened.skip(9000)
    next(opened)
    assert source.num_read <= 300


def test_no_more_than_one_and_a_half_blocks_are_in_memory():
    alive, most = 0, 0

    class Sample:
        def __init__(self):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    class Samples(Lists):
        def open(self, shard, num_shards, epoch):
            return (Sample() for _ in range(1000))

    for _ in Shuffled(Samples([]), 100).open(0, 1, 0):
        pass
    assert most <= 250


def test_the_fingerprint_covers_the_source_and_the_settings():
    lists = Lists([1], [2])
    different = [
        Shuffled(lists, 2),
        Shuffled(lists, 3),
        Shuffled(lists, 2, seed=1),
        Shuffled(Lists([1], [3]), 2),
    ]
    assert len({stream.fingerprint for stream in different}) == 4


def test_a_buffer_without_a_place_is_refused():
    with pytest.raises(ValueError, match=r"buffer_size \(0\) must be at least 1"):
        Shuffled(Lists([1]), 0)
