from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilin.streams import Mixture
from resilin.streams.mixture import Turns
from tests.streams.sources import Lists, SeekableLists, StatefulLists, check_resumes, read

KINDS = st.sampled_from([Lists, SeekableLists, StatefulLists])
WEIGHTS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.7, 1e-3, Fraction(1, 3)])),
    min_size=1,
    max_size=6,
)


def components(kind, lengths):
    """One stream for each list of lengths, with a shard for each length."""
    return [
        kind(*([[name, shard, i] for i in range(n)] for shard, n in enumerate(shards)))
        for name, shards in enumerate(lengths)
    ]


@given(KINDS, WEIGHTS, st.sampled_from(["first", "all"]), st.data())
def test_a_shard_continues_at_any_place(kind, weights, stop, data):
    shape = st.lists(st.integers(0, 12), min_size=2, max_size=2)
    lengths = [data.draw(shape) for _ in weights]
    stream = Mixture(components(kind, lengths), weights, stop=stop)
    again = Mixture(components(Lists, lengths), weights, stop=stop)
    for shard in range(2):
        samples = check_resumes(stream, shard)
        assert samples == read(again.open(shard, 2, 0))
        for name, shards in enumerate(lengths):
            # Each component in its own order, without a gap.
            own = [i for component, _, i in samples if component == name]
            assert own == list(range(len(own)))
            if stop == "all":
                assert len(own) == shards[shard]


# Here the largest deficit would be the wrong choice.
@example([2, 59, 46, 1, 1, 1, 2], 112)
@given(WEIGHTS, st.integers(1, 400))
def test_proportions_are_exact_within_the_bound(weights, num):
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    num_components = len(weights)
    bound = 1 - Fraction(1, 2 * num_components - 2) if num_components > 1 else 0
    stream = Mixture(components(Lists, [[num]] * num_components), weights)
    counts = [0] * num_components
    for n, (name, _, _) in enumerate(stream.open(0, 1, 0), start=1):
        counts[name] += 1
        worst = max(abs(count - n * share) for count, share in zip(counts, shares, strict=True))
        assert worst <= bound
        if n == num:
            break


def test_two_components_are_within_half_a_sample_and_many_within_one():
    assert turns([1, 1], 6) == [0, 1, 0, 1, 0, 1]
    assert turns([3, 1], 8) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert sorted(turns([5, 3, 2], 10)) == [0] * 5 + [1] * 3 + [2] * 2


def turns(weights, num):
    made = Turns(weights)
    found = []
    for _ in range(num):
        found.append(made.next())
        made.counts[found[-1]] += 1
    return found


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 300))
def test_counts_after_many_turns_are_computed(weights, num):
    made = Turns(weights)
    made.go_to(num)
    found = turns(weights, num)
    assert made.counts == [found.count(i) for i in range(len(weights))]


def test_a_million_samples_are_passed_over_without_a_million_turns():
    long = SeekableLists(range(10**9))
    stream = Mixture([long, long], [0.7, 0.3])
    opened = stream.open(0, 1, 0)
    opened.skip(10**9)
    assert opened.state_dict()[1] == [700_000_000, 300_000_000]
    assert long.num_read == 0


def test_a_shard_ends_with_the_first_component_whose_turn_finds_nothing():
    stream = Mixture(components(Lists, [[3], [9]]), [1, 1])
    assert [name for name, _, _ in read(stream.open(0, 1, 0))] == [0, 1, 0, 1, 0, 1]


def test_the_others_continue_in_proportion():
    stream = Mixture(components(Lists, [[1], [8], [4]]), [2, 2, 1], stop="all")
    names = [name for name, _, _ in read(stream.open(0, 1, 0))]
    rest = names[names.index(0) + 1 :]
    assert rest.count(1) + names[: names.index(0)].count(1) == 8
    assert abs(rest[:6].count(1) - 4) <= 1


def test_floats_are_the_decimal_numbers_they_print_as():
    lists = Lists([1])
    assert (
        Mixture([lists, lists], [0.1, 0.3]).fingerprint
        == Mixture([lists, lists], [1, 3]).fingerprint
    )


def test_the_fingerprint_covers_components_and_settings():
    one, two = Lists([1]), Lists([2])
    different = [
        Mixture([one, two], [1, 1]),
        Mixture([two, one], [1, 1]),
        Mixture([one, two], [1, 2]),
        Mixture([one, two], [1, 1], stop="all"),
    ]
    assert len({stream.fingerprint for stream in different}) == 4


@pytest.mark.parametrize(
    ("streams", "weights", "said"),
    [
        ([Lists([1]), Lists([1], [2])], [1, 1], r"num_shards .*\[1, 2\].* must be the same"),
        ([Lists([1])], [1, 2], r"weights \(2 of them\) must be one for each stream \(1 of them\)"),
        ([Lists([1])], [0], r"a weight \(0.0\) must be above 0"),
        ([], [], r"at least one"),
    ],
)
def test_what_cannot_be_mixed_is_refused(streams, weights, said):
    with pytest.raises(ValueError, match=said):
        Mixture(streams, weights)


def test_another_stop_is_refused():
    with pytest.raises(ValueError, match=r"stop \('last'\) must be one of first, all"):
        Mixture([Lists([1])], [1], stop="last")
