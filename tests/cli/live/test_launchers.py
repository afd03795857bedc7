"""Two launchers of one live job, with a real etcd between them."""

import re
import signal

import pytest

from tests.cli.live.etcd_process import EtcdProcess
from tests.cli.live.test_launcher import TRAINS, Job

pytestmark = pytest.mark.processes


@pytest.fixture
def launchers(tmp_path):
    """Two launchers that share nothing but an etcd."""
    etcd = EtcdProcess(tmp_path)
    jobs = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            jobs.append(Job(tmp_path / name))
        yield etcd, jobs
    finally:
        for job in jobs:
            if job.process is not None:
                job.process.kill()  # its workers end with it
                job.process.wait(60)
        etcd.kill()


@pytest.mark.nightly(part="jobs")
def test_another_launcher_joins_and_its_workers_leave_with_it(launchers):
    etcd, (first, second) = launchers
    common = ["--nproc", "1", "--membership", f"etcd://127.0.0.1:{etcd.port}", "--rdzv-id", "job7"]
    first.start(TRAINS, *common)
    pids = first.wait_for("joined", [0])
    second.start(TRAINS, *common)
    second.wait_for("joined", [0])
    first.wait_for_line("2 workers", "joined")
    second.process.send_signal(signal.SIGTERM)
    code, _, errors = second.ends()
    assert code == 128 + signal.SIGTERM, errors
    first.wait_for_line("1 worker;", "without")
    first.ask("end")
    code, lines, errors = first.ends()
    assert code == 0, errors
    assert first.pids("done") == pids
    assert re.fullmatch(r"finished|ended at step \d+", lines[-1])


def test_the_workers_of_a_launcher_that_is_killed_are_lost_to_the_others(launchers):
    etcd, (first, second) = launchers
    common = ["--nproc", "1", "--membership", f"etcd://127.0.0.1:{etcd.port}", "--rdzv-id", "job7"]
    first.start(TRAINS, *common)
    first.wait_for("joined", [0])
    second.start(TRAINS, *common)
    second.wait_for("joined", [0])
    first.wait_for_line("2 workers", "joined")
    second.process.kill()
    first.wait_for_line("1 worker;", "without")
    first.ask("end")
    code, lines, errors = first.ends()
    assert code == 0, errors
    assert re.fullmatch(r"finished|ended at step \d+", lines[-1])
