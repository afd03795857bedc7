import dataclasses
import io
import json
import os
import shutil
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.events import (
    CheckpointEvent,
    DecisionEvent,
    EventError,
    MetricsEvent,
    RescaleEvent,
    to_json,
)
from resilin.telemetry import read as read_module
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import Damage, Follower, Lines, last_event, read_events
from resilin.telemetry.run import Run
from resilin.telemetry.segments import Part, list_files
from tests.examples import examples
from tests.telemetry.test_log import STEP, fault, step
from tests.telemetry.test_run import start, use


def write(directory, events, writer="replica-0", **options):
    log = EventLog(directory, writer, **options)
    for event in events:
        log.write(event)
    log.close()


def append(directory, text, writer="replica-0"):
    with open(directory / f"events-{writer}.jsonl", "ab") as file:
        file.write(text)


def steps_of(events):
    return [event.step for event in events]


def test_writers_are_merged_by_time(tmp_path):
    write(tmp_path, [step(1), step(3), step(5)])
    write(tmp_path, [fault(2), fault(6)], writer="replica-3")
    write(tmp_path, [fault(4)], writer="agent-a.example.com-12")
    assert steps_of(read_events(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_a_clock_that_was_set_back_does_not_change_the_order_of_a_writer(tmp_path):
    write(tmp_path, [step(5), step(3), step(4)])
    assert steps_of(read_events(str(tmp_path))) == [5, 3, 4]


def test_a_directory_without_a_log_says_what_makes_one(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"has no event log.*--run-dir.*resilin.events_to"):
            read_events(path)
        assert last_event(path) is None
        assert Follower(path).poll() == []


def test_a_line_that_is_not_an_event_is_named(tmp_path):
    write(tmp_path, [step(1)])
    append(tmp_path, b"\xff\xfe\n\0\0\0\n\n[1]\n" + to_json(step(2)).encode() + b"\n")
    append(tmp_path, b'{"version":9,"event":"step"}\n')
    events = read_events(tmp_path)
    assert next(events) == step(1)
    with pytest.raises(EventError, match=r"events-replica-0.jsonl, line 2: not UTF-8: invalid"):
        next(events)
    damage = []
    assert list(read_events(tmp_path, damage)) == [step(1), step(2)]
    assert [(item.file, item.line) for item in damage] == [
        ("events-replica-0.jsonl", line) for line in (2, 3, 4, 5, 7)
    ]
    assert [item.reason.partition(":")[0] for item in damage] == [
        "not UTF-8",
        "not a JSON line",
        "not a JSON line",
        "an event is a JSON object, not list",
        "the event has version 9; this reader knows up to 1",
    ]


def test_an_unfinished_line_is_damage_only_where_nobody_writes(tmp_path):
    text = to_json(step(2)).encode()
    write(tmp_path, [step(1)])
    append(tmp_path, text[:-1])
    assert list(read_events(tmp_path)) == [step(1)]
    os.rename(
        tmp_path / "events-replica-0.jsonl", tmp_path / "events-replica-0@000000-000000.jsonl"
    )
    damage = []
    assert list(read_events(tmp_path, damage)) == [step(1)]
    assert [(item.file, item.line) for item in damage] == [
        ("events-replica-0@000000-000000.jsonl", 2)
    ]


def test_a_file_without_line_breaks_is_not_held_in_memory(tmp_path):
    size = 40 * 2**20
    with open(tmp_path / "events-a.jsonl", "wb") as file:
        for _ in range(40):
            file.write(b"x" * 2**20)
        file.write(b"\n" + to_json(step(1)).encode() + b"\n")
    damage = []
    tracemalloc.start()
    events = list(read_events(tmp_path, damage))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert events == [step(1)]
    assert damage == [
        Damage("events-a.jsonl", 1, f"{size + 1} bytes, longer than any event (at most {2**20})")
    ]
    assert peak < size / 4


def test_more_writers_than_files_that_may_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    for number in range(200):
        (tmp_path / f"events-agent-{number}.jsonl").write_text(to_json(fault(number)) + "\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, before[1]))
    try:
        assert steps_of(read_events(tmp_path)) == list(range(200))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_reader_that_stops_early_leaves_no_file_open(tmp_path):
    write(tmp_path, (fault(number) for number in range(3000)), segment_bytes=100_000)
    before = len(os.listdir("/proc/self/fd"))
    events = read_events(tmp_path)
    next(events)
    assert len(os.listdir("/proc/self/fd")) > before
    events.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_follower_sees_each_event_once_while_files_are_sealed_and_merged(tmp_path):
    run = tmp_path / "run"
    follower = Follower(run)
    assert follower.poll() == []
    log = EventLog(run, "replica-0", segment_bytes=2000)
    seen = []
    for number in range(1500):
        log.write(fault(number))
        # Now and then; sometimes after so much that it has been merged.
        if number % 7 == 0 or number in (700, 1400):
            if 400 < number < 700:
                continue
            seen += follower.poll()
            assert seen[-1] == fault(number)
    log.close()
    seen += follower.poll()
    assert seen == [fault(number) for number in range(1500)]
    assert follower.poll() == []
    assert follower.damage == []


def test_a_follower_waits_for_the_end_of_a_line(tmp_path):
    text = to_json(step(2)).encode() + b"\n"
    write(tmp_path, [step(1)])
    follower = Follower(tmp_path)
    assert follower.poll() == [step(1)]
    append(tmp_path, text[:50])
    assert follower.poll() == []
    append(tmp_path, text[50:])
    assert follower.poll() == [step(2)]
    append(tmp_path, b"?\n" + text)
    assert follower.poll() == [step(2)]
    assert [(item.file, item.line) for item in follower.damage] == [("events-replica-0.jsonl", 3)]


def test_a_follower_goes_on_behind_a_line_that_was_cut_off(tmp_path):
    write(tmp_path, [step(1)])
    append(tmp_path, b'{"version":1')
    follower = Follower(tmp_path)
    assert follower.poll() == [step(1)]
    write(tmp_path, [step(2)])
    assert follower.poll() == [step(2)]


def test_a_follower_begins_anew_with_a_log_that_does(tmp_path):
    run = tmp_path / "run"
    write(run, (fault(number) for number in range(100)), segment_bytes=1000)
    follower = Follower(run)
    assert len(follower.poll()) == 100
    shutil.rmtree(run)
    assert follower.poll() == []
    write(run, [step(1)])
    assert follower.poll() == [step(1)]
    # Emptied in place.
    write(run, [step(2)])
    assert follower.poll() == [step(2)]
    os.truncate(run / "events-replica-0.jsonl", 0)
    write(run, [step(3)])
    assert follower.poll() == [step(3)]


def test_a_follower_meets_writers_that_come_later(tmp_path):
    write(tmp_path, [step(2)])
    follower = Follower(tmp_path)
    assert follower.poll() == [step(2)]
    write(tmp_path, [fault(3)], writer="replica-1")
    write(tmp_path, [step(4)])
    assert follower.poll() == [fault(3), step(4)]


def test_readers_see_a_whole_log_while_it_is_written(tmp_path):
    done = threading.Event()

    def job():
        log = EventLog(tmp_path, "replica-0", segment_bytes=3000)
        for number in range(1000):
            log.write(fault(number))
        log.close()
        done.set()

    write(tmp_path, [])
    follower, followed, looks = Follower(tmp_path), [], 0
    thread = threading.Thread(target=job)
    thread.start()
    while True:
        last = done.is_set()
        known = steps_of(read_events(tmp_path))
        assert known == list(range(len(known)))
        followed += steps_of(follower.poll())
        assert followed == list(range(len(followed)))
        newest = last_event(tmp_path)
        assert newest is None or newest.step >= len(known) - 1
        looks += 1
        if last:
            break
    thread.join()
    assert len(followed) == len(known) == 1000
    assert looks > 1


def test_the_last_event_is_read_from_the_end_alone(tmp_path, monkeypatch):
    write(tmp_path, [step(1), step(2)])
    write(tmp_path, [fault(1)], writer="replica-1")
    assert last_event(tmp_path) == step(2)
    append(tmp_path, b"damaged\n" + b"unfinished")
    assert last_event(tmp_path) == step(2)
    # Sealed just now, and nothing in the new file yet.
    write(tmp_path, (step(n) for n in range(3, 20)), segment_bytes=1)
    assert (tmp_path / "events-replica-0.jsonl").stat().st_size == 0
    assert last_event(tmp_path) == step(19)
    (tmp_path / "events-big.jsonl").write_bytes(b"x\n" * 10**6 + to_json(step(50)).encode() + b"\n")
    parsed = []
    real = read_module.from_json
    monkeypatch.setattr(read_module, "from_json", lambda line: parsed.append(line) or real(line))
    assert last_event(tmp_path) == step(50)
    assert len(parsed) == 3


KINDS = [
    start(),
    STEP,
    dataclasses.replace(STEP, metrics={"accuracy": 0.5}, loss=float("nan"), trace=float("inf")),
    MetricsEvent(time=2.0, step=3, values={"accuracy": 0.5}),
    DecisionEvent(time=2.0, step=3, batch_size_before=1, batch_size=2, reason="\u2028\n\"'"),
    RescaleEvent(time=2.0, step=3, generation=1, replicas_before=1, replicas=2, reason=""),
    CheckpointEvent(time=2.0, step=3, action="saved", path="\udc80"),
    fault(4),
]
LINES = [to_json(event).encode() for event in KINDS]
PIECES = [
    b"\n",
    b"\0",
    b"\xff",
    b"\r",
    b"{",
    b"}",
    b'"',
    b",",
    b"[]",
    b"null",
    b"-1",
    b"1e999",
    b"9" * 400,
]


def mutated(choices):
    """A file of valid lines with changes, all chosen by the bytes."""
    drawn = iter(choices)
    lines = [LINES[next(drawn) % len(LINES)] for _ in range(1 + next(drawn) % 4)]
    text = b"\n".join(lines) + b"\n"
    for change, where, what in zip(drawn, drawn, drawn, strict=False):
        place = where * len(text) // 256
        until = place + 1 + what * len(text) // 1024
        if change % 6 == 0:
            text = text[:place] + bytes([what]) + text[place + 1 :]
        elif change % 6 == 1:
            text = text[:place] + text[until:]
        elif change % 6 == 2:
            text = text[:until] + text[place:]
        elif change % 6 == 3:
            text = text[:place] + PIECES[what % len(PIECES)] + text[place:]
        elif change % 6 == 4:
            text = text[:place]
        else:
            text = text.replace(b"\n", b"", 1)
    return text


def check(text):
    """Reads the text as a file, sealed and not; returns what was an event and what was not."""
    for is_sealed in (True, False):
        part = Part(io.BytesIO(text), "events-a.jsonl", 0, 0, is_sealed, (0, 0))
        damage = []
        events = list(Lines(part).events(damage))
        whole = text.count(b"\n") + (is_sealed and not text.endswith(b"\n") and text != b"")
        assert len(events) + len(damage) == whole
        assert [item.line for item in damage] == sorted({item.line for item in damage})
        if damage:
            with pytest.raises(EventError) as error:
                list(Lines(part).events(None))
            assert str(error.value) == str(damage[0])
        else:
            assert len(list(Lines(part).events(None))) == len(events)
    return events, damage


@examples(3000)
@given(st.binary(min_size=17, max_size=17))
def test_changed_files_give_events_and_damage_and_nothing_else(choices):
    events, damage = check(mutated(choices))
    use(Run.from_events(events, damage=damage))


@examples(1000)
@given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda text: text + b"\n"))
def test_any_bytes_give_events_and_damage_and_nothing_else(text):
    check(text)


VALUES = [None, True, False, 0, -1, 3, 2**70, 10**400, 0.5, 1e308, "", "nan", "inf", "saved", "x"]
VALUES += [[], {}, [[]], {"a": 1}, {"a": "nan"}, {"a": None}, [{"batch_size": 1}]]
FIELDS = [json.loads(line) for line in LINES]


@examples(1500)
@given(st.binary(min_size=9, max_size=9))
def test_json_of_any_shape_gives_events_and_damage_and_nothing_else(choices):
    body = dict(FIELDS[choices[0] % len(FIELDS)])
    names = ["version", "event", *body, "unheard of"]
    for name, value in zip(choices[1::2], choices[2::2], strict=True):
        if value < 16:
            body.pop(names[name % len(names)], None)
        else:
            body[names[name % len(names)]] = VALUES[value % len(VALUES)]
    events, damage = check(json.dumps(body).encode() + b"\n")
    use(Run.from_events(events, damage=damage))


def test_a_file_that_is_a_directory_is_the_systems_error(tmp_path):
    (tmp_path / "events-a.jsonl").mkdir()
    assert list(list_files(tmp_path)) == ["a"]
    with pytest.raises(IsADirectoryError):
        list(read_events(tmp_path))
