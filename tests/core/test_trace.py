import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilin.core.trace import TRACE_ENDS, BatchTrace, CapacityTrace, TraceError, parse_trace
from tests.examples import examples

DATA = Path(os.environ.get("RESILIN_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "capacity").is_dir(), reason=f"the public traces are not at {DATA}"
)


@st.composite
def batch_traces(draw):
    gaps = draw(st.lists(st.integers(1, 1000), max_size=30))
    starts = np.cumsum([0, *gaps]).tolist()
    sizes = draw(st.lists(st.integers(1, 10**9), min_size=len(starts), max_size=len(starts)))
    return BatchTrace(tuple(starts), tuple(sizes), draw(st.sampled_from(["hold", "repeat"])))


@given(batch_traces())
def test_batch_traces_round_trip(trace):
    assert BatchTrace.parse(trace.format(), end=trace.end) == trace


@given(st.lists(st.floats(0.001, 1e5), max_size=30), st.data())
def test_capacity_traces_round_trip(gaps, data):
    times = tuple(float(t) for t in np.cumsum([0.0, *gaps]))
    counts = st.lists(st.integers(0, 10**6), min_size=len(times), max_size=len(times))
    trace = CapacityTrace(times, tuple(data.draw(counts)))
    assert CapacityTrace.parse(trace.format()) == trace


@given(batch_traces(), st.integers(0, 5000))
def test_a_value_holds_until_the_next_line(trace, step):
    last_step = trace.num_steps - 1
    known = min(step, last_step) if trace.end == "hold" else step % trace.num_steps
    last = max(i for i, start in enumerate(trace.starts) if start <= known)
    assert trace.at(step) == trace.sizes[last]


def test_the_end_is_chosen_by_name():
    text = "step,batchsize\n0,8\n1,16\n3,32\n"
    steps = range(7)
    assert [BatchTrace.parse(text).at(s) for s in steps] == [8, 16, 16, 32, 32, 32, 32]
    repeat = BatchTrace.parse(text, end="repeat")
    assert [repeat.at(s) for s in steps] == [8, 16, 16, 32, 8, 16, 16]
    strict = BatchTrace.parse(text, end="error")
    assert strict.at(3) == 32
    with pytest.raises(TraceError, match=r"step 4 is past the end of the trace \(4\)"):
        strict.at(4)

    text = "time,replicas\n100,4\n110,0\n130,2\n"
    times = (0, 9.5, 10, 30, 31, 45)
    assert [CapacityTrace.parse(text).at(t) for t in times] == [4, 4, 0, 2, 2, 2]
    assert [CapacityTrace.parse(text, end="repeat").at(t) for t in times] == [4, 4, 0, 4, 4, 0]
    with pytest.raises(TraceError, match=r"time 31 is past the end"):
        CapacityTrace.parse(text, end="error").at(31)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: empty"),
        ("step,batchsize\n", "t.csv: no line after the header"),
        ("step,size\n0,1\n", "line 1: the header is 'step,size', expected 'step,batchsize'"),
        ("step,batchsize\n0,8\n2\n", "line 3: 1 columns, but the header has 2"),
        ("step,batchsize\n0,8\n\n1,-4\n", r"line 4: batchsize \(-4\) must be at least 1"),
        ("step,batchsize\n0,8.5\n", r"line 2: batchsize \('8.5'\) is not a whole number"),
        ("step,batchsize\n0,1_0\n", r"line 2: batchsize \('1_0'\) is not a whole number"),
        ("step,batchsize\n1,8\n", r"line 2: the first step \(1\) must be 0"),
        ("step,batchsize\n0,8\n2,8\n2,8\n", "line 4: step 2 must come after step 2$"),
        (
            "step,batchsize\n0,8\n0,8\n",
            "line 3: step 0 must come after step 0; restarts='append' appends",
        ),
        ('step,batchsize\n0,"8\n', "line 2"),
    ],
)
def test_errors_name_source_and_line(text, message):
    with pytest.raises(TraceError, match=message):
        BatchTrace.parse(text, source="t.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,workers\n0,1\n", "line 1: the header is 'time,workers'"),
        ("time,replicas\nnoon,1\n", r"line 2: time \('noon'\) is not a number"),
        ("time,replicas\nnan,1\n", "line 2: time .* must be finite"),
        ("time,replicas\n0,1\n0,1\n", "line 3: time 0.0 must come after time 0.0"),
        ("time,replicas\n0,-1\n", r"line 2: replicas \(-1\) must be at least 0"),
        ("time,replicas\n0,1\n1e300,1\n", "line 3: .*1e\\+12 seconds"),
    ],
)
def test_capacity_errors_name_source_and_line(text, message):
    with pytest.raises(TraceError, match=message):
        CapacityTrace.parse(text, source="t.csv")


