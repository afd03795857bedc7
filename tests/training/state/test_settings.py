"""What users say about keeping state, in the script and in the environment."""

import logging
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import resilin
from resilin.engine import environment
from resilin.engine.environment import parse_every
from resilin.engine.single import Single
from resilin.engine.torchrun import RUN_ID, Torchrun
from resilin.training.job import current_job
from resilin.training.script import checkpoints as keeping
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.settings import StateSettings, from_environment, memory_directory


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (
        environment.CHECKPOINT_DIR,
        environment.CHECKPOINT_EVERY,
        environment.MEMORY_DIR,
        environment.LOG,
        RUN_ID,
        *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_every": 0}, r"steps between checkpoints \(0\) must be at least 1"),
        ({"checkpoint_every": -5}, r"between checkpoints \(-5\)"),
        ({"checkpoint_every": 1.5}, r"between checkpoints \(1.5\) must be a whole number"),
        ({"checkpoint_every": "10min"}, r"between checkpoints \('10min'\)"),
        ({"checkpoint_every": timedelta(0)}, r"between checkpoints \(0.0\) must be above 0"),
        ({"checkpoint_every": timedelta(seconds=-1)}, r"between checkpoints \(-1.0\)"),
        ({"keep": 0}, r"keep \(0\) must be at least 1"),
        ({"keep": None}, r"keep \(None\) must be a whole number"),
        ({"keep_every": 0}, r"keep_every \(0\) must be at least 1"),
        ({"memory_every": 0}, r"memory_every \(0\) must be at least 1"),
        (
            {"memory_every": "always"},
            r"'always'\) must be a number of steps, 'auto' or None",
        ),
        ({"memory_every": 2.0}, r"memory_every \(2.0\)"),
    ],
)
def test_settings_out_of_range_are_refused_with_value_and_rule(settings, message):
    with pytest.raises(ValueError, match=message):
        StateSettings(**settings)
    arguments = {name.removeprefix("checkpoint_"): value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        keeping.checkpoint_to("/somewhere", **arguments)
    assert current_job().state_settings is None


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("500steps", 500),
        ("1step", 1),
        (" 7 steps ", 7),
        ("90s", timedelta(seconds=90)),
        ("1.5min", timedelta(seconds=90)),
        ("10 min", timedelta(minutes=10)),
        ("0.5h", timedelta(minutes=30)),
    ],
)
def test_intervals_are_read(monkeypatch, text, every):
    assert parse_every(text) == every
    monkeypatch.setenv(environment.CHECKPOINT_EVERY, text)
    assert from_environment().checkpoint_every == every


@pytest.mark.parametrize(
    "text",
    ["10", "min", "-5s", "1e3s", "10m", "10 minutes", "5s 5s", "nan s", "", "10min\n10", "1_0s"],
)
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(ValueError, match="must be a number of steps, s, min or h"):
        parse_every(text)


@pytest.mark.parametrize(
    "text", ["0steps", "0.5steps", "1.5steps", "0s", "0.0000001s", "9" * 30 + "h"]
)
def test_intervals_that_cannot_be_honoured_are_refused(monkeypatch, text):
    monkeypatch.setenv(environment.CHECKPOINT_EVERY, text)
    with pytest.raises(ValueError):  # noqa: PT011 - the texts differ, the type is the promise
        from_environment()


def test_the_environment_speaks_where_the_script_does_not(monkeypatch):
    assert from_environment() == StateSettings()
    monkeypatch.setenv(environment.CHECKPOINT_DIR, "")
    monkeypatch.setenv(environment.CHECKPOINT_EVERY, "")
    assert from_environment() == StateSettings()
    monkeypatch.setenv(environment.CHECKPOINT_DIR, "s3://bucket/job")
    assert from_environment() == StateSettings(checkpoint_dir="s3://bucket/job")


def under_torchrun(monkeypatch, run_id):
    monkeypatch.setenv(RUN_ID, run_id)
    return Torchrun()


def test_memory_is_named_by_the_run_and_the_user(monkeypatch):
    directory = memory_directory(under_torchrun(monkeypatch, "job-7.b_2"), StateSettings())
    assert directory.parts[-2:] == (f"resilin-{os.getuid()}", "job-7.b_2")


def test_runs_with_strange_names_have_directories_of_their_own(monkeypatch):
    names = [
        "a/b",
        "a_b",
        "a b",
        "a\\b",
        "\u00e4",
        "\u00f6",
        "../../etc",
        "/etc",
        "",
        ".",
        "..",
        "-",
    ]
    made = [memory_directory(under_torchrun(monkeypatch, name), StateSettings()) for name in names]
    assert len(set(made)) == len(names)
    home = memory_directory(under_torchrun(monkeypatch, "x"), StateSettings()).parent
    for name, directory in zip(names, made, strict=True):
        assert os.path.normpath(directory.parent) == str(home), name
        assert Path(os.path.normpath(directory)).parent == home, f"{name!r} leaves {home}"


def test_a_run_with_a_long_name_has_a_directory_too(monkeypatch):
    long = [
        memory_directory(under_torchrun(monkeypatch, "x" * 300 + c), StateSettings()) for c in "ab"
    ]
    assert long[0] != long[1]
    assert max(len(directory.name) for directory in long) <= 255


