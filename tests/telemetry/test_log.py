import dataclasses
import errno
import itertools
import logging
import os
import random
import subprocess
import sys
import time

import pytest

from resilin.core.events import (
    EpochEvent,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    StepEvent,
    to_json,
)
from resilin.telemetry import log as log_module
from resilin.telemetry import segments
from resilin.telemetry.log import EventLog
from resilin.telemetry.read import read_events

STEP = StepEvent(
    time=0.0,
    step=0,
    epoch=0,
    replicas=2,
    batch_size=64,
    local_bsz=16,
    accumulation_steps=2,
    samples=0,
    progress=0.0,
    scale=2.0,
    gain=1.5,
    lr_factor=1.5,
)


def step(number):
    return dataclasses.replace(STEP, time=float(number), step=number, progress=number * 1.5)


def fault(number):
    return FaultEvent(time=float(number), step=number, kind="worker_lost", detail="")


def rescale(number):
    return RescaleEvent(
        time=float(number), step=number, replicas_before=1, replicas=2, reason="a host came"
    )


@pytest.fixture
def no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(segments.os, "fsync", lambda file: None)


def write(directory, events, **options):
    log = EventLog(directory, "replica-0", **options)
    for event in events:
        log.write(event)
    log.close()


def read(directory):
    return list(read_events(directory))


def text(directory, writer="replica-0"):
    return (directory / f"events-{writer}.jsonl").read_text()


def test_a_log_is_read_as_it_was_written(tmp_path):
    events = [step(1), MetricsEvent(time=1.5, step=1, values={"accuracy": 0.5}), fault(2), step(3)]
    write(tmp_path / "some" / "run", events)
    assert read(tmp_path / "some" / "run") == events


def test_a_log_goes_on_in_the_same_file(tmp_path):
    write(tmp_path, [step(1)])
    write(tmp_path, [step(2)])
    assert os.listdir(tmp_path) == ["events-replica-0.jsonl"]
    assert read(tmp_path) == [step(1), step(2)]


def test_steps_are_held_back_for_a_second_and_no_longer(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now)
    log = EventLog(tmp_path, "replica-0")
    log.write(step(1))
    now += 0.9
    log.write(step(2))
    assert text(tmp_path) == ""
    now += 0.1
    log.write(step(3))
    assert len(text(tmp_path).splitlines()) == 3
    log.write(step(4))
    assert len(text(tmp_path).splitlines()) == 3
    log.flush()
    assert len(text(tmp_path).splitlines()) == 4
    log.close()


def test_what_is_not_a_step_is_written_at_once_with_the_steps_before_it(tmp_path):
    log = EventLog(tmp_path, "replica-0")
    log.write(step(1))
    log.write(fault(2))
    assert read(tmp_path) == [step(1), fault(2)]
    log.close()


def test_a_second_of_very_many_steps_is_not_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module.time, "monotonic", lambda: 0.0)
    log = EventLog(tmp_path, "replica-0")
    for number in range(1000):
        log.write(step(number))
    assert 0 < len(read(tmp_path)) < 1000
    log.close()
    assert len(read(tmp_path)) == 1000


def test_an_unfinished_line_is_cut_off(tmp_path):
    write(tmp_path, [step(1), step(2)])
    with open(tmp_path / "events-replica-0.jsonl", "a") as file:
        file.write(to_json(step(3))[:-1])
    write(tmp_path, [step(4)])
    assert read(tmp_path) == [step(1), step(2), step(4)]
    # Longer than what is looked at in one piece, and with nothing before it.
    (tmp_path / "events-replica-0.jsonl").write_bytes(b"\0" * 200_000)
    write(tmp_path, [step(5)])
    assert read(tmp_path) == [step(5)]


def test_a_second_process_under_the_same_name_writes_beside_the_first(tmp_path):
    old = EventLog(tmp_path, "replica-0", segment_bytes=2000)
    new = EventLog(tmp_path, "replica-0", segment_bytes=2000)
    for number in range(60):
        (old if number % 2 else new).write(fault(number))
    assert read(tmp_path) == [fault(number) for number in range(60)]
    old.close()
    # The name is free again, and who asks for it next goes on under it.
    write(tmp_path, [fault(100)])
    assert "100" in text(tmp_path)
    assert "+2" in {path.name[-8:-6] for path in tmp_path.iterdir()}
    new.close()


def test_ten_times_the_steps_are_few_more_bytes_and_the_newest_have_all_detail(
    tmp_path, no_waiting_for_disks
):
    sizes = []
    for count in (2000, 20_000):
        directory = tmp_path / str(count)
        write(directory, (step(number) for number in range(count)), segment_bytes=8000)
        sizes.append(sum(path.stat().st_size for path in directory.iterdir()))
        told = [event.step for event in read(directory)]
        assert told == sorted(set(told))
        assert told[0] == 0
        gaps = [b - a for a, b in itertools.pairwise(told)]
        assert gaps[-50:] == [1] * 50
        tenth = len(gaps) // 10
        means = [sum(gaps[i : i + tenth]) / tenth for i in range(0, 10 * tenth, tenth)]
        assert means == sorted(means, reverse=True)
        assert means[0] >= count / len(told) > 1.5
    assert sizes[1] < 2 * sizes[0]


