import os

import pytest

from resilin.telemetry import segments
from resilin.telemetry.segments import (
    Segment,
    Snapshot,
    list_files,
    merge,
    mergeable,
    sealed_path,
    thin,
)


def line(kind, number):
    return f'{{"version":1,"event":"{kind}","step":{number}}}'.encode()


def sealed(directory, first, last, lines=()):
    path = sealed_path(directory, "w", first, last)
    path.write_bytes(b"".join(item + b"\n" for item in lines))
    return Segment(first, last, path)


def ranges(found):
    return [(segment.first, segment.last) for segment in found]


def test_every_second_line_of_each_kind_stays():
    lines = [line(kind, n) for n in range(6) for kind in ("step", "epoch", "never heard of")]
    assert thin(lines, 0) == [item for n in (0, 2, 4) for item in lines[3 * n : 3 * n + 3]]


def test_some_kinds_always_stay():
    lines = [line(kind, n) for n in range(5) for kind in ("start", "rescale", "fault")]
    assert thin(lines, 0) == lines


def test_rare_kinds_stay_as_long_as_they_are_small():
    lines = [*(line("step", n) for n in range(100)), *(line("metrics", n) for n in range(4))]
    size = 4 * len(lines[-1])
    assert thin(lines, size + 1) == lines[:100:2] + lines[100:]
    assert thin(lines, size) == lines[:100:2] + lines[100::2]


@pytest.mark.parametrize(
    "other", [b"", b"{}", b"\0\0", b'{"event":"step","version":1}', b'"version":"event"step"']
)
def test_lines_that_are_not_understood_stay(other):
    assert thin([other] * 3, 0) == [other] * 3


def test_the_files_of_each_writer_are_found_by_their_names(tmp_path):
    for name in (
        "events-agent-10.0.0.1-12.jsonl",
        "events-w.jsonl",
        "events-w@000001-000001.jsonl",
        "events-w@000000-000000.jsonl",
        "events-only-sealed@000004-000007.jsonl",
        # And what is none of ours.
        "events-w@3-4.jsonl",
        "events-w@000003-000002.jsonl",
        ".events-w@000000-000001.jsonl.tmp",
        "events-w.jsonl.gz",
        "events-.jsonl",
        "notes.txt",
    ):
        (tmp_path / name).touch()
    files = list_files(tmp_path)
    assert sorted(files) == ["agent-10.0.0.1-12", "only-sealed", "w"]
    assert ranges(files["w"].sealed) == [(0, 0), (1, 1)]
    assert files["w"].number == 2
    assert files["only-sealed"].number == 8
    assert files["agent-10.0.0.1-12"].number == 0


def test_no_directory_has_no_files(tmp_path):
    (tmp_path / "file").touch()
    assert list_files(tmp_path / "nowhere") == {}
    assert list_files(tmp_path / "file") == {}


def test_a_segment_that_another_covers_does_not_count(tmp_path):
    for first, last in ((0, 3), (0, 1), (2, 3), (3, 3), (4, 4), (5, 5)):
        sealed(tmp_path, first, last)
    files = list_files(tmp_path)["w"]
    assert ranges(files.sealed) == [(0, 3), (4, 4), (5, 5)]
    assert ranges(files.covered) == [(0, 1), (2, 3), (3, 3)]
    assert [segment.level for segment in files.sealed] == [2, 0, 0]


def test_the_oldest_two_of_a_full_level_are_merged(tmp_path):
    found = [sealed(tmp_path, n, n) for n in range(5)]
    assert mergeable(found[:4]) is None
    assert mergeable(found) == (found[0], found[1])
    # The youngest level first: what it gives up may fill the next one.
    older = [sealed(tmp_path, 10 + 2 * n, 11 + 2 * n) for n in range(5)]
    younger = [sealed(tmp_path, 20 + n, 20 + n) for n in range(5)]
    assert mergeable([*older, *younger]) == (younger[0], younger[1])


def test_only_neighbours_are_merged_even_where_files_were_deleted(tmp_path):
    # Together, the first two of level 0 would cover the segment between them.
    found = [sealed(tmp_path, *r) for r in ((0, 0), (1, 8), (9, 9), (10, 10), (11, 11), (12, 12))]
    assert mergeable(found) == (found[2], found[3])
    alternating = [sealed(tmp_path, 20 + 3 * n, 20 + 3 * n + n % 2) for n in range(10)]
    assert mergeable(alternating) is None


class Killed(BaseException):
    """What no handler catches, as if the process had ended here."""


def test_a_merge_that_ends_anywhere_loses_and_repeats_nothing(tmp_path, monkeypatch):
    older_lines = [line("fault", n) for n in range(3)] + [line("step", n) for n in range(4)]
    newer_lines = [line("fault", n) for n in range(3, 6)] + [line("step", n) for n in range(4, 8)]
    both = older_lines + newer_lines
    calls = ["fsync", "replace", "open", "fsync", "unlink", "unlink"]
    seen = []
    for end in range(len(calls) + 1):
        directory = tmp_path / str(end)
        directory.mkdir()
        older = sealed(directory, 0, 0, older_lines)
        newer = sealed(directory, 1, 1, newer_lines)
        done = []

        def counted(name, real, end=end, done=done):
            def call(*args, **kwargs):
                if len(done) == end:
                    raise Killed
                done.append(name)
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "open"):
                patch.setattr(segments.os, name, counted(name, getattr(os, name)))
            patch.setattr(segments.Path, "unlink", counted("unlink", segments.Path.unlink))
            try:
                merge(older, newer, sealed_path(directory, "w", 0, 1), rare=0)
            except Killed:
                pass
            else:
                assert end == len(calls)
        assert done == calls[:end]
        found = b"".join(s.path.read_bytes() for s in list_files(directory)["w"].sealed)
        lines = found.splitlines()
        assert lines in (both, thin(both, 0))
        seen.append(len(lines))
    assert seen == [14] * 2 + [10] * 5


def test_a_snapshot_is_whole_although_the_files_change_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "events-w.jsonl").write_bytes(b"first\n")
    real = segments.list_files
    turns = []

    def list_while_the_writer_seals(directory):
        turns.append(len(turns))
        if len(turns) == 1:
            os.rename(tmp_path / "events-w.jsonl", sealed_path(tmp_path, "w", 0, 0))
        elif len(turns) == 2:
            found = real(directory)
            (tmp_path / "events-w.jsonl").write_bytes(b"second\n")
            return found
        elif len(turns) == 3:
            found = real(directory)
            os.rename(sealed_path(tmp_path, "w", 0, 0), sealed_path(tmp_path, "w", 0, 1))
            return found
        return real(directory)

    monkeypatch.setattr(segments, "list_files", list_while_the_writer_seals)
    snapshot = Snapshot(tmp_path, "w")
    assert len(turns) == 4
    assert [part.file.read() for part in snapshot.parts] == [b"first\n", b"second\n"]
    assert snapshot.number == 2
    snapshot.close()
    monkeypatch.setattr(segments, "_PATIENCE", 0)
    with pytest.raises(OSError, match="change faster"):
        Snapshot(tmp_path, "w")
