import subprocess
import sys

import pytest

from resilin import cli
from resilin.cli import completion


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A file with the completion of bash."""
    path = tmp_path_factory.mktemp("completion") / "resilin.bash"
    command = [sys.executable, "-m", "resilin.cli", "completion", "bash"]
    with path.open("w") as file:
        subprocess.run(command, stdout=file, timeout=240, check=True)
    return path


def completed(script, *words, cwd=None):
    """What bash offers when TAB is pressed behind these words."""
    code = """
    source "$1"; shift
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    function_of_resilin=$(complete -p resilin | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
    "$function_of_resilin"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", code, "bash", script, "resilin", *words],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_commands(script):
    assert completed(script, "re") == {"replay", "report"}
    assert completed(script, "") == set(cli.COMMANDS)


def test_options(script):
    assert completed(script, "plan", "--") == {
        "--help",
        "--replicas",
        "--max-local",
        "--min-local",
        "--max-batch",
        "--no-accumulation",
        "--json",
    }
    assert "--warm" in completed(script, "run", "--w")


def test_verbs_kinds_and_choices(script):
    assert completed(script, "trace", "") == {"make", "check", "plot", "convert"}
    assert completed(script, "trace", "make", "sp") == {"spot"}
    assert completed(script, "trace", "check", "--restarts", "") == {"error", "append"}
    assert completed(script, "completion", "") == set(completion.SHELLS)


def test_files_and_directories(script, tmp_path):
    (tmp_path / "spot.csv").touch()
    (tmp_path / "space").mkdir()
    assert completed(script, "trace", "check", "sp", cwd=tmp_path) == {"spot.csv", "space"}
    assert completed(script, "top", "sp", cwd=tmp_path) == {"space"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_gets_every_command(shell, capsys):
    assert completion.main([shell]) == 0
    printed = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert name in printed
    assert "restarts" in printed


def test_without_shtab_the_command_that_installs_it_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert completion.main(["bash"]) == 1
    error = capsys.readouterr().err
    assert error == "resilin: resilin completion needs shtab: pip install 'resilin[lab]'\n"
