"""Streams of streams of streams: whatever is put together continues at any place."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from resilin.streams import FileStream, Mixture, Packed, Shuffled
from tests.streams.sources import SeekableLists, StatefulLists, check_resumes, read

NUM_SHARDS = 2


@st.composite
def files(draw, numbers):
    """A stream of files of documents; no two tokens are the same."""
    lengths = draw(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=2, max_size=5))
    content = {
        f"{next(numbers)}": [[next(numbers) for _ in range(length)] for length in file]
        for file in lengths
    }
    settings = {"shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 3))}
    return FileStream(
        list(content), lambda name: iter(content[name]), num_shards=NUM_SHARDS, **settings
    )


@st.composite
def lists(draw, numbers):
    kind = draw(st.sampled_from([SeekableLists, StatefulLists]))
    lengths = draw(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=2, max_size=2))
    return kind(*([[next(numbers) for _ in range(n)] for n in shard] for shard in lengths))


@st.composite
def streams(draw, numbers, depth=0):
    kind = draw(
        st.sampled_from(["files", "lists", *(["shuffled", "mixture"] if depth < 2 else [])])
    )
    if kind in ("files", "lists"):
        return draw((files if kind == "files" else lists)(numbers))
    if kind == "shuffled":
        source = draw(streams(numbers, depth + 1))
        return Shuffled(source, draw(st.integers(1, 5)), draw(st.integers(0, 3)))
    num = draw(st.integers(1, 3))
    sources = [draw(streams(numbers, depth + 1)) for _ in range(num)]
    weights = [draw(st.integers(1, 9)) for _ in range(num)]
    return Mixture(sources, weights, stop=draw(st.sampled_from(["first", "all"])))


@given(st.data(), st.integers(0, 2), st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_packs_of_any_stream_continue_at_any_place(data, epoch, places):
    source = data.draw(streams(itertools.count(1)))
    stream = Packed(source, data.draw(st.integers(1, 9)))
    tokens = []
    for shard in range(NUM_SHARDS):
        documents = check_resumes(source, shard, epoch, places)
        packs = check_resumes(stream, shard, epoch, places)
        found = [token for pack in packs for token in pack["input_ids"][: pack["num_tokens"]]]
        assert found == [token for document in documents for token in document]
        tokens += found
    assert len(set(tokens)) == len(tokens)


def test_a_stream_that_is_not_read_changes_nothing():
    source = StatefulLists([[1, 2], [3]], [])
    stream = Packed(Shuffled(Mixture([source], [1]), 2), 2)
    assert read(stream.open(1, 2, 0)) == []
    assert source.num_read == 0