def test_runs_without_a_name_are_told_apart_by_their_agents(monkeypatch):
    directory = memory_directory(under_torchrun(monkeypatch, "none"), StateSettings())
    assert directory.name == f"agent-{os.getppid()}"


def test_where_there_are_no_memory_copies(monkeypatch, tmp_path):
    assert memory_directory(Single(), StateSettings()) is None
    assert memory_directory(Torchrun(), StateSettings()) is None, "nobody starts it again"
    engine = under_torchrun(monkeypatch, "job")
    assert memory_directory(engine, StateSettings(memory_every=None)) is None
    monkeypatch.setenv(environment.MEMORY_DIR, "off")
    assert memory_directory(engine, StateSettings()) is None
    monkeypatch.setenv(environment.MEMORY_DIR, str(tmp_path))
    assert memory_directory(Single(), StateSettings()) == tmp_path
    assert memory_directory(Single(), StateSettings(memory_every=None)) is None


def test_checkpoint_to_takes_paths_and_addresses(tmp_path):
    keeping.checkpoint_to(tmp_path, every=5, keep=2, keep_every=10, memory_every=4)
    assert current_job().state_settings == StateSettings(
        checkpoint_dir=str(tmp_path), checkpoint_every=5, keep=2, keep_every=10, memory_every=4
    )
    keeping.checkpoint_to("s3://bucket", every=None, memory_every=None)
    assert current_job().state_settings.checkpoint_dir == "s3://bucket"
    keeping.checkpoint_to(None)
    assert current_job().state_settings == StateSettings()


def test_what_the_script_says_comes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.CHECKPOINT_DIR, str(tmp_path / "environment"))
    keeping.checkpoint_to(None, memory_every=None)
    assert keeping.resume() is None
    assert not (tmp_path / "environment").exists()


def test_checkpoint_to_comes_too_late_behind_the_start():
    assert keeping.resume() is None
    with pytest.raises(ValueError, match="was called after the job had started"):
        keeping.checkpoint_to("/somewhere")
    resilin.reset_job()
    keeping.checkpoint_to(None)


class Counter:
    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_what_is_registered_survives_in_memory(monkeypatch, tmp_path, late):
    monkeypatch.setenv(environment.MEMORY_DIR, str(tmp_path / "memory"))
    keeping.register("mine", Counter(5))
    assert keeping.resume() is None
    assert MemoryCopies(tmp_path / "memory").scan().versions[0].step == 0
    resilin.reset_job()
    counter = Counter()
    if late:
        assert keeping.resume().step == 0
        assert counter.n == 0
    keeping.register("mine", counter)
    assert keeping.resume().step == 0
    assert counter.n == 5
    assert current_job().engine.membership.generation == 1


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_dict_is_restored_in_place(monkeypatch, tmp_path, late):
    monkeypatch.setenv(environment.MEMORY_DIR, str(tmp_path / "memory"))
    weights = torch.tensor([1.0, 2.0])
    keeping.register("best", {"loss": 0.25, "epoch": 3, "weights": weights, "seen": [1, "a"]})
    keeping.resume()
    weights += 1  # what was saved is what it was then
    resilin.reset_job()
    best = {"loss": math.inf, "of before": 1}
    if late:
        keeping.resume()
    keeping.register("best", best)
    keeping.resume()
    assert torch.equal(best.pop("weights"), torch.tensor([1.0, 2.0]))
    assert best == {"loss": 0.25, "epoch": 3, "seen": [1, "a"]}


def test_a_number_cannot_be_registered_and_the_error_says_what_can():
    with pytest.raises(ValueError, match=r"'best' is a float without state_dict.*or is a dict"):
        keeping.register("best", 0.5)


def test_names_cannot_be_registered_twice():
    keeping.register("mine", Counter())
    with pytest.raises(ValueError, match="'mine' is registered already, for a Counter"):
        keeping.register("mine", Counter())
    with pytest.raises(ValueError, match="'job' is registered already"):
        keeping.register("job", Counter())


@pytest.mark.parametrize(
    ("condition", "every", "message"),
    [
        (None, timedelta(seconds=1), r"condition \(None\) must be a function"),
        (bool, timedelta(0), r"every \(0.0\) must be above 0"),
        (bool, timedelta(seconds=-1), r"every \(-1.0\)"),
        (bool, 5, r"every \(5\) must be"),
    ],
)
def test_what_stop_when_cannot_do(condition, every, message):
    with pytest.raises(ValueError, match=message):
        keeping.stop_when(condition, every)


def test_stop_when_asks_the_job_to_stop(caplog):
    answers = [False, RuntimeError("no network"), True]

    def machine_goes_away():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level(logging.WARNING, "resilin")
    stop = current_job().engine.stop
    keeping.stop_when(machine_goes_away, timedelta(milliseconds=5))
    deadline = time.monotonic() + 10
    while not stop.asked and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stop.reason == "machine_goes_away returned True"
    assert "failed; it will be called again" in caplog.text
    assert "no network" in caplog.text
