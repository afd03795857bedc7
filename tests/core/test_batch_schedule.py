import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.batch_schedule import BatchSchedule
from resilin.core.clock import Clock

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def test_it_is_read_as_megatron_writes_it():
    schedule = BatchSchedule.parse("0:768 250B:1536 1.5T:3072")
    assert schedule.starts == (0, 250 * 10**9, 15 * 10**11)
    assert schedule.sizes == (768, 1536, 3072)
    assert schedule.unit == "tokens"
    assert schedule(Clock(samples=10**12)) == 768
    assert BatchSchedule.parse("0:8\n 2K:16", unit="samples")(Clock(samples=2000)) == 16


positions = st.lists(
    st.tuples(st.integers(1, 999), st.sampled_from(sorted(SUFFIXES))), max_size=6
).map(
    lambda pairs: sorted(
        {f"{n}{s}": n * SUFFIXES[s] for n, s in pairs}.items(), key=lambda item: item[1]
    )
)


@given(positions, st.data(), st.sampled_from(["tokens", "samples"]))
def test_a_size_holds_from_its_position_until_the_next(written, data, unit):
    # Two texts of one number, such as 1000 and 1K, would not ascend.
    written = [("0", 0), *{at: (text, at) for text, at in written}.values()]
    sizes = data.draw(st.lists(st.integers(1, 10**6), min_size=len(written), max_size=len(written)))
    text = " ".join(f"{at}:{size}" for (at, _), size in zip(written, sizes, strict=True))
    schedule = BatchSchedule.parse(text, unit=unit)
    assert BatchSchedule.parse(schedule.format(), unit=unit) == schedule

    def size_at(used):
        return schedule(Clock(samples=used) if unit == "samples" else Clock(tokens=float(used)))

    for index, (_, at) in enumerate(written):
        assert size_at(at) == size_at(at + 1 if written[-1][1] == at else at) == sizes[index]
        if at:
            assert size_at(at - 1) == sizes[index - 1]


@given(st.text())
def test_any_other_text_is_a_documented_error(text):
    with contextlib.suppress(ValueError):
        assert BatchSchedule.parse(text).starts[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs at least one POSITION:SIZE"),
        ("768", "entry '768' of a batch schedule must be POSITION:SIZE"),
        ("0:768,250B:1536", "entry '0:768,250B:1536'"),
        ("0:768 250G:1536", "entry '250G:1536'.*suffixes K, M, B, T"),
        ("0:768 250b:1536", "entry '250b:1536'"),
        ("0:768 -1:1536", "entry '-1:1536'"),
        ("0:1K", "entry '0:1K'"),
        ("0:768 1.2345K:2", r"position 1.2345K of entry .* \(1234.5\) must be whole"),
        ("1:768", r"'1:768': the first position \(1\) must be 0"),
        ("0:768 5:1 5:2", "position 5 must come after position 5"),
        ("0:768 2K:1 1999:2", "position 1999 must come after position 2000"),
        ("0:0", r"batch size \(0\) must be at least 1"),
        ("0:1 10000T:2", r"position \(10000000000000000\) must be at most 9007199254740992"),
    ],
)
def test_errors_name_the_entry_and_the_rule(text, message):
    with pytest.raises(ValueError, match=message):
        BatchSchedule.parse(text)


def test_the_unit_is_tokens_or_samples():
    with pytest.raises(ValueError, match=r"unit \('steps'\) must be one of tokens, samples"):
        BatchSchedule.parse("0:1", unit="steps")
    with pytest.raises(ValueError, match="got 1 sizes and 2 positions"):
        BatchSchedule((0, 1), (1,))
