"""Hints of a job: what a scheduler writes and reads, without torch."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.answer import Answer
from resilin.core.clock import CLOCKS
from resilin.core.fit import Fitted, StepTime, fit
from resilin.core.goodput import best_goodput, best_of_each
from resilin.core.hints import VERSION, GoodputTable, HintsError, JobHints, Speedup
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import ThroughputModel
from tests.examples import examples

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
    end="declared",
    noise=Noise(1.0, 500.0),
    throughput=MODEL,
)

TABLE = GoodputTable(
    kind="a100", sizes=(1, 2, 4), hosts=(1, 1, 2), goodput=(5.0, 9.0, 0.0), spread=(0.1, 0.2, 0.5)
)

whole = st.integers(1, 10**6)
real = st.floats(0, 1e9)
ends = st.sampled_from(
    [(None, "unknown"), (0.0, "declared"), (12.5, "declared"), (1e9, "estimated")]
)


@st.composite
def hints(draw):
    total, end = draw(ends)
    least = draw(whole)
    return JobHints(
        job=draw(st.none() | st.just("job-1")),
        generation=draw(whole),
        time=draw(st.none() | real),
        accelerator=draw(st.none() | st.just("NVIDIA A100")),
        rescale_seconds=draw(st.none() | real),
        hosts=draw(whole),
        replicas=draw(whole),
        accelerators_per_replica=draw(whole),
        min_replicas=least,
        max_replicas=draw(st.none() | st.integers(least, 10**7)),
        size_multiple=draw(whole),
        profiled=draw(whole),
        reference=draw(whole),
        batch_size=draw(whole),
        fixed=draw(st.booleans()),
        bounds=draw(
            st.sampled_from(
                [
                    BatchBounds(),
                    BatchBounds(100),
                    BatchBounds(64, (0, 8), gradient_accumulation=False),
                ]
            )
        ),
        steps=draw(whole),
        samples=draw(whole),
        progress=draw(real),
        total=total,
        end=end,
        clock=draw(st.sampled_from(CLOCKS)),
        noise=draw(st.none() | st.builds(Noise, real, real)),
        throughput=draw(st.none() | st.just(MODEL)),
        speedup=draw(st.none() | st.just(Speedup(replicas=(1, 2), speedup=(1.0, 0.0)))),
        tables=draw(st.sampled_from([(), (TABLE,), (TABLE, replace(TABLE, kind="v100"))])),
    )


@given(hints())
def test_what_was_written_is_read(told):
    text = json.dumps(told.to_json())
    assert JobHints.from_json(json.loads(text)) == told
    assert JobHints.parse(text.encode()) == told


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


SIZES = {"min": 1, "max": 8, "multiple": 1, "profiled": 1}


def table(**columns):
    return {**TABLE.to_json(), **columns}


LONG = {name: list(range(1, 601)) for name in ("sizes", "hosts", "goodput", "spread")}


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
        ("speedup", {"replicas": 1, "speedup": 2}, r"speedup.replicas \(1\) must be a list"),
        (
            "speedup",
            {"replicas": [1, 2], "speedup": [1, "x"]},
            r"speedup.speedup\[1\] \('x'\) must be a number",
        ),
        ("version", True, r"version \(True\) must be a whole number"),
        ("job", "mine", r"job \('mine'\) must be an object"),
        ("job.id", "", r"job.id \(''\) must have 1 to 100 characters"),
        ("job.id", "x" * 101, r"job.id \('xxx.*\.\.\.\) must have 1 to 100 characters"),
        ("job.id", "a\x1b[2J", "without control characters"),
        ("job.generation", -1, r"job.generation \(-1\) must be at least 0"),
        pytest.param(
            "job.generation", 10**5000, r"job.generation \(<int>\) must be at most", id="huge"
        ),
        ("job.time", 10**400, r"job.time \(1000.*\.\.\.\) must be finite"),
        ("job.time", float("nan"), r"job.time \(nan\) must be finite"),
        ("job.rescale_seconds", False, r"job.rescale_seconds \(False\) must be a number"),
        ("job.accelerator", 7, r"job.accelerator \(7\) must be a text"),
        ("sizes.min", 0, r"sizes.min \(0\) must be at least 1"),
        ("sizes", {**SIZES, "min": 9}, r"max_replicas \(8\) must be at least min_replicas \(9\)"),
        ("sizes.multiple", None, r"sizes.multiple \(None\) must be a whole number"),
        ("batch.fixed", 1, r"batch.fixed \(1\) must be true or false"),
        ("batch.local_bsz_bounds", [1, 2, 3], r"batch: local_bsz_bounds .* must be a pair"),
        ("batch.local_bsz_bounds", list(range(1001)), "1001 entries, and must have at most 1000"),
        ("progress.end", "soon", r"progress.end \('soon'\) must be one of declared, estimated"),
        ("progress.end", "unknown", r"end \('unknown'\) must be 'unknown' if total \(1000.0\)"),
        ("progress.clock", "wall", r"progress.clock \('wall'\) must be one of .*progress"),
        ("goodput", [], r"goodput \(\[\]\) must be an object"),
        ("goodput", {"a": 1}, r"goodput.a: goodput.a \(1\) must be an object"),
        ("goodput", {"a": table(sizes=[2, 1, 3])}, "goodput.a: sizes must be ascending"),
        ("goodput", {"a": table(sizes=[1])}, r"goodput.a: .* have 1, 3, 3, 3 entries"),
        ("goodput", {"a": table(spread=[0, 0, -1])}, r"spread\[2\] \(-1.0\) must be at least 0"),
        ("goodput", {"a": table(sizes=[1] * 1001)}, "sizes has 1001 entries"),
        ("goodput", {str(i): table() for i in range(33)}, "goodput has 33 kinds"),
        ("goodput", {"a": LONG, "b": LONG}, "goodput must have at most 1000 sizes, over all"),
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


@pytest.mark.parametrize(
    "path", ["version", "batch", "batch.current", "noise", "speedup", "job.id", "goodput", "sizes"]
)
def test_what_is_missing_is_named(path):
    told = HINTS.to_json()
    *above, name = path.split(".")
    del (told[above[0]] if above else told)[name]
    with pytest.raises(HintsError, match=f"{path} is missing"):
        JobHints.from_json(told)
    with pytest.raises(HintsError, match=r"the hints \(\[\]\) must be an object"):
        JobHints.from_json([])


def without_new_fields(told):
    """As version 1 was written."""
    for path in ("job", "sizes", "goodput"):
        del told[path]
    del told["placement"]["accelerators_per_replica"]
    del told["batch"]["fixed"]
    del told["progress"]["end"], told["progress"]["clock"]
    return {**told, "version": 1}


def test_version_1_is_read_as_a_job_that_says_less():
    said = without_new_fields(HINTS.with_speedup(4).to_json())
    assert JobHints.from_json(said) == HINTS.with_speedup(4)
    endless = replace(HINTS, total=None, end="unknown")
    assert JobHints.from_json(without_new_fields(endless.to_json())) == endless
    with pytest.raises(HintsError, match=r"progress\.end is missing"):
        JobHints.from_json({**said, "version": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the hints must be JSON"),
        (b"\xff\xfe", "the hints must be JSON"),
        (b"<html>", "the hints must be JSON"),
        (b"[" * 200_000, "the hints must be JSON"),
        (b'{"version": NaN}', "NaN is not a number of JSON"),
        (b" " * (2**20 + 1), r"\(1048577 characters\) must have at most 1048576"),
        (b"9" * 5000, "the hints must be JSON|must be an object"),
        (b"null", r"the hints \(None\) must be an object"),
    ],
)
def test_a_text_that_is_no_hint_is_an_error_of_hints(text, message):
    with pytest.raises(HintsError, match=message):
        JobHints.parse(text)


def test_the_record_on_the_page_is_one_and_has_all_fields():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "hints.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    shown = JobHints.parse(text)
    assert shown.to_json() == json.loads(text)
    names = {".".join(path) for path in places(shown.to_json())}
    assert names >= {".".join(path) for path in places(HINTS.to_json())}
    (answer,) = re.findall(r'`(\{"replicas": .*?\})`', page, re.DOTALL)
    assert Answer.parse(answer).menu["a100"][-1] == (8, 2)


# A table over the menu --------------------------------------------------------------------------


def fitted(model=MODEL):
    covariance = np.eye(len(model.parameters)) * 0.01
    return Fitted(model, covariance, noise=0.05, compute_noise=0.05)


def test_a_table_has_the_goodput_of_each_offer_and_is_surer_where_it_was_measured():
    menu = {"a100": ((1, 1), (2, 1), (4, 1), (8, 2)), "v100": ((1, 1),), "empty": ()}
    told = HINTS.with_tables(menu, {"a100": fitted(), "empty": fitted()})
    (own,) = told.tables
    assert (own.kind, own.sizes, own.hosts) == ("a100", (1, 2, 4, 8), (1, 1, 1, 2))
    assert own.goodput == pytest.approx(HINTS.goodput([1, 1, 1, 2], [1, 2, 4, 8]).tolist())
    measured = [
        StepTime(hosts=1, replicas=1, local_bsz=64, compute_seconds=0.07 * f) for f in (1, 1.01)
    ]
    (own,) = HINTS.with_tables(menu, {"a100": fit(measured)}).tables
    assert own.spread[0] < 0.2 < own.spread[3]


def test_sizes_that_the_job_cannot_have_are_worth_nothing():
    menu = {"a100": tuple((size, 1) for size in range(1, 13))}
    limited = replace(
        HINTS, min_replicas=2, max_replicas=8, size_multiple=2, accelerators_per_replica=2
    )
    (own,) = limited.with_tables(menu, {"a100": fitted()}).tables
    assert [size for size, value in zip(own.sizes, own.goodput, strict=True) if value] == [
        2,
        4,
        6,
        8,
    ]
    # Four accelerators are two replicas.
    assert own.goodput[3] == pytest.approx(float(HINTS.goodput(1, 2)))


def test_the_goodput_of_a_fixed_batch_is_its_throughput():
    job = replace(HINTS, fixed=True, batch_size=64, bounds=BatchBounds(64, (0, 16)))
    seconds = MODEL.step_seconds(1, [1, 2, 4], [16, 16, 16], [4, 2, 1])
    assert job.goodput(1, [1, 2, 4]) == pytest.approx(64 / seconds)
    # A batch of twice the reference that stays is worth its efficiency, and never less of a batch.
    twice = replace(job, batch_size=128, bounds=BatchBounds(128))
    worth = HINTS.noise.efficiency(128, 64) * 128 / MODEL.step_seconds(1, 2, 64)
    assert float(twice.goodput(1, 2)) == pytest.approx(float(worth))


def test_where_the_run_ends_by_samples_the_best_plan_counts_by_its_samples():
    by_samples = replace(HINTS, clock="samples")
    hosts, replicas = [1, 1, 2], [1, 4, 8]
    best = best_of_each(MODEL, HINTS.noise, 64, HINTS.bounds, hosts, replicas)
    seconds = MODEL.step_seconds(hosts, replicas, best.local_bsz, best.accumulation_steps)
    assert by_samples.goodput(hosts, replicas) == pytest.approx(best.batch_size / seconds)
    assert (by_samples.goodput(hosts, replicas) > HINTS.goodput(hosts, replicas))[1:].all()
    assert by_samples.goodput(1, 129) == 0  # replicas of 8 samples each exceed the largest batch


# Answers of a scheduler -------------------------------------------------------------------------


def test_an_answer_that_was_written_is_read():
    answer = Answer(replicas=4, menu={"gpu": ((1, 1), (8, 2))}, leaves=1.8e9)
    assert Answer.parse(json.dumps(answer.to_json())) == answer
    assert Answer.from_json({**Answer().to_json(), "later": 1}) == Answer()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": -1}, r"replicas \(-1\) must be at least 0"),
        ({"leaves": "soon"}, r"leaves \('soon'\) must be a number"),
        ({"menu": None}, r"menu \(None\) must be an object"),
        ({"menu": {"gpu": [[1]]}}, "must be a pair"),
        ({"menu": {"gpu": [[1, 2]]}}, r"hosts of menu\[0\] \(2\) must be at most 1"),
        ({"menu": {"gpu": [[2, 1], [1, 1]]}}, "menu.gpu must have ascending sizes"),
        ({"menu": {"gpu": [[1, 1], [1, 1]]}}, "none of them twice"),
        ({"menu": {"gpu": [[10**7, 1]]}}, "must be at most 1000000"),
        ({"menu": {"gpu": [[i + 1, 1] for i in range(1001)]}}, "at most 1000"),
        ({"menu": {k: [[i + 1, 1] for i in range(600)] for k in "ab"}}, "over all kinds"),
    ],
)
def test_an_answer_that_is_none_is_refused(change, message):
    with pytest.raises(HintsError, match=message):
        Answer.from_json({**Answer().to_json(), **change})


# Garbage ----------------------------------------------------------------------------------------

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


def places(value, path=()):
    """Paths of all values in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


FULL = replace(HINTS.with_speedup(4), job="a", tables=(TABLE,)).to_json()


@examples(500)
@given(st.sampled_from(sorted(places(FULL))), junk, st.booleans())
def test_hints_with_a_field_of_garbage_are_read_or_refused(path, value, cut):
    told = json.loads(json.dumps(FULL))
    if not path:
        told = value
    else:
        place = told
        for name in path[:-1]:
            place = place[name]
        if cut:
            del place[path[-1]]
        else:
            place[path[-1]] = value
    try:
        read = JobHints.from_json(told)
    except HintsError as error:
        said = str(error)
    else:
        # What was read can be written, and is finite throughout.
        assert JobHints.parse(json.dumps(read.to_json(), allow_nan=False)) == read
        return
    assert len(said) < 1000
    assert said.isprintable()


@given(st.binary(max_size=200) | st.text(max_size=200) | junk.map(lambda each: json.dumps(each)))
def test_any_text_is_read_or_refused(text):
    for read in (JobHints.parse, Answer.parse):
        try:
            read(text)
        except HintsError:
            continue
        assert isinstance(json.loads(text), dict)


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
