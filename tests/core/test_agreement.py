"""All replicas have the same number, or do not: told by sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.agreement import all_same, pieces, squares

HASHES = st.integers(0, 2**64 - 1)


def told(hashes):
    """What a ballot would say: sums of float64."""
    parts = [pieces(value) for value in hashes]
    columns = [sum(column) for column in zip(*parts, strict=True)]
    return columns, [sum(column) for column in zip(*map(squares, parts), strict=True)]


@given(st.lists(HASHES, min_size=1, max_size=9))
def test_sums_tell_whether_all_are_the_same(hashes):
    assert all_same(*told(hashes), len(hashes)) == (len(set(hashes)) == 1)


@given(HASHES, st.integers(2, 4096), st.integers(0, 63))
def test_one_bit_of_one_of_many_is_noticed(value, replicas, bit):
    hashes = [value] * replicas
    assert all_same(*told(hashes), replicas)
    hashes[-1] ^= 1 << bit
    assert not all_same(*told(hashes), replicas)


def test_only_64_bits_fit():
    for value in (-1, 2**64):
        with pytest.raises(ValueError, match="64 bits"):
            pieces(value)
