"""`resilin clean`: what is left of jobs is shown, and removed when asked; what runs is not."""

import json
import os
import subprocess
import sys
import time

import pytest

from resilin.cli import clean, memory
from resilin.cli.memory import MemoryDirectory
from resilin.engine import environment


def leave(parent, name, age=0.0):
    """The state of a job that is gone."""
    path = parent / name
    path.mkdir(parents=True)
    (path / "copy").write_bytes(b"x" * 1000)
    then = time.time() - age
    os.utime(path / "copy", (then, then))
    os.utime(path, (then, then))
    return path


def rows(capsys, *arguments):
    assert clean.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_left_is_shown_and_stays(tmp_path, capsys):
    left = leave(tmp_path, "a")
    assert clean.main(["--memory-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1,000B" in text
    assert "resilin clean --remove" in text
    assert left.exists()


def test_it_is_removed_when_asked_and_by_name_and_age(tmp_path, capsys):
    for name, age in (("a", 0), ("b", 7200), ("c", 7200)):
        leave(tmp_path, name, age)
    where = ["--memory-dir", tmp_path]
    (row,) = rows(capsys, *where, "--remove", "--older", "1h", "b")
    assert (row["job"], row["bytes"], row["removed"]) == ("b", 1000, True)
    assert rows(capsys, *where, "--remove", "--older", "1h", "a") == []
    assert [row["job"] for row in rows(capsys, *where, "--remove")] == ["a", "c"]
    assert list(tmp_path.iterdir()) == []
    assert clean.main(["--memory-dir", str(tmp_path)]) == 0
    assert "nothing is left" in capsys.readouterr().out


def test_a_job_that_runs_keeps_its_state(tmp_path, capsys):
    held = MemoryDirectory(tmp_path, "runs")
    (held.path / "copy").write_bytes(b"x")
    assert rows(capsys, "--memory-dir", tmp_path, "--remove") == []
    assert clean.main(["--memory-dir", str(tmp_path), "--remove", "runs"]) == 1
    assert "job runs has processes on this machine" in capsys.readouterr().err
    assert (held.path / "copy").exists()
    held.release(remove=True)


def test_a_worker_that_outlived_its_agent_keeps_its_state(tmp_path, capsys):
    left = leave(tmp_path, "a")
    env = {**os.environ, environment.MEMORY_DIR: str(left)}
    code = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        worker.stdout.readline()
        assert rows(capsys, "--memory-dir", tmp_path, "--remove") == []
        worker.communicate(b"\n", timeout=60)
    assert len(rows(capsys, "--memory-dir", tmp_path, "--remove")) == 1


def test_a_job_that_starts_at_this_moment_is_not_robbed(tmp_path, capsys, monkeypatch):
    leave(tmp_path, "a")
    found = memory.abandoned(tmp_path)
    held = MemoryDirectory(tmp_path, "a")
    monkeypatch.setattr(clean, "abandoned", lambda parent: found)
    assert rows(capsys, "--memory-dir", tmp_path, "--remove") == []
    assert (held.path / "copy").exists()
    held.release(remove=True)


@pytest.mark.parametrize("name", ["nobody", ".."])
def test_a_name_without_a_state_is_an_error(tmp_path, capsys, name):
    assert clean.main(["--memory-dir", str(tmp_path / "memory"), "--remove", name]) == 1
    assert capsys.readouterr().err.count("\n") == 1