def test_where_steps_begin_again_the_reader_can_count_on():
    text = "step,batchsize\n0,8\n3,16\n0,32\n2,64\n0,4\n"
    trace = BatchTrace.parse(text, restarts="append")
    assert trace == BatchTrace((0, 3, 4, 6, 7), (8, 16, 32, 64, 4))
    for faulty, message in [
        ("0,8\n3,8\n1,8\n", "line 4: step 1 must come after step 3$"),
        ("0,8\n3,8\n0,8\n5,8\n5,8\n", "line 6: step 5 must come after step 5$"),
        ("0,8\n1,8\n0,8\n999999999999999999,8\n", "line 5: .* at most 18 digits"),
        ("2,8\n0,8\n", r"line 2: the first step \(2\) must be 0"),
    ]:
        with pytest.raises(TraceError, match=message):
            BatchTrace.parse("step,batchsize\n" + faulty, restarts="append")
    with pytest.raises(ValueError, match=r"restarts \('skip'\) must be one of error, append"):
        BatchTrace.parse(text, restarts="skip")


@given(st.lists(batch_traces(), min_size=1, max_size=4))
def test_parts_that_are_joined_read_as_one_after_the_other(parts):
    lines = [line for part in parts for line in part.format().splitlines()[1:]]
    joined = BatchTrace.parse(["step,batchsize", *lines], restarts="append")
    assert joined.num_steps == sum(part.num_steps for part in parts)
    first = 0
    for part in parts:
        for step in {*part.starts, *(start - 1 for start in part.starts if start)}:
            assert joined.at(first + step) == part.at(step)
        first += part.num_steps


def test_the_header_tells_the_kind():
    assert parse_trace("\nstep,batchsize\n0,8\n") == BatchTrace((0,), (8,))
    assert parse_trace(['"Time ",GPUs', "5,8"], end="repeat") == CapacityTrace((0,), (8,), "repeat")
    assert parse_trace("step,batchsize\n0,8\n0,4", restarts="append").sizes == (8, 4)
    with pytest.raises(TraceError, match=r"t.csv, line 1: .* expected 'step,batchsize' or 'time,"):
        parse_trace("when,what\n0,1\n", source="t.csv")
    with pytest.raises(TraceError, match=r"t.csv: empty"):
        parse_trace("\n\n", source="t.csv")


def read_every_way(text):
    """Whatever is read can be written and read again, and converted or refused by name."""
    for restarts in ("error", "append"):
        try:
            trace = BatchTrace.parse(text, restarts=restarts)
        except TraceError:
            continue
        assert BatchTrace.parse(trace.format()) == trace
    try:
        trace = CapacityTrace.parse(text)
    except TraceError:
        return
    assert CapacityTrace.parse(trace.format()) == trace
    assert trace.simplified().duration == trace.duration
    for end in TRACE_ENDS:
        for local_bsz, step_seconds, max_replicas in [(8, 0.3, None), (10**17, 1e-9, 3)]:
            try:
                batches = trace.batches(
                    local_bsz, step_seconds=step_seconds, max_replicas=max_replicas, end=end
                )
            except TraceError:
                continue
            assert BatchTrace.parse(batches.format(), end=end) == batches


@examples(5500)
@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
def test_whatever_is_in_the_file_only_the_documented_error_comes_out(text):
    read_every_way(text)


@examples(3000)
@given(
    st.sampled_from(["step,batchsize", "time,replicas", ",Time,GPUs"]),
    st.text('0123456789,.-+e_"\n'),
)
@example("time,replicas", "-1e308,1\n1e308,1")
@example("time,replicas", "1e16,1\n10000000000000000.5,1")
@example("time,replicas", "-1e11,1\n1e-8,1\n2e-8,1")
def test_whatever_is_below_the_header_only_the_documented_error_comes_out(header, below):
    read_every_way(f"{header}\n{below}")


WRITTEN = [
    BatchTrace((0, 2, 9), (64, 96, 32)).format(),
    BatchTrace((0, 2, 9), (64, 96, 32)).format() + "0,7\n1,9\n",
    CapacityTrace((0.0, 0.25, 60.0, 1e6), (4, 0, 8, 3)).format(),
    ",Time,GPUs\n0,1652434464.4,56\n1,1652434527.4,0\n2,1652434590.4,8\n",
]
EDITS = st.tuples(
    st.integers(0, 80), st.integers(0, 3), st.text('0123456789,.-+eE_"\n\0x', max_size=3)
)


@examples(1600)
@given(st.sampled_from(WRITTEN), st.lists(EDITS, min_size=1, max_size=2))
def test_whatever_a_good_file_is_changed_into_only_the_documented_error_comes_out(text, edits):
    for place, length, new in edits:
        text = text[:place] + new + text[place + length :]
    read_every_way(text)


