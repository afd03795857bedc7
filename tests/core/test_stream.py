import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core import stream as stream_module
from resilin.core.plan import BatchPlan
from resilin.core.stream import TAILS, Ownership, SampleStream

LARGE = 65_537  # the smallest epoch whose order is computed index by index

FROZEN_SMALL = [4, 7, 3, 1, 5, 0, 2, 8, 6, 9, 9, 1, 5, 4, 0, 3, 8, 2, 6, 7]
FROZEN_LARGE = [8288101697, 9648370100, 8370681201, 9603581775]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    order = SampleStream(n, seed=seed).indices(range(epoch * n, (epoch + 1) * n))
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [LARGE, LARGE + 1, 256**2 * 2 - 1, 99_991, 300**2, 300**2 + 1])
def test_large_epochs_are_permutations_too(n):
    order = SampleStream(n, seed=5).indices(range(n, 2 * n))
    assert np.array_equal(np.sort(order), np.arange(n))


@given(
    st.sampled_from([1, 7, 100, LARGE, 10**10]),
    st.integers(0, 10**11),
    st.integers(0, 50),
    st.integers(1, 40),
)
def test_a_slice_is_the_same_however_it_is_cut(n, start, count, step):
    stream = SampleStream(n, seed=1)
    positions = range(start, start + count * step, step)
    whole = stream.indices(positions)
    one_by_one = [int(stream.indices(range(p, p + 1))[0]) for p in positions]
    assert whole.tolist() == one_by_one
    assert all(0 <= index < n for index in one_by_one)


def test_unshuffled_order_is_the_dataset_order():
    stream = SampleStream(5, shuffle=False)
    assert stream.indices(range(3, 12, 2)).tolist() == [3, 0, 2, 4, 1]


def test_version_1_of_the_order_is_frozen():
    # A resumed run must see these very samples after any upgrade. If this fails, the order
    # changed: raise SampleStream.VERSION, and keep the old order readable.
    assert SampleStream.VERSION == 1
    small = SampleStream(10, seed=42).indices(range(20)).tolist()
    large = SampleStream(10**10, seed=42).indices(range(7 * 10**9, 7 * 10**9 + 4)).tolist()
    assert small == FROZEN_SMALL
    assert large == FROZEN_LARGE


def test_seeds_and_epochs_give_different_orders():
    for n in (1000, LARGE):
        a, b = SampleStream(n, seed=0), SampleStream(n, seed=1)
        orders = [a.indices(range(n)), a.indices(range(n, 2 * n)), b.indices(range(n))]
        for i in range(3):
            for j in range(i):
                # Random permutations agree in about one place.
                assert (orders[i] == orders[j]).sum() < 10


def test_the_computed_order_looks_random():
    # Small grids under many keys show structure most clearly: with 4 rounds instead of 8 the
    # number of neighbours that stay neighbours is off by 20 standard errors.
    n, keys = 1009, 2000
    kept, fixed, ascents, first = [], [], [], np.zeros(n)
    for seed in range(10_000, 10_000 + keys):
        order = stream_module._feistel(np.arange(n), seed, 0, n)
        kept.append((np.abs(np.diff(order)) == 1).sum())
        fixed.append((order == np.arange(n)).sum())
        ascents.append((np.diff(order) > 0).sum())
        first[order[0]] += 1

    def z(values, expected):
        return (np.mean(values) - expected) / (np.std(values) / np.sqrt(keys))

    assert abs(z(kept, 2 * (n - 1) / n)) < 4
    assert abs(z(fixed, 1)) < 4
    assert abs(z(ascents, (n - 1) / 2)) < 4
    chi_square = ((first - keys / n) ** 2 / (keys / n)).sum()
    assert abs(chi_square - (n - 1)) / np.sqrt(2 * (n - 1)) < 4


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("short", [range(0, 4), range(4, 8), range(8, 10), range(10, 14)]),
        ("straddle", [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]),
        ("drop", [range(0, 4), range(4, 8), range(10, 14), range(14, 18)]),
    ],
)
def test_epoch_tails(tail, expected):
    stream, cursor = SampleStream(10), 0
    for span in expected:
        assert stream.batch(cursor, 4, tail=tail) == span
        cursor = span.stop


