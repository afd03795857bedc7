"""Live jobs that are really run, with workers that speak to their launcher and train nothing."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from resilin.core.events import FaultEvent
from resilin.engine import environment
from resilin.engine.processes import process_gone, process_start
from resilin.engine.stop import RESTART
from resilin.telemetry.read import read_events
from tests import forked

pytestmark = pytest.mark.processes

TIMEOUT = 200
MEMBER = "import signal\n" + (pathlib.Path(__file__).parent / "worker_script.py").read_text()
TRAINS = """
connect()
signal.signal(signal.SIGTERM, leave)
join()
train(lambda: asked("end"))
tell("done", steps=steps)
if not stopped:
    client.finished()
sys.exit(128 + signal.SIGTERM if stopped else 0)
"""


class Job:
    """A launcher with its workers, in a directory of its own."""

    def __init__(self, directory):
        self.directory = directory
        self.out = directory / "out"
        self.out.mkdir()
        self.process = None

    def start(self, code, *options, member=MEMBER, **env):
        (self.directory / "script.py").write_text(member + code)
        command = [sys.executable, "-m", "resilin.cli", "run", "--live", *options]
        ours = ("RESILIN_", "PET_", "OMP_", "LOGLEVEL", "TORCH")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        with open(self.directory / "errors", "w") as errors:
            self.process = forked.Popen(
                [
                    *command,
                    "--memory-dir",
                    self.directory / "memory",
                    "script.py",
                    self.out,
                    "--lr",
                    "1",
                ],
                cwd=self.directory,
                # These workers do not train: only the launcher can tell of generations.
                env={**clean, environment.RUN_DIR: "off", environment.LOG: "DEBUG", **env},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        return self

    @property
    def errors(self):
        """What the launcher and its workers have printed so far."""
        return (self.directory / "errors").read_text()

    def told(self, what):
        """What workers told, by their number."""
        found = [json.loads(file.read_text()) for file in self.out.glob(f"{what}-*")]
        return {int(each[environment.MEMBER].rpartition("-")[2]): each for each in found}

    def pids(self, what="joined"):
        """Process ids of those who told, by their number."""
        return {
            int(json.loads(file.read_text())[environment.MEMBER].rpartition("-")[2]): int(
                file.name.rpartition("-")[2]
            )
            for file in self.out.glob(f"{what}-*")
        }

    def wait_for(self, what, numbers):
        deadline = time.monotonic() + TIMEOUT
        while not {*numbers} <= {*self.told(what)}:
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, (what, self.errors)
            time.sleep(0.02)
        return self.pids(what)

    def wait_for_line(self, *parts):
        """Waits until the launcher says something with all of these."""
        deadline = time.monotonic() + TIMEOUT
        while not any(all(part in line for part in parts) for line in self.errors.splitlines()):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, (parts, self.errors)
            time.sleep(0.02)

    def ask(self, what):
        (self.out / what).touch()

    def ends(self):
        """The exit code, and the lines of the launcher itself."""
        code = self.process.wait(TIMEOUT)
        lines = [line.removeprefix("resilin: ") for line in self.errors.splitlines()]
        return code, lines, self.errors


@pytest.fixture
def job(tmp_path):
    ours = Job(tmp_path)
    yield ours
    if ours.process is not None:
        ours.process.kill()
        ours.process.wait(TIMEOUT)
    for file in ours.out.glob("*-*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.name.rpartition("-")[2]), signal.SIGKILL)


def says(lines, *parts):
    """The line that has all of these; there must be one."""
    (found,) = [line for line in lines if all(part in line for part in parts)]
    return found


@pytest.mark.parametrize("warm", [[], ["--warm"]], ids=["cold", "warm"])
def test_a_worker_that_is_killed_is_replaced_and_the_others_keep_running(job, warm):
    job.start(TRAINS, "--nproc", "2", "--rdzv-id", "job7", "--run-dir", "run", *warm)
    pids = job.wait_for("joined", [0, 1])
    os.kill(pids[1], signal.SIGKILL)
    pids = job.wait_for("joined", [2])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert "Traceback" not in errors
    assert lines[0] == "writing events to run; to watch: resilin top run"
    said = iter(lines[1:])
    for expected in (
        "started workers 0, 1",
        "generation 0: 2 workers",
        f"worker 1 (process {pids[1]}) was killed by SIGKILL after ",
        "generation 1: 1 worker; without worker 1",
        f"worker 2 (process {pids[2]}) replaces worker 1",
        "generation 2: 2 workers; worker 2 joined",
        "ended at step ",
    ):
        assert any(line.startswith(expected) for line in said), (expected, errors)
    assert lines[-1].endswith(" after 1 replacement")
    done, joined = job.told("done"), job.told("joined")
    assert sorted(done) == [0, 2]
    # The first one was never started again.
    assert job.pids("done")[0] == pids[0]
    assert joined[2]["LOCAL_RANK"] == joined[1]["LOCAL_RANK"] == "1"
    for number, each in joined.items():
        assert each[environment.MEMBER] == f"job7-{number}"
        assert each[environment.MEMORY_DIR] == str(job.directory / "memory" / "job7")
        assert each["GLOO_SOCKET_IFNAME"] == "lo"
        assert each["argv"] == ["--lr", "1"]
        assert not pathlib.Path(each[environment.LIVE]).exists()
    faults = [event for event in read_events(job.directory / "run") if type(event) is FaultEvent]
    assert [(fault.kind, fault.replica) for fault in faults] == [("worker_lost", 1)]
    assert list((job.directory / "memory").iterdir()) == []


SLOW_TO_UNLOAD = """
connect()
join()

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.5)  # no thread runs any more, as when a framework is unloaded