def steps_one_by_one(trace, local_bsz, step_seconds):
    """What `batches` says, by walking through the trace; for times that floats hold exactly."""
    sizes, time = [], 0.0
    limit = trace.duration if trace.duration else 1e-9
    while time < limit or (trace.end == "error" and time == trace.duration):
        if trace.at(time):
            sizes.append(trace.at(time) * local_bsz)
            time += step_seconds
        else:
            time = min((t for t in trace.times if t > time), default=np.inf)
    if trace.end == "hold" and trace.duration and trace.replicas[-1]:
        sizes.append(trace.replicas[-1] * local_bsz)
    return sizes


@examples(300)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=12),
    st.integers(0, 3),
    st.sampled_from([0.25, 0.5, 1.0, 2.75, 100.0]),
    st.sampled_from(TRACE_ENDS),
)
@example([(4, 1)], 0, 0.25, "error")
@example([(3, 2)], 0, 0.25, "repeat")
@example([], 2, 0.25, "repeat")
def test_batches_of_a_capacity_trace_are_those_of_a_walk_through_it(gaps, first, seconds, end):
    times = np.cumsum([0.0, *(gap / 4 for gap, _ in gaps)]).tolist()
    trace = CapacityTrace(tuple(times), (first, *(count for _, count in gaps)), end)
    expected = steps_one_by_one(trace, 8, seconds)
    if not expected:
        with pytest.raises(TraceError, match="no step can begin"):
            trace.batches(8, step_seconds=seconds)
        return
    batches = trace.batches(8, step_seconds=seconds)
    assert batches.end == end
    assert [batches.at(step) for step in range(batches.num_steps)] == expected


def test_steps_that_fall_on_a_change_see_it_in_spite_of_rounding():
    # 1.1 / 0.1 is a little more than 11.
    trace = CapacityTrace((0.0, 1.1, 2.0), (2, 3, 3), "repeat")
    assert trace.batches(1, step_seconds=0.1) == BatchTrace((0, 11, 19), (2, 3, 3), "repeat")


def test_a_million_steps_of_batches_are_a_few_lines():
    trace = CapacityTrace((0.0, 1e6, 2e6, 3e6), (4, 0, 8, 8))
    batches = trace.batches(32, step_seconds=1.0)
    assert batches == BatchTrace((0, 10**6, 2 * 10**6), (128, 256, 256))
    with pytest.raises(TraceError, match="more than 1e\\+18 steps"):
        trace.batches(32, step_seconds=1e-300)
    with pytest.raises(TraceError, match="at most 18 digits"):
        trace.batches(10**18, step_seconds=1.0)


@pytest.mark.parametrize("end", TRACE_ENDS)
def test_without_any_replicas_there_are_no_batches(end):
    with pytest.raises(TraceError, match=f"no replicas at any time .*100 seconds, then '{end}'"):
        CapacityTrace((0.0, 100.0), (0, 0)).batches(8, step_seconds=1.0, end=end)


def test_a_trace_that_ends_with_none_holds_its_last_batch():
    trace = CapacityTrace((0.0, 10.0, 20.0), (2, 4, 0))
    assert trace.batches(8, step_seconds=5.0) == BatchTrace((0, 2, 3), (16, 32, 32))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(1, 100))
def test_a_scaled_trace_keeps_its_peak_and_its_zeros(counts, max_replicas):
    trace = CapacityTrace(tuple(map(float, range(len(counts)))), tuple(counts))
    scaled = trace.scaled(max_replicas)
    assert max(scaled.replicas) == min(max(counts), max_replicas)
    for count, fewer in zip(counts, scaled.replicas, strict=True):
        assert (count == 0) == (fewer == 0)
        if max(counts) > max_replicas:
            assert fewer - 1 < count * max_replicas / max(counts) <= fewer
    if max(counts):
        few = trace.batches(8, step_seconds=0.5, max_replicas=max_replicas)
        assert few == scaled.batches(8, step_seconds=0.5)


