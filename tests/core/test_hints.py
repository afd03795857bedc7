"""Hints of a job: what a scheduler writes and reads, without torch."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.goodput import best_goodput
from resilin.core.hints import VERSION, HintsError, JobHints, Speedup
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import ThroughputModel

MODEL = ThroughputModel(
    compute_start=0.01,
    compute_per_sample=0.001,
    local_sync=0.002,
    local_growth=0.0001,
    host_sync=0.01,
    host_growth=0.001,
    overlap=2.0,
    ring=0.5,
)
HINTS = JobHints(
    hosts=2,
    replicas=8,
    reference=64,
    batch_size=128,
    bounds=BatchBounds(1024, (8, 64)),
    steps=100,
    samples=9000,
    progress=120.5,
    total=1000.0,
    noise=Noise(1.0, 500.0),
    throughput=MODEL,
)

whole = st.integers(1, 10**6)
real = st.floats(0, 1e9)
hints = st.builds(
    JobHints,
    hosts=whole,
    replicas=whole,
    reference=whole,
    batch_size=whole,
    bounds=st.sampled_from(
        [BatchBounds(), BatchBounds(100), BatchBounds(64, (0, 8), gradient_accumulation=False)]
    ),
    steps=whole,
    samples=whole,
    progress=real,
    total=st.none() | real,
    noise=st.none() | st.builds(Noise, real, real),
    throughput=st.none() | st.just(MODEL),
    speedup=st.none() | st.just(Speedup(replicas=(1, 2), speedup=(1.0, 0.0))),
)


@given(hints)
def test_what_was_written_is_read(told):
    assert JobHints.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_the_speedup_is_that_of_the_best_goodput():
    told = HINTS.with_speedup(20)
    assert told.speedup is not None
    assert told.speedup.replicas == (1, 2, 4, 8, 16)
    assert told.speedup.speedup[0] == 1
    # Four replicas on each host, as now.
    best = best_goodput(MODEL, HINTS.noise, 64, HINTS.bounds, [1, 1, 1, 2, 4], [1, 2, 4, 8, 16])
    assert told.speedup.speedup == pytest.approx((best / best[0]).tolist())
    assert replace(told, speedup=None) == HINTS
    assert HINTS.goodput(2, 8) == best[3]


def test_more_replicas_learn_faster_until_no_plan_is_allowed():
    told = replace(HINTS, bounds=BatchBounds(1024, (16, 64))).with_speedup(300)
    assert told.speedup is not None
    curve = told.speedup.speedup
    assert all(a < b for a, b in pairwise(curve[:4]))
    assert all(value <= num for value, num in zip(curve, told.speedup.replicas, strict=True))
    # 128 replicas of at least 16 samples each exceed the largest batch.
    assert curve[-2:] == (0.0, 0.0)


def test_without_a_throughput_there_is_no_speedup():
    unknown = replace(HINTS, throughput=None)
    assert unknown.with_speedup(8).speedup is None
    with pytest.raises(ValueError, match="no step"):
        unknown.goodput(1, 1)
    with pytest.raises(ValueError, match=r"max_replicas \(0\) must be at least 1"):
        HINTS.with_speedup(0)


def test_a_later_writer_may_say_more_and_an_earlier_one_less():
    told = HINTS.to_json()
    told["batch"]["shape"] = [3, 4]
    told["noise"]["spread"] = 1.0
    told["queue"] = "long"
    assert JobHints.from_json(told) == HINTS
    del told["throughput"]["ring"]
    assert JobHints.from_json(told) == replace(HINTS, throughput=replace(MODEL, ring=0.0))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", VERSION + 1, rf"version \({VERSION + 1}\) must be at most {VERSION}"),
        ("placement", None, r"placement \(None\) must be an object"),
        ("placement.hosts", 0, r"placement.hosts \(0\) must be at least 1"),
        ("batch.current", 1.5, r"batch.current \(1.5\) must be a whole number"),
        ("batch.local_bsz_bounds", [9, 8], r"batch: .*\(9\) must be at most .*\(8\)"),
        ("batch.gradient_accumulation", 1, r"batch.gradient_accumulation \(1\) must be true"),
        ("progress.progress", "far", r"progress.progress \('far'\) must be a number"),
        ("progress.total", -1, r"progress.total \(-1.0\) must be at least 0"),
        ("noise.trace", None, r"noise.trace \(None\) must be a number"),
        ("throughput.overlap", 99, r"throughput: overlap \(99.0\) must be at most"),
        ("speedup", {"replicas": [1], "speedup": []}, r"replicas has 1 entries .* has 0"),
        ("speedup", {"replicas": 1, "speedup": 2}, "speedup: "),
    ],
)
def test_errors_name_the_field(path, value, message):
    told = HINTS.to_json()
    *above, name = path.split(".")
    place = told
    for each in above:
        place = place[each]
    place[name] = value
    with pytest.raises(HintsError, match=message):
        JobHints.from_json(told)


@pytest.mark.parametrize("path", ["version", "batch", "batch.current", "noise", "speedup"])
def test_what_is_missing_is_named(path):
    told = HINTS.to_json()
    *above, name = path.split(".")
    del (told[above[0]] if above else told)[name]
    with pytest.raises(HintsError, match=f"{path} is missing"):
        JobHints.from_json(told)
    with pytest.raises(HintsError, match=r"the hints \(\[\]\) must be an object"):
        JobHints.from_json([])


def test_a_scheduler_reads_them_without_torch():
    script = (
        "import json, sys; from resilin.core.hints import JobHints; "
        "told = JobHints.from_json(json.load(sys.stdin)); print(told.goodput(1, 4)); "
        "assert 'torch' not in sys.modules"
    )
    told = json.dumps(HINTS.to_json())
    done = subprocess.run(
        [sys.executable, "-c", script], input=told, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(float(HINTS.goodput(1, 4)))