def test_rescales_and_faults_are_never_dropped_and_rare_events_last(tmp_path, no_waiting_for_disks):
    def events():
        for number in range(10_000):
            yield step(number)
            if number % 500 == 0:
                yield rescale(number)
                yield fault(number)
            if number % 2500 == 0:
                yield EpochEvent(time=float(number), step=number, epoch=0, samples=0, progress=0.0)

    write(tmp_path, events(), segment_bytes=8000)
    found = read(tmp_path)
    assert [e.step for e in found if isinstance(e, RescaleEvent)] == list(range(0, 10_000, 500))
    assert [e.step for e in found if isinstance(e, FaultEvent)] == list(range(0, 10_000, 500))
    assert [e.step for e in found if isinstance(e, EpochEvent)] == list(range(0, 10_000, 2500))
    assert sum(isinstance(e, StepEvent) for e in found) < 1500


def test_names_that_are_no_file_names(tmp_path):
    for name in ("", "../up", "a b", "a@1", "a+2", ".hidden"):
        with pytest.raises(ValueError, match="writer"):
            EventLog(tmp_path, name)
    with pytest.raises(ValueError, match=r"segment_bytes \(0\)"):
        EventLog(tmp_path, "replica-0", segment_bytes=0)
    EventLog(tmp_path, "agent-10.0.0.1-12").close()
    assert os.listdir(tmp_path) == ["events-agent-10.0.0.1-12.jsonl"]


def test_a_directory_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EventLog(tmp_path / "file", "replica-0")


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    os.symlink("/dev/full", tmp_path / "events-replica-0.jsonl")
    log = EventLog(tmp_path, "replica-0")
    for number in range(5):
        log.write(fault(number))
    log.close()
    (record,) = caplog.records
    assert record.name == "resilin"
    assert str(tmp_path) in record.message
    assert os.strerror(errno.ENOSPC) in record.message


def test_a_disk_that_is_full_from_the_start_does_not_stop_a_restart(tmp_path, caplog, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(log_module.os, "open", full)
    log = EventLog(tmp_path, "replica-0")
    log.write(fault(1))
    log.close()
    assert len(caplog.records) == 1


def test_half_a_write_is_cut_off_by_the_next_log(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    write(tmp_path, [fault(1)])
    log = EventLog(tmp_path, "replica-0")
    real = os.write
    monkeypatch.setattr(log_module.os, "write", lambda fd, data: real(fd, data[:20]))
    log.write(fault(2))
    log.write(fault(3))
    monkeypatch.undo()
    log.close()
    assert "20 of" in caplog.text
    assert read(tmp_path) == [fault(1)]
    write(tmp_path, [fault(4)])
    assert read(tmp_path) == [fault(1), fault(4)]


def test_a_directory_that_disappears_is_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    log = EventLog(tmp_path / "run", "replica-0")
    log.write(fault(1))
    (tmp_path / "run" / "events-replica-0.jsonl").unlink()
    (tmp_path / "run").rmdir()
    log.write(fault(2))
    log.write(fault(3))
    log.close()
    assert len(caplog.records) == 1
    assert "has been deleted" in caplog.text


WRITER = """
import sys, time
from resilin.core.events import FaultEvent, from_json
from resilin.telemetry.log import EventLog

directory, first, line = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log = EventLog(directory, "replica-0", segment_bytes=3000)
for number in range(first, 10**9):
    if number % 3:
        log.write(from_json(line.replace('"step":0', f'"step":{number}')))
    else:
        log.write(FaultEvent(time=time.time(), step=number, kind="", detail=""))
        # What has been said here was written.
        print(number, flush=True)
"""


def test_a_process_that_is_killed_anywhere_leaves_a_log_that_is_whole(tmp_path):
    rng = random.Random(5)
    run, first, said = tmp_path / "run", 0, set()
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, run, str(first), to_json(STEP)],
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            assert process.stdout is not None
            said.add(int(process.stdout.readline()))
            time.sleep(rng.uniform(0.0, 0.1))
        finally:
            process.kill()
            output, _ = process.communicate(timeout=30)
        said |= {int(line) for line in output.split(b"\n")[:-1]}
        told = [event.step for event in read(run)]
        assert told == sorted(set(told)), "twice, or out of order"
        faults = {event.step for event in read(run) if isinstance(event, FaultEvent)}
        assert said <= faults, "lost"
        assert faults <= said | {max(said) + 3}
        said = faults
        first = told[-1] + 1
    assert len(told) < first