def test_time_can_be_compressed_and_idle_lines_dropped():
    trace = CapacityTrace((0.0, 60.0, 120.0, 180.0, 240.0), (2, 2, 3, 3, 3), "repeat")
    fast = trace.compressed(60)
    assert fast == CapacityTrace((0.0, 1.0, 2.0, 3.0, 4.0), (2, 2, 3, 3, 3), "repeat")
    assert fast.simplified() == CapacityTrace((0.0, 2.0, 4.0), (2, 3, 3), "repeat")
    assert CapacityTrace((0.0,), (2,)).simplified() == CapacityTrace((0.0,), (2,))
    for speed in (0, -1, float("inf")):
        with pytest.raises(ValueError, match="speed"):
            trace.compressed(speed)
    with pytest.raises(TraceError, match="at most 1e\\+12"):
        trace.compressed(1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchTrace((), ()), "one batch size per step, got 0 and 0"),
        (lambda: BatchTrace((0, 1), (8,)), "got 1 and 2"),
        (lambda: BatchTrace((1,), (8,)), r"first step \(1\) must be 0"),
        (lambda: BatchTrace((0, 5, 5), (8, 8, 8)), "step 5 must come after step 5"),
        (lambda: BatchTrace((0,), (0,)), r"batch size \(0\)"),
        (lambda: BatchTrace((0,), (8,), "stop"), "'stop'.*must be one of hold"),
        (lambda: CapacityTrace((0.0, float("inf")), (1, 1)), "be finite"),
        (lambda: BatchTrace.constant(8, 3).at(-1), r"step \(-1\)"),
        (lambda: BatchTrace.random_walk((9, 8), 5, seed=0), r"upper bound \(8\)"),
        (lambda: CapacityTrace.spot(2, 10, seed=0, min_replicas=3), r"max_replicas \(2\)"),
        (lambda: CapacityTrace.spot(2, 1e9, seed=0, mean_hold=1e-3), r"duration \(1e\+09\)"),
        (lambda: CapacityTrace((0.0, 2e12), (1, 1)), r"last time \(2.*\) must be at most 1e\+12"),
        (lambda: CapacityTrace((0.0,), (10**18,)), "at most 18 digits"),
        (lambda: CapacityTrace((0.0,), (1,)).scaled(0), r"max_replicas \(0\)"),
    ],
)
def test_what_cannot_be_built_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_generators():
    assert BatchTrace.constant(8, 3).sizes == (8, 8, 8)
    assert BatchTrace.ramp(8, 16, 5).sizes == (8, 10, 12, 14, 16)
    assert BatchTrace.ramp(16, 8, 1).sizes == (16,)
    assert CapacityTrace.constant(3, 60).at(30) == 3


@given(st.integers(1, 100), st.integers(0, 500), st.integers(1, 200), st.integers(0, 2**32))
def test_a_random_walk_stays_within_its_bounds(lower, width, num_steps, seed):
    trace = BatchTrace.random_walk((lower, lower + width), num_steps, seed=seed)
    assert trace.num_steps == num_steps
    assert all(lower <= size <= lower + width for size in trace.sizes)
    assert trace == BatchTrace.random_walk((lower, lower + width), num_steps, seed=seed)


def test_a_random_walk_moves():
    trace = BatchTrace.random_walk((32, 1024), 500, seed=1)
    assert len(set(trace.sizes)) > 50
    assert trace != BatchTrace.random_walk((32, 1024), 500, seed=2)


@given(st.integers(0, 4), st.integers(4, 40), st.floats(1, 1e5), st.integers(0, 2**32))
def test_spot_markets_stay_within_their_bounds(lower, upper, duration, seed):
    trace = CapacityTrace.spot(upper, duration, seed=seed, min_replicas=lower, mean_hold=300)
    assert all(lower <= count <= upper for count in trace.replicas)
    assert trace.duration == pytest.approx(duration)
    assert trace == CapacityTrace.spot(
        upper, duration, seed=seed, min_replicas=lower, mean_hold=300
    )


def test_spot_markets_take_away_in_bunches():
    counts = np.array(CapacityTrace.spot(64, 1e6, seed=3).replicas)
    changes = np.diff(counts)
    assert changes.max() <= 16
    assert changes.min() < -16


@needs_data
def test_the_public_traces_read():
    read = {path.name: path.read_text() for path in (DATA / "capacity").glob("*.csv")}
    a100 = CapacityTrace.parse(read["gcp_spot_a100.csv"])
    tpus = CapacityTrace.parse(read["gcp_spot_tpuv2.csv"])
    assert (a100.replicas[0], tpus.replicas[0]) == (56, 88)
    assert a100.duration / 3600 == pytest.approx(3.7, abs=0.1)
    assert tpus.duration / 3600 == pytest.approx(16, abs=0.5)
    # The public batch-size file counts 0 to 9 and then starts again: a fault, and named as such.
    with pytest.raises(
        TraceError, match="line 12: step 0 must come after step 9; restarts='append'"
    ):
        BatchTrace.parse(read["batchsize_mnist.csv"])
    batches = BatchTrace.parse(read["batchsize_mnist.csv"], restarts="append")
    assert (batches.num_steps, batches.at(0), batches.at(10), batches.at(809)) == (
        810,
        128,
        256,
        2048,
    )
    for trace in (a100, tpus):
        assert trace.simplified().batches(8, step_seconds=30) == trace.batches(8, step_seconds=30)
