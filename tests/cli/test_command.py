import json
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import resilin
from resilin import cli
from resilin.cli import tables, values
from resilin.cli.errors import user_errors
from tests.cli.interface import interface

INTERFACE = Path(__file__).with_name("interface.txt")


def python(code, **kwargs):
    # Without coverage, which would be measured along.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, **kwargs)


def test_nothing_but_a_job_loads_torch(tmp_path):
    (tmp_path / "t.csv").write_text("step,batchsize\n0,8\n")
    code = """
import sys
from resilin.cli import main
for arguments in (
    ["--version"], ["--help"], ["top", "--help"], ["report", "--help"], ["compare", "--help"],
    ["replay", "--help"], ["trace", "check", "t.csv"], ["plan", "256"],
):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 0, (arguments, code)
    loaded = {"torch", "matplotlib", "rich"} & set(sys.modules)
    assert not loaded, (arguments, loaded)
"""
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"resilin {resilin.__version__}\n")
    for name, purpose in cli.COMMANDS.items():
        assert f"{name} " in done.stdout
        assert purpose in done.stdout


def test_a_plan_takes_less_than_half_a_second_of_the_processor():
    taken = []
    for _ in range(4):  # a machine that does other things too may be slow for a moment
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("import sys; from resilin.cli import main; sys.exit(main(['plan', '256']))")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if taken[-1] < 0.5:
            return
    pytest.fail(f"{taken} seconds")


def test_the_interface_is_what_it_was():
    assert interface() == INTERFACE.read_text(), (
        "the command line has changed; where that is meant, write it down: "
        "python -m tests.cli.interface > tests/cli/interface.txt"
    )


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_each_command_has_an_example(name):
    ours = import_module(f"resilin.cli.{name}").parser()
    assert ours.prog == f"resilin {name}"
    assert f"resilin {name} " in (ours.epilog or ""), "the epilog needs a worked example"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("reprot", "unknown command 'reprot'; did you mean 'report'?"),
        ("plans", "did you mean 'plan'?"),
        ("train", "did you mean 'trace'?"),
        ("xyz", "unknown command 'xyz'; the commands are run, demo, replay, top"),
    ],
)
def test_an_unknown_command_is_an_error_that_helps(capsys, typed, hint):
    with pytest.raises(SystemExit) as end:
        cli.main([typed, "--anything"])
    assert end.value.code == 2
    assert hint in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "look at a run:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "256"], 0),
        (["plan", "256", "--no-accumulation", "--max-local", "8", "--replicas", "1"], 1),
        (["trace", "check", "no-such-file.csv"], 1),
        (["report", "no-such-run"], 1),
        (["top", "no-such-run", "--once"], 1),
        (["replay", "no-such-file.csv", "train.py"], 1),
        (["compare", "--rules", "sqrt", "--trace", "no-such-file.csv", "train.py"], 1),
        (["plan"], 2),
        (["plan", "many"], 2),
        (["trace"], 2),
        (["trace", "make", "zigzag"], 2),
        (["top"], 1),
        (["report"], 1),
        (["replay"], 2),
        (["compare"], 2),
        (["completion", "cmd.exe"], 2),
        (["doctor", "--no-such-option"], 2),
        (["store", "--port", "many"], 2),
        (["run"], 2),
    ],
)
def test_exit_codes(arguments, code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        returned = cli.main(arguments)
    except SystemExit as end:
        returned = end.code
    error = capsys.readouterr().err
    assert returned == code, error
    assert "Traceback" not in error
    if code == 1 and arguments[0] != "plan":  # its reasons are in the table
        assert error.startswith("resilin: ")
        assert any(name in error for name in ("no-such", "train.py", "resilin-runs"))


def test_an_interrupted_command_returns_130(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("resilin.cli.plan.main", interrupted)
    assert cli.main(["plan", "256"]) == 130


@pytest.mark.parametrize("counts", ["1-2", "1-5000"])
def test_a_reader_that_went_away_is_no_error(counts):
    # A short table is still in the buffer when the command is done, a long one is not.
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "resilin.cli", "plan", "99999", "--replicas", counts]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == cli.PIPE_CLOSED


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("size (0) must be at least 1"), "resilin: size (0) must be at least 1\n"),
        (FileNotFoundError(2, "No such file", "a.csv"), "resilin: a.csv: No such file\n"),
        (ImportError("needs rich"), "resilin: needs rich\n"),
        (OSError(), "resilin: OSError\n"),
    ],
)
def test_an_error_of_the_user_is_one_line(raised, said, capsys, monkeypatch):
    @user_errors
    def main(arguments):
        raise raised

    monkeypatch.delenv("RESILIN_LOG", raising=False)
    assert main([]) == 1
    assert capsys.readouterr().err == said
    monkeypatch.setenv("RESILIN_LOG", "DEBUG")
    assert main([]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("raised", [KeyError("x"), BrokenPipeError(), AssertionError()])
def test_an_error_of_ours_is_not_hidden(raised):
    @user_errors
    def main(arguments):
        raise raised

    with pytest.raises(type(raised)):
        main([])


def test_tables():
    text = tables.to_text(
        ("name", "count", "part"), [("a", 10, 0.5), ("long", None, float("nan")), ("b", "too few")]
    )
    assert text.splitlines() == [
        "name  count  part",
        "a        10   0.5",
        "long      -     -",
        "b     too few",
    ]
    with pytest.raises(ValueError, match="3 cells, but the header has 2"):
        tables.to_text(("a", "b"), [(1, 2, 3)])
    row = {"x": float("nan"), "y": (1, float("inf"))}
    assert json.loads(tables.to_json([row])) == [{"x": None, "y": [1, None]}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,2,4", (1, 2, 4)), ("1-3, 8", (1, 2, 3, 8)), ("4,1-5", (1, 2, 3, 4, 5)), ("7", (7,))],
)
def test_counts(text, value):
    assert values.counts(text) == value


@pytest.mark.parametrize("text", ["", "0", "-3", "3-", "1,,2", "5-2", "a-b", "1-99999999"])
def test_what_is_no_list_of_counts_is_refused(text):
    with pytest.raises(values.argparse.ArgumentTypeError, match=r"is not|ends|holds"):
        values.counts(text)


def test_times():
    given = ["90", "90s", "1.5h", "10 min", ".5d", "1e3"]
    assert [values.seconds(text) for text in given] == [90, 90, 5400, 600, 43200, 1000]
    for text in ("", "0", "-1", "1w", "nan", "inf", "1e999"):
        with pytest.raises(values.argparse.ArgumentTypeError, match="is not a time above 0"):
            values.seconds(text)


def test_no_table_and_no_finding_speaks_to_the_terminal(capsys, monkeypatch, tmp_path):
    assert tables.to_text(("name",), [("a\x1b[2Jb",)]).splitlines() == ["name", "a?[2Jb"]
    from resilin.cli import doctor

    finding = doctor.Finding(verdict="fail", found="\x1b[2J", advice="see \x07" + "x" * 10**6)
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda options: finding})
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\x07" not in said
    assert len(said) < 10_000


def test_the_log_of_workers_does_not_speak_to_the_terminal(tmp_path):
    code = """
import logging, resilin.engine.environment as environment
environment.log_to_stderr()
try:
    raise ValueError("a\\nb")
except ValueError:
    logging.getLogger("resilin").warning("%s", "x\\x1b[2Jy\\nz", exc_info=True)
"""
    monkey = {**os.environ, "RESILIN_LOG": "INFO"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=monkey)
    assert done.stderr.startswith("resilin: x?[2Jy z\nTraceback")
