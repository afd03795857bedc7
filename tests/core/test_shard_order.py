import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.shard_order import (
    UNKNOWN,
    ShardOrder,
    pack_lengths,
    sample_key,
    unpack_lengths,
)


def plain(order, epoch, lengths):
    """The order told as a story: seats, turns, and the last one moves to an empty seat."""
    seats = order.begin(epoch).seats.tolist()
    given, samples, seat = [0] * len(lengths), [], 0
    while seats:
        if seat == len(seats):
            seat = 0
            continue
        shard = seats[seat]
        if given[shard] < lengths[shard]:
            samples.append((shard, given[shard]))
            given[shard] += 1
            seat += 1
        else:
            last = seats.pop()
            if seat < len(seats):
                seats[seat] = last
    return samples


def pairs(taken):
    return list(zip(taken.shards.tolist(), taken.indices.tolist(), strict=True))


def told(turn, num, known, truth, replicas):
    """A step as replicas make it: they learn of ends by reading, and plan again."""
    while True:
        taken, after = turn.take(num, known, replicas)
        met = [shard for shard, index in pairs(taken) if index >= truth[shard]]
        if not met:
            return taken, after
        for shard in met:
            known[shard] = truth[shard]


lengths_of_shards = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(
    truth=lengths_of_shards,
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=8),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    ahead=st.sets(st.integers(0, 11)),
)
def test_any_history_of_batches_and_replicas_has_the_plain_order(
    truth, steps, seed, shuffle, epoch, ahead
):
    order = ShardOrder(len(truth), seed=seed, shuffle=shuffle)
    known, turn, seen = order.unknown(), order.begin(epoch), []
    for shard in ahead & set(range(len(truth))):
        known[shard] = truth[shard]  # knowing an end early changes nothing
    for number in range(1000):
        num, replicas = steps[number % len(steps)]
        taken, turn = told(turn, num, known, truth, replicas)
        seen += pairs(taken)
        assert turn.position == len(seen)
        parts = [taken.of(replica) for replica in range(replicas)]
        assert sorted(itertools.chain(*parts)) == sorted(pairs(taken))
        assert tuple(map(len, parts)) == taken.shares(replicas)
        if len(taken) < num:
            break
        again = order.begin(epoch).skip(turn.position, known)
        assert (again.round, again.seat) == (turn.round, turn.seat)
        assert again.seats.tolist() == turn.seats.tolist()
        for shard in turn.seats.tolist():
            assert turn.given(shard) == sum(each == shard for each, _ in seen)
    assert turn.is_end(known)
    assert seen == plain(order, epoch, truth)


def test_an_end_moves_at_most_one_shard():
    order = ShardOrder(8)
    known = order.unknown()
    known[2] = 3
    turn = order.begin(0).skip(3 * 8 + 4, known)
    assert turn.seats.tolist() == [0, 1, 7, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("shards", "replicas", "readers"),
    [(8, 1, 1), (8, 2, 1), (8, 4, 1), (8, 3, 1), (8, 8, 1), (4, 3, 3), (3, 2, 2), (2, 4, 2)],
)
def test_readers_of_a_shard(shards, replicas, readers):
    order = ShardOrder(shards)
    taken, _ = order.begin(0).take(shards * 24, order.unknown(), replicas)
    by_shard = [set(taken.owners[taken.shards == shard].tolist()) for shard in range(shards)]
    assert {len(each) for each in by_shard} == {readers}
    shares = taken.shares(replicas)
    assert max(shares) <= 1.25 * sum(shares) / replicas


def test_no_replica_idles_where_one_shard_is_left():
    order = ShardOrder(4)
    known = order.unknown()
    known[:3] = 2
    turn = order.begin(0).skip(8, known)
    taken, _ = turn.take(12, known, 3)
    # The seats of those that have ended are given up one by one.
    assert max(taken.shares(3)) - min(taken.shares(3)) <= 2
    assert turn.take(120, known, 3)[0].shares(3) == (41, 40, 39)


def test_each_epoch_has_its_own_seats_if_shuffled():
    order = ShardOrder(50, seed=3, shuffle=True)
    first, second = (order.begin(epoch).seats.tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert ShardOrder(50).begin(4).seats.tolist() == list(range(50))


def test_keys_differ_between_epochs_shards_and_samples():
    order = ShardOrder(4, seed=1)
    shards = [order.key(epoch, shard) for epoch in range(3) for shard in range(4)]
    keys = {sample_key(key, index) for key in shards for index in range(100)}
    assert len(keys) == 1200
    assert all(0 <= key < 2**64 for key in keys)
    assert ShardOrder(4, seed=2).key(0, 0) != order.key(0, 0) == ShardOrder(4, seed=1).key(0, 0)


@given(st.lists(st.one_of(st.just(UNKNOWN), st.integers(0, 2**50)), min_size=1, max_size=50))
def test_packed_lengths_are_the_same(lengths):
    array = np.array(lengths, dtype=np.int64)
    assert unpack_lengths(pack_lengths(array), len(lengths)).tolist() == lengths


def test_packed_lengths_take_a_few_bytes():
    rng = np.random.default_rng(0)
    ended = rng.integers(0, 100_000, 10_000)
    assert len(pack_lengths(ended)) <= 7 * 10_000
    assert len(pack_lengths(np.full(10_000, UNKNOWN))) <= 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("!", "cannot be read"),
        (pack_lengths(np.array([1, 2])), "have 16 bytes, and 3 shards have 24"),
        (pack_lengths(np.array([1, 2, 3, 4])), "have 25 bytes, and 3 shards have 24"),
        (pack_lengths(np.array([1, -7, 3])), "at least 0"),
    ],
)
def test_lengths_that_are_not_those_of_the_shards_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        unpack_lengths(text, 3)


def test_a_state_of_another_stream_is_refused():
    order = ShardOrder(4, fingerprint="a")
    assert order.resume(order.state(7)) == 7
    with pytest.raises(ValueError, match="num_shards was 4 and is 5; fingerprint was 'a' and is"):
        ShardOrder(5, fingerprint="b").resume(order.state(7))
    with pytest.raises(ValueError, match="lacks fingerprint"):
        order.resume({k: v for k, v in order.state(7).items() if k != "fingerprint"})
