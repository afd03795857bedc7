import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.streams import Packed, Shuffled
from tests.streams.sources import Lists, SeekableLists, StatefulLists, check_resumes, read

KINDS = st.sampled_from([Lists, SeekableLists, StatefulLists])


def documents(lengths):
    """Lists of tokens of which no two are the same."""
    ends = np.cumsum([0, *lengths]).tolist()
    return [list(range(1 + begin, 1 + end)) for begin, end in pairwise(ends)]


@given(
    KINDS,
    st.lists(st.integers(0, 30), max_size=8),
    st.integers(1, 12),
    st.sampled_from(["pad", "short", "drop"]),
    st.sampled_from([None, -1]),
)
def test_no_token_is_lost_or_repeated_at_any_place(kind, lengths, length, remainder, separator):
    source = kind(documents(lengths), documents(lengths[::-1]))
    stream = Packed(source, length, separator=separator, remainder=remainder)
    for shard, parts in enumerate(source.shards):
        packs = check_resumes(stream, shard)
        expected = [
            token
            for part in parts
            for token in [*part, *([] if separator is None else [separator])]
        ]
        tokens = [token for pack in packs for token in pack["input_ids"][: pack["num_tokens"]]]
        dropped = len(expected) % length if remainder == "drop" else 0
        assert tokens == expected[: len(expected) - dropped]
        for pack in packs[:-1]:
            assert pack["num_tokens"] == len(pack["input_ids"]) == length
        for pack in packs[-1:]:
            assert len(pack["input_ids"]) == (
                pack["num_tokens"] if remainder == "short" else length
            )
            assert pack["input_ids"][pack["num_tokens"] :] == [0] * (
                len(pack["input_ids"]) - pack["num_tokens"]
            )


@given(st.lists(st.integers(0, 9), max_size=25), st.integers(1, 8), st.integers(1, 6))
def test_packs_of_shuffled_documents_continue_at_any_place(lengths, length, size):
    source = Shuffled(StatefulLists(documents(lengths)), size)
    packs = check_resumes(Packed(source, length), 0)
    tokens = [token for pack in packs for token in pack["input_ids"][: pack["num_tokens"]]]
    assert sorted(tokens) == list(range(1, 1 + sum(lengths)))


def test_one_document_of_many_packs_is_read_once_and_its_state_is_small():
    source = StatefulLists([[1] * 10_000])
    opened = Packed(source, 10).open(0, 1, 0)
    for _ in range(700):
        next(opened)
    state = opened.state_dict()
    assert state == [[0, {"at": 0}], 7000]
    assert source.num_read == 1
    assert len(json.dumps(state)) < 40


def test_a_sample_is_an_array_of_int64_and_the_number_of_its_tokens():
    (pack,) = Packed(Lists([[7, 8]]), 3, pad=9).open(0, 1, 0)
    assert pack["input_ids"].dtype == np.int64
    assert pack["input_ids"].tolist() == [7, 8, 9]
    assert pack["num_tokens"] == 2


def test_packs_are_not_views_of_a_document():
    document = np.arange(6)
    first, second = Packed(Lists([document]), 3).open(0, 1, 0)
    first["input_ids"][:] = -1
    assert document.tolist() == [0, 1, 2, 3, 4, 5]
    assert second["input_ids"].tolist() == [3, 4, 5]


def test_documents_may_be_dicts_arrays_or_whatever_a_function_tokenises():
    expected = [[97, 98, 99]]
    for document, tokens in (
        ({"input_ids": [97, 98, 99]}, None),
        (np.array([97, 98, 99], dtype=np.uint16), None),
        ("abc", lambda text: list(text.encode())),
    ):
        packs = read(Packed(Lists([document]), 3, tokens=tokens).open(0, 1, 0))
        assert [pack["input_ids"] for pack in packs] == expected


@pytest.mark.parametrize("document", ["abc", [0.5], [[1, 2]]])
def test_what_are_no_tokens_is_refused(document):
    with pytest.raises(
        ValueError, match=r"tokens of a document .* must be a list of whole numbers"
    ):
        next(Packed(Lists([document]), 3).open(0, 1, 0))


def test_a_document_that_has_become_shorter_is_recognised():
    resumed = Packed(Lists([[1, 2]]), 1).open(0, 1, 0)
    with pytest.raises(ValueError, match=r"has 2 tokens, of which 3 were used before"):
        resumed.load_state_dict([[0, None], 3])


def test_the_fingerprint_covers_the_source_and_the_settings():
    lists = Lists([[1]])
    different = [
        Packed(lists, 4),
        Packed(lists, 5),
        Packed(lists, 4, separator=0),
        Packed(lists, 4, remainder="drop"),
        Packed(lists, 4, pad=1),
        Packed(Lists([[2]]), 4),
    ]
    assert len({stream.fingerprint for stream in different}) == len(different)
    dropped = Packed(lists, 4, remainder="drop", pad=1)
    assert dropped.fingerprint == different[3].fingerprint


def test_another_treatment_of_the_remainder_is_refused():
    with pytest.raises(ValueError, match=r"remainder \('keep'\) must be one of pad, short, drop"):
        Packed(Lists([[1]]), 4, remainder="keep")
