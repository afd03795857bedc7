import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilin.core.trace import BatchTrace, CapacityTrace, TraceError

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
        ("step,batchsize\n0,8\n2\n", "line 3: 1 columns below 2"),
        ("step,batchsize\n0,8\n\n1,-4\n", r"line 4: batchsize \(-4\) must be at least 1"),
        ("step,batchsize\n0,8.5\n", r"line 2: batchsize \('8.5'\) is not a whole number"),
        ("step,batchsize\n0,1_0\n", r"line 2: batchsize \('1_0'\) is not a whole number"),
        ("step,batchsize\n1,8\n", r"line 2: the first step \(1\) must be 0"),
        ("step,batchsize\n0,8\n0,8\n", "line 3: step 0 must come after step 0"),
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


@settings(max_examples=500)
@given(
    st.text()
    | st.lists(st.text("0123456789,.-+einfa_\"' \n"), max_size=6).map(
        lambda rows: "step,batchsize\n" + "\n".join(rows)
    )
    | st.lists(st.text("0123456789,.-+einfa_\"' \n"), max_size=6).map(
        lambda rows: "time,replicas\n" + "\n".join(rows)
    )
)
@example("time,replicas\n-1e308,1\n1e308,1\n")
@example("time,replicas\n1e16,1\n10000000000000000.5,1\n")
def test_whatever_is_in_the_file_only_the_documented_error_comes_out(text):
    for kind in (BatchTrace, CapacityTrace):
        try:
            trace = kind.parse(text)
        except TraceError:
            continue
        assert kind.parse(trace.format()) == trace


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
    with pytest.raises(TraceError, match="line 12: step 0 must come after step 9"):
        BatchTrace.parse(read["batchsize_mnist.csv"])
    rest = "step,batchsize\n" + read["batchsize_mnist.csv"].split("\n", 11)[-1]
    batches = BatchTrace.parse(rest)
    assert (batches.num_steps, batches.at(0), batches.at(799)) == (800, 256, 2048)