slow = Slow()
sys.exit(3 if number == 1 else train(lambda: asked("end")) or client.finished())
"""


def test_a_worker_whose_script_has_ended_is_not_frozen(job):
    job.start(SLOW_TO_UNLOAD, "--nproc", "2", "--heartbeat", "1")
    pids = job.wait_for("joined", [0, 1, 2])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, f"worker 1 (process {pids[1]}) exited with code 3")
    assert "froze" not in errors


def test_a_worker_that_freezes_is_killed_and_replaced(job):
    job.start(TRAINS, "--nproc", "2", "--heartbeat", "1.5", "--run-dir", "run")
    pids = job.wait_for("joined", [0, 1])
    os.kill(pids[0], signal.SIGSTOP)
    job.wait_for("joined", [2])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, f"worker 0 (process {pids[0]}) froze: no sign of life for 1.5 s")
    assert says(lines, "replaces worker 0")
    faults = [event for event in read_events(job.directory / "run") if type(event) is FaultEvent]
    assert [(fault.kind, fault.replica) for fault in faults] == [("worker_hung", 0)]


def test_a_worker_that_is_asked_to_leave_is_not_replaced(job):
    job.start(TRAINS, "--nproc", "2")
    pids = job.wait_for("joined", [0, 1])
    os.kill(pids[0], signal.SIGTERM)
    job.wait_for_line("worker 0 (process", "asked to leave")
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert "it was asked to leave, and is not replaced" in says(lines, "worker 0 (process")
    assert sorted(job.told("joined")) == [0, 1]
    assert sorted(job.told("done")) == [1]
    assert re.fullmatch(r"(finished|ended at step \d+)", lines[-1])


def test_the_job_is_stopped_when_all_workers_were_asked_to_leave(job):
    code = TRAINS.replace("signal.signal(signal.SIGTERM, leave)", "")
    code = code.replace("train(", "signal.signal(signal.SIGTERM, lambda *_: os._exit(143)); train(")
    job.start(code, "--nproc", "1")
    pids = job.wait_for("joined", [0])
    job.wait_for_line("generation 0")
    os.kill(pids[0], signal.SIGTERM)
    code, lines, errors = job.ends()
    assert code == 128 + signal.SIGTERM, errors
    assert re.fullmatch(r"stopped by SIGTERM( after step \d+)?", lines[-1])


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_stops_all_workers_together(job, number):
    code = TRAINS.replace(
        "join()\n", "join()\n(pathlib.Path(env['RESILIN_MEMORY_DIR']) / 's').touch()\n"
    )
    job.start(code, "--nproc", "2", "--rdzv-id", "job7")
    pids = job.wait_for("joined", [0, 1])
    starts = {pid: process_start(pid) for pid in pids.values()}
    job.process.send_signal(number)
    job.wait_for_line("stopping 2 workers")
    job.process.send_signal(signal.SIGTERM)  # a second one changes nothing
    code, lines, errors = job.ends()
    assert code == 128 + number, errors
    assert says(lines, f"stopped by {number.name}")
    assert lines[-1].startswith(f"kept the latest state in {job.directory}/memory/job7: resume")
    assert all(process_gone(pid, start) for pid, start in starts.items())
    assert "replaces" not in errors
    assert "Traceback" not in errors


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(job):
    code = TRAINS.replace("leave)", "signal.SIG_IGN)").replace("client.on_stop = stop", "")
    member = MEMBER.replace("    client.on_stop = stop\n", "")
    job.start(code, "--nproc", "2", "--shutdown-timeout", "1", member=member)
    pids = job.wait_for("joined", [0, 1])
    starts = {pid: process_start(pid) for pid in pids.values()}
    job.process.send_signal(signal.SIGTERM)
    code, lines, errors = job.ends()
    assert code == 128 + signal.SIGTERM, errors
    assert says(lines, "killing worker 0, 1, which had 1 s to stop")
    assert all(process_gone(pid, start) for pid, start in starts.items())


@pytest.mark.nightly(part="jobs")
def test_two_workers_that_are_killed_at_once_are_both_replaced(job):
    job.start(TRAINS, "--nproc", "3")
    pids = job.wait_for("joined", [0, 1, 2])
    for number in (0, 2):
        os.kill(pids[number], signal.SIGKILL)
    joined = job.wait_for("joined", [3, 4])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert job.pids("done")[1] == pids[1]
    assert sorted(job.told("done")) == [1, 3, 4]
    slots = {job.told("joined")[number]["LOCAL_RANK"] for number in (3, 4)}
    assert slots == {"0", "2"}
    assert re.fullmatch(r"(finished|ended at step \d+) after 2 replacements", lines[-1])
    assert len(joined) == 5


@pytest.mark.nightly(part="jobs")
def test_a_replacement_that_is_killed_while_it_starts_is_replaced(job):
    code = "tell('started')\nif number == 2:\n    time.sleep(60)\n" + TRAINS
    job.start(code, "--nproc", "2")
    pids = job.wait_for("joined", [0, 1])
    os.kill(pids[1], signal.SIGKILL)
    started = job.wait_for("started", [2])
    os.kill(started[2], signal.SIGKILL)
    job.wait_for("joined", [3])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert sorted(job.told("done")) == [0, 3]
    assert re.fullmatch(r"(finished|ended at step \d+) after 2 replacements", lines[-1])


@pytest.mark.nightly(part="jobs")
def test_a_worker_that_is_killed_before_the_job_began_is_replaced(job):
    code = "connect()\ntell('started')\nwhile number == 1: time.sleep(1)\n"
    job.start(code + TRAINS.replace("connect()", ""), "--nproc", "2")
    started = job.wait_for("started", [0, 1])
    os.kill(started[1], signal.SIGKILL)
    joined = job.wait_for("joined", [0, 2])
    assert joined[0] == started[0]
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, "generation 0: 2 workers")
    assert re.fullmatch(r"(finished|ended at step \d+) after 1 replacement", lines[-1])


def test_the_loss_of_all_workers_starts_the_job_again(job):
    job.start(TRAINS, "--nproc", "2")
    pids = job.wait_for("joined", [0, 1])
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)  # so that none of them is told of the other
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    numbers = [2, 3]
    job.wait_for("joined", numbers)
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(
        lines, "the job cannot continue live, starting it again (1 of 1000)", "the last member"
    )
    assert re.fullmatch(r"(finished|ended at step \d+) after 1 restart", lines[-1])
    assert "replaces" not in errors


def test_a_worker_may_ask_for_a_new_start_of_the_job(job):
    code = TRAINS.replace(
        "join()\n", "join()\nif number == 1: client.restart('it failed twice')\n", 1
    )
    job.start(code, "--nproc", "2")
    job.wait_for("joined", [2, 3])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(
        lines, "the job cannot continue live, starting it again (1 of 1000): it failed twice"
    )
    paths = {each[environment.LIVE] for each in job.told("joined").values()}
    assert len(paths) == 2


def test_a_worker_that_was_removed_comes_back_under_another_name(job):
    code = TRAINS.replace("train(", f"if number == 1: step(); os._exit({RESTART})\ntrain(", 1)
    job.start(code, "--nproc", "2")
    job.wait_for("joined", [0, 1, 2])
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, "worker 1", f"asked for a restart (code {RESTART})")
    assert says(lines, "replaces worker 1")


# Scripts that fail ---------------------------------------------------------------------------


def test_an_error_before_the_job_began_ends_it_at_once_with_that_error(job):
    code = "connect()\nif slot == '1': raise ValueError('a fault of the script')\n"
    code, lines, errors = job.start(code + TRAINS.replace("connect()", ""), "--nproc", "2").ends()
    assert code == 1, errors
    assert "failed: worker 1 " in lines[-1]
    assert "exited with code 1: ValueError: a fault of the script" in lines[-1]
    assert "replaces" not in errors


def test_a_script_with_a_syntax_error_ends_at_once(job):
    code, lines, errors = job.start("this is no Python\n", "--nproc", "2", member="").ends()
    assert code == 1, errors
    assert "exited with code 1" in lines[-1]
    assert "starting it again" not in errors


def test_a_script_that_never_joins_is_refused_by_name(job):
    code, lines, errors = job.start("print('done')\n", "--nproc", "2", member="").ends()
    assert code == 1, errors
    assert "without taking part in the job" in lines[-1]
    assert "resilin.init_process_group()" in lines[-1]


@pytest.mark.nightly(part="jobs")
def test_a_script_that_ends_before_the_job_began_leaves_nobody_waiting(job):
    code = "connect()\nif slot == '1': sys.exit(0)\n" + TRAINS.replace("connect()", "")
    code, lines, errors = job.start(code, "--nproc", "2").ends()
    assert code == 1, errors
    assert "before the job had begun: its script ended early" in lines[-1]


def test_workers_that_keep_failing_without_a_step_are_given_up_and_the_job_goes_on(job):
    code = "if number > 1: sys.exit(3)\n" + TRAINS.replace("train(", "step(); tell('made')\ntrain(")
    job.start(code, "--nproc", "2")
    pids = job.wait_for("made", [0, 1])
    os.kill(pids[1], signal.SIGKILL)
    job.wait_for_line("worker 6 is not replaced")
    job.ask("end")
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, "worker 6 is not replaced", "failed 5 times in a row", "exited with code 3")
    assert sorted(job.told("done")) == [0]


@pytest.mark.nightly(part="jobs")
def test_all_workers_that_fail_at_the_same_place_are_given_up_with_their_error(job):
    code = (
        "connect()\njoin()\nfor _ in range(3): step()\nraise ValueError('a fault of the script')\n"
    )
    code, lines, errors = job.start(code, "--nproc", "2").ends()
    assert code == 1, errors
    assert lines[-1].startswith(
        "gave up: the job failed 5 times in a row without making a new step"
    )
    assert "ValueError: a fault of the script" in lines[-1]


def test_max_restarts_is_obeyed_exactly(job):
    job.start(TRAINS, "--nproc", "2", "--max-restarts", "1")
    pids = job.wait_for("joined", [0, 1])
    os.kill(pids[1], signal.SIGKILL)
    pids = job.wait_for("joined", [2])
    os.kill(pids[2], signal.SIGKILL)
    job.wait_for_line("worker 2 is not replaced")
    os.kill(pids[0], signal.SIGKILL)
    code, lines, errors = job.ends()
    assert code == 1, errors
    assert says(lines, "worker 2 is not replaced", "1 restart", "--max-restarts")
    assert lines[-1].startswith("gave up: ")


# The end of the script -----------------------------------------------------------------------


@pytest.mark.nightly(part="jobs")
def test_a_worker_lost_after_others_had_finished_has_the_job_completed(job):
    code = TRAINS.replace("client.finished()", "late()") + ""
    code = (
        """
def late():
    if number == 1:
        tell("late")
        time.sleep(60)
    client.finished()
"""
        + code
    )
    job.start(code, "--nproc", "2")
    job.wait_for("joined", [0, 1])
    job.ask("end")
    pids = job.wait_for("late", [1])
    deadline = time.monotonic() + TIMEOUT
    while not process_gone(pid := job.pids()[0], process_start(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pids[1], signal.SIGKILL)
    code, lines, errors = job.ends()
    assert code == 0, errors
    assert says(lines, "starting it again (1 of 1000)")
    assert re.fullmatch(r"(finished|ended at step \d+) after 1 restart", lines[-1])


def test_workers_end_with_a_launcher_that_is_killed_while_they_train(job):
    job.start(TRAINS, "--nproc", "2")
    pids = job.wait_for("joined", [0, 1])
    starts = {pid: process_start(pid) for pid in pids.values()}
    job.process.kill()
    job.process.wait(TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while not all(process_gone(pid, start) for pid, start in starts.items()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
