import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from resilin.cli import top
from resilin.telemetry.log import EventLog
from tests.telemetry.told import told_run


def write(directory, told):
    log = EventLog(directory, "replica-0")
    for event in told:
        log.write(event)
    log.close()


def test_one_picture_where_there_is_no_terminal(tmp_path, capsys):
    write(tmp_path / "job-17", told_run())
    assert top.main([str(tmp_path / "job-17")]) == 0
    text = capsys.readouterr().out
    assert "resilin top  job-17" in text
    assert "160.5 of 400 reference steps" in text
    assert "\x1b" not in text


def test_the_state_as_json(tmp_path, capsys):
    write(tmp_path / "job", told_run())
    assert top.main(["--json", str(tmp_path / "job")]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["name"], state["state"], state["replicas"]) == ("job", "silent", 1)
    assert state["progress"] == 160.5
    assert state["goodput"] == pytest.approx(150)
    assert state["metrics"] == {"accuracy": 0.75}
    assert [event["event"] for event in state["last_events"]][-1] == "checkpoint"


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_nothing_to_show_is_an_error_that_says_what_makes_events(tmp_path, capsys, option):
    missing = str(tmp_path / "missing")
    assert top.main([option, missing]) == 1
    error = capsys.readouterr().err
    assert missing in error
    assert "resilin run --run-dir" in error
    assert error.count("\n") == 1


def test_lines_that_cannot_be_read_are_counted(tmp_path, capsys):
    write(tmp_path, told_run())
    with (tmp_path / "events-replica-0.jsonl").open("a") as file:
        file.write("not an event\n")
    assert top.main(["--once", str(tmp_path)]) == 0
    assert "1 lines could not be read" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--every", "0", "x"], ["--every", "soon", "x"]])
def test_wrong_usage_is_exit_code_2(arguments):
    with pytest.raises(SystemExit) as ended:
        top.main(arguments)
    assert ended.value.code == 2


class Screen:
    """A terminal of 80 by 24 with `resilin top` in it."""

    def __init__(self, *arguments):
        parent, child = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "resilin.cli", "top", *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=subprocess.PIPE,
            env=env,
        )
        os.close(child)
        self._parent, self.text = parent, ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        # An OSError is how a terminal says that the other end is gone.
        with contextlib.suppress(OSError):
            while True:
                self.text += os.read(self._parent, 65536).decode(errors="replace")

    def wait_for(self, words, seconds=40):
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} is not in {self.text[-3000:]!r}"
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        self.process.stderr.close()
        self._reader.join(timeout=30)
        os.close(self._parent)


@pytest.mark.usefixtures("interruptible")
def test_a_terminal_is_followed_from_before_the_run_until_ctrl_c(tmp_path):
    screen = Screen("--every", "0.1", tmp_path / "later")
    try:
        screen.wait_for("waiting for events")
        told = told_run()
        write(tmp_path / "later", told[:40])
        screen.wait_for("replicas")
        assert "worker_lost" not in screen.text
        write(tmp_path / "later", told[40:])
        screen.wait_for("worker_lost")
        screen.wait_for("160.5 of 400")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(timeout=30) == 0
        assert screen.process.stderr.read() == b""
    finally:
        screen.close()


def test_looking_never_loads_torch(tmp_path):
    write(tmp_path, told_run())
    code = (
        "import sys; from resilin.cli import main\n"
        f"assert main(['top', '--once', {str(tmp_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