@given(st.integers(1, 50), st.integers(0, 500), st.integers(1, 60), st.sampled_from(TAILS))
def test_a_batch_never_exceeds_what_was_asked(n, cursor, size, tail):
    stream = SampleStream(n)
    if tail == "drop" and size > n:
        # It may still fit nowhere, so it is refused wherever the cursor stands.
        with pytest.raises(ValueError, match="would drop every sample"):
            stream.batch(cursor, size, tail=tail)
        return
    span = stream.batch(cursor, size, tail=tail)
    assert 1 <= len(span) <= size
    assert span.start >= cursor
    assert len(span) == size or tail == "short"
    assert tail == "straddle" or span.start // n == (span.stop - 1) // n


@st.composite
def histories(draw):
    """A run: generations of replicas, batch sizes, and steps that were aborted."""
    steps = st.tuples(st.integers(1, 40), st.booleans())
    generation = st.tuples(st.integers(1, 64), st.lists(steps, max_size=8))
    return draw(st.integers(1, 200)), draw(st.lists(generation, min_size=1, max_size=8))


@given(histories(), st.integers(0, 2**32), st.sampled_from(["short", "straddle"]))
def test_any_history_uses_each_sample_once_per_epoch(history, seed, tail):
    n, generations = history
    stream, cursor, used = SampleStream(n, seed=seed), 0, []
    for replicas, steps in generations:
        owners = Ownership(cursor, replicas)
        for batch, aborted in steps:
            span = stream.batch(cursor, batch, tail=tail)
            plan = BatchPlan(len(span), replicas)
            step = []
            for replica in range(replicas):
                mine = owners.positions(replica, span)
                assert len(mine) == plan.share(owners.slot(replica, span.start))
                step.extend(stream.indices(mine).tolist())
            if not aborted:
                used.extend(step)
                cursor = span.stop
    assert len(used) == cursor
    # Complete epochs used each sample once, the one under way at most once.
    counts = np.bincount(np.array(used, dtype=int), minlength=n)
    assert counts.min() >= cursor // n
    assert counts.max() <= -(-cursor // n)


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(0, 300), st.integers(0, 200))
def test_ownership_is_a_partition_that_ignores_the_batch_size(base, replicas, ahead, length):
    owners, start = Ownership(base, replicas), base + ahead
    span = range(start, start + length)
    parts = [owners.positions(r, span) for r in range(replicas)]
    assert sorted(p for part in parts for p in part) == list(span)
    for replica, part in enumerate(parts):
        assert all((p - base) % replicas == replica for p in part)


def test_state_round_trips_through_json():
    stream = SampleStream(100, seed=9, fingerprint="digits-v1")
    state = json.loads(json.dumps(stream.state(37)))
    assert stream.resume(state) == 37
    assert state["version"] == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SampleStream(101, seed=9), "num_samples was 100 and is 101"),
        (SampleStream(100, seed=8), "seed was 9 and is 8"),
        (SampleStream(100, seed=9, shuffle=False), "shuffle was True and is False"),
        (SampleStream(100, seed=9, fingerprint="b"), "fingerprint was '' and is 'b'"),
    ],
)
def test_a_cursor_of_another_stream_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        other.resume(SampleStream(100, seed=9).state(5))


def test_a_newer_order_and_a_broken_state_are_refused():
    stream = SampleStream(100)
    with pytest.raises(ValueError, match="version was 2 and is 1"):
        stream.resume({**stream.state(5), "version": 2})
    with pytest.raises(ValueError, match="lacks seed, cursor"):
        stream.resume({"version": 1, "num_samples": 100, "shuffle": True, "fingerprint": ""})
    with pytest.raises(ValueError, match=r"cursor \(-1\)"):
        stream.resume({**stream.state(5), "cursor": -1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleStream(0), r"num_samples \(0\)"),
        (lambda: SampleStream(2**49), "at most 2"),
        (lambda: SampleStream(1, seed=-1), r"seed \(-1\)"),
        (lambda: SampleStream(1, seed=2**64), "below 2"),
        (lambda: SampleStream(3).indices(range(5, 0, -1)), "must ascend"),
        (lambda: SampleStream(3).batch(0, 1, tail="keep"), "'keep'.*must be one of short"),
        (lambda: Ownership(5, 2).slot(0, 4), r"cursor \(4\) must be at least base \(5\)"),
        (lambda: Ownership(5, 2).slot(2, 6), r"replica \(2\)"),
        (lambda: Ownership(5, 2).positions(0, range(5, 9, 2)), "contiguous"),
    ],
)
def test_errors_name_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()
