import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cluster.controller import codec, journal, records
from resilin.cluster.controller import records as r
from resilin.cluster.controller.journal import Journal, JournalError
from resilin.cluster.controller.state import State
from resilin.cluster.decision import Reason
from resilin.cluster.job import JobSpec
from resilin.cluster.node import Allocation
from tests.cluster.controller.made import node, submitted

RECORDS = [
    r.Opened(time=1.0, cluster="c1"),
    r.Met(time=2.0, endpoint="h:1", number=1),
    submitted("one", 3.0, kinds=("a100", "h100"), priority=-2, preemptible=False),
    submitted("two", 3.5),
    r.NodeSeen(time=4.0, node=node("a", 4)),
    r.NodeMissed(time=4.5, node="a", lost=False),
    r.Decided(
        time=5.0,
        generation=1,
        because="x",
        wanted={"one": Allocation(kind="cpu", shares=(("a", 2), ("b", 1)))},
        reasons={
            "one": Reason(size=3, next_size=None, value=float("inf"), price=0.5, text="so \u2713")
        },
        prices={"cpu": 0.5},
        memory={"deep": [1, {"x": None}]},
        policy="even",
    ),
    r.Announced(time=6.0, name="one-g1-1", job="one", life=1, node="a", accelerators=2, hosts=2),
    r.Seen(time=7.0, name="one-g1-1", running=True),
    r.Missed(time=8.0, name="one-g1-1"),
    r.Asked(time=9.0, name="one-g1-1", why="so"),
    r.Ended(time=10.0, name="one-g1-1", code=None, why="lost", sure=False),
    r.Hinted(time=10.5, job="one", hints={"progress": {"progress": 3.5}}),
    r.Stumbled(time=11.0, job="one", failures=1, retry=16.0, why="so"),
    r.Drained(time=12.0, node="a", at=99.0),
    r.CancelAsked(time=13.0, job="two"),
    r.Closed(time=14.0, job="two", outcome=r.CANCELLED, why="so"),
]


def written(directory):
    book = Journal(directory)
    book.append(RECORDS)
    book.close()
    return book.state


def test_every_kind_of_record_is_among_them():
    assert {type(each) for each in RECORDS} == set(records.KINDS.values())


def test_a_journal_that_is_replayed_gives_the_same_state(tmp_path):
    state = written(tmp_path)
    assert state.jobs["one"].served == 2 * 3.0
    assert state.jobs["one"].mark == 3.5
    again = Journal(tmp_path)
    assert again.state == state
    again.compact()
    again.append([r.Drained(time=20.0, node="a", at=None)])
    after = again.state
    again.close()
    assert not after.drains
    third = Journal(tmp_path)
    assert third.state == after
    third.close()


def test_the_state_survives_json(tmp_path):
    state = written(tmp_path)
    assert codec.from_json(State, codec.to_json(state)) == state


@pytest.mark.parametrize("kept", [0, 1, 9, 40])
def test_a_last_line_that_was_cut_short_is_dropped(tmp_path, kept):
    state = written(tmp_path)
    path = tmp_path / journal.JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[2][:kept])
    again = Journal(tmp_path)
    assert again.state == state
    again.append([r.Drained(time=20.0, node="b", at=1.0)])
    again.close()
    third = Journal(tmp_path)
    assert third.state.drains == {"a": 99.0, "b": 1.0}
    third.close()


def test_a_cut_at_any_byte_gives_the_state_of_the_lines_before_it(tmp_path):
    written(tmp_path)
    path = tmp_path / journal.JOURNAL
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        book = Journal(tmp_path)
        state = State()
        for record in RECORDS[: whole[:end].count(b"\n")]:
            state = journal.apply(state, record)
        assert book.state == state
        book.close()


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path):
    written(tmp_path)
    path = tmp_path / journal.JOURNAL
    content = bytearray(path.read_bytes())
    content[content.index(b"one-g1-1")] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(JournalError, match=r"journal.jsonl, line 8: the line is damaged"):
        Journal(tmp_path)


def test_two_controllers_cannot_share_a_directory(tmp_path):
    book = Journal(tmp_path)
    with pytest.raises(JournalError, match=f"must have one controller: process {os.getpid()} uses"):
        Journal(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from resilin.cluster.controller.journal import Journal\n"
        f"Journal(Path({str(tmp_path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"process {os.getpid()} uses it" in done.stderr
    book.close()
    Journal(tmp_path).close()


def test_a_damaged_journal_is_not_locked_for_good(tmp_path):
    (tmp_path / journal.JOURNAL).write_text("nonsense\nnonsense\nmore\n")
    for _ in range(2):
        with pytest.raises(JournalError, match="line 1: the line is damaged"):
            Journal(tmp_path)


def test_a_long_journal_is_replaced_by_its_state(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "LONGEST", 50)
    book = Journal(tmp_path)
    book.append(RECORDS)
    for number in range(200):
        book.append([r.Drained(time=float(number), node="a", at=float(number))])
    state = book.state
    book.close()
    assert len((tmp_path / journal.JOURNAL).read_bytes().splitlines()) <= 51
    again = Journal(tmp_path)
    assert again.state == state
    again.close()


def test_a_full_disk_leaves_a_journal_that_can_be_read(tmp_path, monkeypatch):
    book = Journal(tmp_path)
    book.append(RECORDS[:4])
    state = book.state
    real = os.write

    def half(file, data):
        real(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        book.append(RECORDS[4:5])
    monkeypatch.undo()
    assert book.state == state
    book.append(RECORDS[4:6])
    after = book.state
    book.close()
    again = Journal(tmp_path)
    assert again.state == after
    again.close()


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_nothing(tmp_path_factory, garbage):
    directory = tmp_path_factory.mktemp("journal")
    (directory / journal.JOURNAL).write_bytes(garbage)
    try:
        book = Journal(directory)
    except JournalError:
        return
    assert book.state == State()
    book.close()


def test_fields_that_are_wrong_are_named():
    told = codec.to_json(JobSpec(id="x", submitted=1.0))
    with pytest.raises(ValueError, match=r"JobSpec.priority \('high'\) must be of type int"):
        codec.from_json(JobSpec, {**told, "priority": "high"})
    with pytest.raises(ValueError, match=r"JobSpec\.id is missing"):
        codec.from_json(JobSpec, {})
    with pytest.raises(ValueError, match="must be a list"):
        codec.from_json(JobSpec, {**told, "kinds": "a"})
    assert codec.from_json(JobSpec, {**told, "new": 1}) == JobSpec(id="x", submitted=1.0)
