import dataclasses
import json
import math
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.events import (
    EVENTS,
    VERSION,
    Candidate,
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    EventError,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    RiskEvent,
    StartEvent,
    StepEvent,
    UnknownEvent,
    from_json,
    to_json,
)
from tests.examples import examples

STEP = StepEvent(
    time=1.5,
    step=3,
    epoch=0,
    replicas=2,
    batch_size=64,
    local_bsz=16,
    accumulation_steps=2,
    samples=192,
    progress=2.75,
    scale=2.0,
    gain=1.5,
    lr_factor=1.5,
)

floats = st.floats(allow_nan=False)
common = {"time": floats, "step": st.integers(), "generation": st.integers()}
candidates = st.builds(
    Candidate,
    batch_size=st.integers(),
    local_bsz=st.integers(),
    accumulation_steps=st.integers(),
    goodput=floats,
)
numbers = st.dictionaries(st.text(), floats, max_size=3)
events = st.one_of(
    st.builds(StartEvent, **common),
    st.builds(StepEvent, **common, metrics=numbers),
    st.builds(MetricsEvent, **common, values=numbers),
    st.builds(DecisionEvent, **common, candidates=st.lists(candidates, max_size=3).map(tuple)),
    st.builds(RescaleEvent, **common),
    st.builds(CheckpointEvent, **common),
    st.builds(FaultEvent, **common),
    st.builds(EpochEvent, **common),
    st.builds(RiskEvent, **common),
)


@given(events)
def test_events_round_trip(event):
    line = to_json(event)
    assert "\n" not in line
    assert json.loads(line)["version"] == VERSION
    # By their text: a record that holds a NaN equals nothing.
    assert repr(from_json(line)) == repr(event)
    assert repr(from_json(line.encode())) == repr(event)


def test_numbers_that_json_lacks():
    metrics = {"best": -math.inf, "accuracy": 0.5}
    event = from_json(
        to_json(dataclasses.replace(STEP, trace=math.inf, loss=math.nan, metrics=metrics))
    )
    assert event.trace == math.inf
    assert math.isnan(event.loss)
    assert event.metrics == metrics


def test_the_text_of_a_line_begins_with_its_kind():
    # Readers may tell lines apart by it, without parsing them.
    for event in (STEP, dataclasses.replace(STEP, loss=math.nan)):
        assert to_json(event).startswith('{"version":1,"event":"step","time":1.5,"step":3,')
    unknown = UnknownEvent(time=2.0, step=4, kind="heartbeat", fields={"rank": 7})
    assert to_json(unknown).startswith('{"version":1,"event":"heartbeat","time":2.0,')


def test_any_mapping_of_numbers_can_be_told():
    event = dataclasses.replace(STEP, metrics=MappingProxyType({"accuracy": 0.5}))
    assert from_json(to_json(event)).metrics == {"accuracy": 0.5}


def test_what_has_no_json_form_is_an_error_of_the_writer():
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json(dataclasses.replace(STEP, loss=object()))


def test_an_older_reader_skips_what_a_newer_writer_added():
    body = json.loads(to_json(STEP))
    body["temperature"] = {"gpu0": 71}
    assert from_json(json.dumps(body)) == STEP


def test_a_newer_reader_fills_in_what_an_older_writer_lacked():
    body = json.loads(to_json(STEP))
    for name in ("generation", "lr", "sqr_norm", "trace", "seconds", "loss"):
        del body[name]
    assert from_json(json.dumps(body)) == STEP


def test_an_unknown_kind_is_kept_whole():
    line = '{"version":1,"event":"heartbeat","time":2.0,"step":4,"generation":1,"rank":7}'
    event = from_json(line)
    assert event == UnknownEvent(
        time=2.0, step=4, generation=1, kind="heartbeat", fields={"rank": 7}
    )
    assert json.loads(to_json(event)) == json.loads(line)


def test_an_unknown_kind_with_numbers_that_json_lacks_can_be_told_again():
    line = '{"version":1,"event":"heartbeat","time":"nan","step":4,"load":[1e999,{"cpu":NaN}]}'
    body = json.loads(to_json(from_json(line)))
    assert (body["time"], body["load"]) == ("nan", ["inf", {"cpu": "nan"}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; this reader knows up to 1"),
        ({"version": "1"}, "version is '1'"),
        ({"version": None}, "not an event"),
        ({"event": 3}, "event is 3"),
        ({"step": "3"}, r"step.step \('3'\) must be int"),
        ({"step": True}, r"step.step \(True\) must be int"),
        ({"gain": "big"}, r"step.gain \('big'\) must be float"),
        ({"gain": 10**400}, "step.gain .* must be float"),
        ({"gain": None}, r"step.gain \(None\) must be float"),
        ({"lr": []}, r"step.lr \(\[\]\) must be float"),
        ({"metrics": [1]}, r"step.metrics \(\[1\]\) must be "),
        ({"metrics": {"a": "x"}}, r"step.metrics.a \('x'\) must be float"),
    ],
)
def test_a_broken_field_is_named(change, message):
    with pytest.raises(EventError, match=message):
        from_json(json.dumps({**json.loads(to_json(STEP)), **change}))


