import os
import subprocess
import sys
import time

import pytest

import resilin
from resilin import cli


def test_version_and_help_do_not_load_torch():
    code = """
import sys
from resilin.cli import main
for option in ("--version", "--help"):
    try:
        main([option])
    except SystemExit as end:
        assert end.code == 0, end.code
assert "torch" not in sys.modules
"""
    # Without coverage, which would be measured along.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 10
    assert done.stdout.startswith(f"resilin {resilin.__version__}\n")
    for name, purpose in cli.COMMANDS.items():
        assert f"{name} " in done.stdout
        assert purpose in done.stdout


def test_an_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train"])
    assert end.value.code == 2
    assert "invalid choice: 'train'" in capsys.readouterr().err
