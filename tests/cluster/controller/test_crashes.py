"""A real controller that is killed at every line of its journal, and started again."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilin.cli.sched.serve import KILL_AT
from resilin.cluster.backends.base import PartState
from resilin.cluster.controller.client import Refused
from resilin.cluster.controller.journal import Journal
from tests.cluster.controller.cheap import assert_never_twice, launch, statuses
from tests.cluster.served import Served

pytestmark = pytest.mark.nightly(part="clusters")

CAPACITY = {"a": 1, "b": 2}
OPTIONS = ("--rendezvous", "127.0.0.1:1", "--option", "nodes=a=1,b=2", "--policy", "ours")
FAST = ("--interval", "600", "--poll", "0.1", "--grace", "60")
SLOTS = 3
"""Runs at the same time."""


class Fragile:
    """A controller that dies at a line of its journal, and its user, who tries again."""

    def __init__(self, directory, line):
        self.served = Served(directory / "state", *OPTIONS, *FAST)
        self.line, self.deaths = line, 0

    def ask(self, request):
        """A request that is repeated until it is answered."""
        while True:
            if self.served.process is None:
                # Only the first one is fragile; it may die before it answers at all.
                self.served.start(**{KILL_AT: str(self.line)})
                if not self.reachable():
                    self.revive()
            try:
                return request(self.served.client)
            except OSError:
                self.revive()

    def reachable(self):
        address = self.served.state / "address.json"
        self.served.wait(lambda: address.exists() or self.served.ended)
        if self.served.ended:
            return False
        self.served.connect()
        return True

    def revive(self):
        self.served.wait(lambda: self.served.ended)
        assert self.served.process.returncode == -signal.SIGKILL, self.served.said()
        self.deaths += 1
        self.served.start()

    def until(self, true):
        deadline = time.monotonic() + 120
        while not self.ask(true):
            assert time.monotonic() < deadline, self.served.said()
            time.sleep(0.05)


def submit(fragile, told):
    try:
        fragile.ask(lambda client: client.submit(told))
    except Refused as error:
        # It was on disk, and the answer was lost.
        if error.status != 409 or not fragile.deaths:
            raise


def live(directory, line):
    """A short life of a cluster; returns the lines of its journal and the number of crashes."""
    fragile = Fragile(directory, line)
    one, two = directory / "one", directory / "two"
    try:
        submit(fragile, launch(one, "one", max=2))
        fragile.until(lambda client: client.job("one")["replicas"] == 2)
        submit(fragile, launch(two, "two", max=2))
        fragile.until(lambda client: client.job("two")["replicas"] >= 1)
        fragile.ask(lambda client: client.drain("a"))
        fragile.until(lambda client: not any(n["jobs"] for n in client.nodes() if n["drained"]))
        (one / "finish").touch()
        fragile.until(lambda client: client.job("one")["phase"] == "finished")
        (two / "finish").touch()
        fragile.until(lambda client: client.job("two")["phase"] == "finished")
        assert len(fragile.ask(lambda client: client.jobs())) == 2
        lines = len((fragile.served.state / "journal.jsonl").read_bytes().splitlines())
    finally:
        fragile.served.kill()
        fragile.served.end_parts()
    assert_never_twice(fragile.served.state / "local", CAPACITY)
    by_job = {name.split("-")[0] for name in statuses(fragile.served.state / "local")}
    assert by_job == {"one", "two"}
    Journal(fragile.served.state).close()
    return lines, fragile.deaths


@pytest.mark.timeout(900)
def test_no_job_is_lost_or_started_twice_at_whatever_line_the_controller_is_killed(tmp_path):
    (tmp_path / "calm").mkdir()
    lines, deaths = live(tmp_path / "calm", 10**9)
    assert deaths == 0
    assert lines > 15

    def crash(line):
        directory = tmp_path / f"line-{line}"
        directory.mkdir()
        return line, live(directory, line)[1]

    with ThreadPoolExecutor(SLOTS) as pool:
        died = dict(pool.map(crash, range(1, lines + 1)))
    # The last lines of a calm run need not be reached: others have fewer decisions.
    assert all(died[line] == 1 for line in range(1, lines - 4)), died


def test_two_controllers_at_once_are_refused_with_the_process_of_the_first(tmp_path):
    with Served(tmp_path / "state", *OPTIONS) as served:
        done = subprocess.run(served.command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert f"must have one controller: process {served.process.pid} uses it" in done.stderr
        assert served.client.jobs() == []


def test_controllers_of_two_directories_leave_each_others_parts_alone(tmp_path):
    shared = ("--option", f"directory={tmp_path / 'shared'}", *OPTIONS, *FAST)
    with Served(tmp_path / "one", *shared) as one, Served(tmp_path / "two", *shared) as two:
        # The same name in both.
        one.client.submit(launch(tmp_path / "x", "job", max=1))
        one.wait(lambda: one.job("job")["replicas"] == 1)
        two.client.submit(launch(tmp_path / "y", "job", max=2))
        two.wait(lambda: two.job("job")["replicas"] == 2)
        assert one.job("job")["replicas"] == 1
        one.client.cancel("job")
        one.wait(lambda: one.phase("job") == "cancelled")
        time.sleep(1.0)
        assert two.job("job")["replicas"] == 2
        two.client.cancel("job")
        two.wait(lambda: two.phase("job") == "cancelled")
        assert {each["code"] for each in statuses(tmp_path / "shared").values()} == {138}


def test_jobs_run_on_without_a_controller_and_are_found_by_the_next(tmp_path):
    with Served(tmp_path / "state", *OPTIONS, *FAST) as served:
        served.client.submit(launch(tmp_path / "one", "one", max=2))
        served.wait(lambda: served.job("one")["replicas"] == 2)
        url = served.client.url
        served.kill()
        local = served.local()
        before = {each.name for each in local.list() if each.state is PartState.RUNNING}
        assert before
        (tmp_path / "one" / "finish").touch()
        served.wait(lambda: all(each.state is PartState.ENDED for each in local.list()))
        served.start()
        assert served.client.url == url  # jobs that run know that one
        served.wait(lambda: served.phase("one") == "finished")
        assert {each.name for each in local.list()} == before


def test_a_job_that_fails_is_started_again_later_and_says_why(tmp_path):
    with Served(tmp_path / "state", *OPTIONS, *FAST) as served:
        served.client.submit(launch(tmp_path / "one", "one", max=1))
        (tmp_path / "one" / "fail").touch()
        served.wait(lambda: served.job("one")["failures"] == 2)
        why = served.client.why("one")["text"]
        assert "It is started again in" in why
        assert "ended with code 1; output: " in why
        served.client.cancel("one")
        served.wait(lambda: served.phase("one") == "cancelled")


def test_a_signal_ends_the_controller_and_nothing_else(tmp_path):
    with Served(tmp_path / "state", *OPTIONS, *FAST) as served:
        served.client.submit(launch(tmp_path / "one", "one", max=1))
        served.wait(lambda: served.job("one")["replicas"] == 1)
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(timeout=60) == 0
        (status,) = served.local().list()
        assert status.state is PartState.RUNNING