def test_lines_like_others_before_them_are_still_looked_at():
    body = json.loads(to_json(STEP))
    for loss in (0.5, 0.25):
        event = from_json(json.dumps({**body, "loss": loss, "metrics": {"a": 1}}))
        assert event == dataclasses.replace(STEP, loss=loss, metrics={"a": 1.0})
        assert type(event.metrics["a"]) is float
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.loss = 1.0
    # The same fields in another order, and the same types with other contents.
    assert from_json(json.dumps(dict(reversed(body.items())))) == STEP
    with pytest.raises(EventError, match=r"step\.metrics\.a \('much'\) must be float"):
        from_json(json.dumps({**body, "metrics": {"a": "much"}}))
    for seconds, what in (("inf", math.inf), ("long", None)):
        line = json.dumps({**body, "seconds": seconds})
        if what is None:
            with pytest.raises(EventError, match=r"step\.seconds \('long'\) must be float"):
                from_json(line)
        else:
            assert from_json(line).seconds == what


def test_a_missing_field_is_named():
    body = json.loads(to_json(STEP))
    del body["gain"]
    with pytest.raises(EventError, match=r"step\.gain is missing"):
        from_json(json.dumps(body))
    decision = '{"version":1,"event":"decision","time":0,"step":0,"batch_size_before":1,'
    decision += '"batch_size":1,"reason":"","candidates":[{"batch_size":1}]}'
    with pytest.raises(EventError, match=r"decision.candidates\[0\].local_bsz is missing"):
        from_json(decision)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
field_names = sorted({f.name for kind in EVENTS.values() for f in dataclasses.fields(kind)})


@examples(200)
@given(
    st.text()
    | st.binary()
    | json_values.map(json.dumps)
    | st.builds(
        lambda event, change: json.dumps({**json.loads(to_json(event)), **change}),
        events,
        st.dictionaries(st.sampled_from([*field_names, "version", "event"]), json_values),
    )
)
def test_whatever_is_in_the_line_only_the_documented_error_comes_out(line):
    try:
        event = from_json(line)
    except EventError:
        return
    to_json(event)


WHOLE = [
    to_json(STEP),
    to_json(MetricsEvent(time=0.0, step=1, values={"accuracy": 0.5, "best": math.inf})),
    to_json(StartEvent(time=0.0, step=0, reference=8, replicas=1, hosts=1, rule="", optimizer="")),
    to_json(CheckpointEvent(time=0.0, step=1, action="saved", path="/a")),
    to_json(
        DecisionEvent(
            time=0.0,
            step=1,
            batch_size_before=1,
            batch_size=2,
            reason="",
            candidates=(Candidate(batch_size=1, local_bsz=1, accumulation_steps=1, goodput=0.5),),
        )
    ),
]
PIECES = [
    "",
    "0",
    "-",
    ".",
    "e9",
    "9" * 5000,
    '"',
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "null",
    "true",
    "\0",
]
PIECES += [
    '"nan"',
    "NaN",
    "Infinity",
    "\\",
    "\\ud800",
    "[" * 3000,
    "\u2028",
    "\ufeff",
    " ",
    "\n",
    "x",
]


@examples(4000)
@given(st.binary(min_size=10, max_size=10))
def test_a_line_with_any_changes_is_an_event_or_the_documented_error(choices):
    line = WHOLE[choices[0] % len(WHOLE)]
    for where, length, what in zip(choices[1::3], choices[2::3], choices[3::3], strict=True):
        start = where * len(line) // 256
        line = line[:start] + PIECES[what % len(PIECES)] + line[start + length % 8 :]
    try:
        event = from_json(line)
    except EventError:
        return
    again = from_json(to_json(event))
    # In a field that is not known, a number that JSON lacks cannot be told from its name.
    assert isinstance(event, UnknownEvent) or repr(again) == repr(event)


def test_the_schema_is_frozen():
    # Adding a field with a default is fine: extend this table. Anything else changes what older
    # readers understand and must raise VERSION.
    schema = {name: [f.name for f in dataclasses.fields(kind)] for name, kind in EVENTS.items()}
    head = ["time", "step", "generation"]
    size = ["epoch", "replicas", "batch_size", "local_bsz", "accumulation_steps", "samples"]
    length = ["clock", "total_steps", "steps_per_epoch", "resumed", "script", "replays", "software"]
    worth = ["progress", "scale", "gain", "lr_factor", "lr", "sqr_norm", "trace"]
    assert VERSION == 1
    assert schema == {
        "start": [*head, "reference", "replicas", "hosts", "rule", "optimizer", *length],
        "step": [*head, *size, *worth, "seconds", "loss", "metrics"],
        "metrics": [*head, "values"],
        "decision": [*head, "batch_size_before", "batch_size", "reason", "candidates"],
        "rescale": [*head, "replicas_before", "replicas", "reason", "seconds"],
        "checkpoint": [*head, "action", "path", "num_bytes", "seconds", "detail"],
        "fault": [*head, "kind", "detail", "replica", "without_step"],
        "epoch": [*head, "epoch", "samples", "progress"],
        "risk": [*head, "steps"],
    }
