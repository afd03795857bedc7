"""Launchers as on several machines, with a real etcd between them."""

import ast
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cli.live.etcd_process import EtcdProcess, until

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("paced_job.py")


class Machine:
    """A launcher with its workers."""

    def __init__(self, directory, name, etcd, *more, num_workers, **variables):
        self.log = directory / f"{name}.log"
        # Jobs of other tests are on this machine, too.
        job = f"machines-{etcd.port}"
        command = ["run", "--live", "--warm", "--nproc", str(num_workers), "--rdzv-id", job]
        command += ["--membership", str(etcd.access), *more, str(SCRIPT)]
        with self.log.open("w") as log:
            self.process = forked.Popen(
                [
                    sys.executable,
                    "-m",
                    "resilin.cli",
                    *command,
                    directory / "go",
                    directory / "end",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=directory,
                env={**os.environ, **variables},
            )

    @property
    def said(self):
        return self.log.read_text()

    def lose(self):
        """The machine and all that runs on it is gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=20)


@pytest.mark.timeout(300)
def test_a_machine_joins_and_is_lost_and_so_is_etcd_for_a_while(tmp_path):
    etcd = EtcdProcess(tmp_path)
    machines = [Machine(tmp_path, "one", etcd, num_workers=2)]
    try:
        one = machines[0]
        until(lambda: "12 samples" in one.said, lambda: one.said)
        machines.append(Machine(tmp_path, "two", etcd, "--lease", "4", num_workers=1))
        two = machines[1]
        until(lambda: "8 samples" in two.said and "8 samples" in one.said, lambda: two.said)
        assert etcd.leases() == [3, 4]
        # Without etcd all three train.
        etcd.kill()
        until(lambda: "etcd does not answer" in one.said, lambda: one.said)
        epochs = two.said.count("8 samples")
        until(lambda: two.said.count("8 samples") > epochs + 2, lambda: two.said)
        etcd.start()
        until(lambda: "etcd answers again" in one.said, lambda: one.said)
        two.lose()
        before = one.said.count("12 samples")
        until(lambda: one.said.count("12 samples") > before, lambda: one.said)
        (tmp_path / "go").touch()
        assert one.process.wait(timeout=120) == 0, one.said
    finally:
        for machine in machines:
            machine.lose()
        etcd.kill()
    # As if nothing had happened.
    forked.run([sys.executable, SCRIPT, tmp_path / "go", tmp_path / "end"], check=True, timeout=120)
    ends = {path.name: ast.literal_eval(path.read_text()) for path in tmp_path.glob("end-*")}
    undisturbed = ends.pop("end-alone")[0]
    assert len(ends) == 2, ends.keys()
    for (weights,) in ends.values():
        assert weights == pytest.approx(undisturbed, rel=1e-12)


@pytest.mark.nightly(part="jobs")
@pytest.mark.timeout(300)
def test_a_machine_whose_workers_wait_to_join_hears_that_the_job_has_ended(tmp_path):
    etcd = EtcdProcess(tmp_path)
    machines = [Machine(tmp_path, "one", etcd, num_workers=1)]
    try:
        one = machines[0]
        until(lambda: "24 samples" in one.said, lambda: one.said)
        machines.append(Machine(tmp_path, "two", etcd, num_workers=1, NEVER_BUILT="1"))
        two = machines[1]
        until(lambda: "generation 0: 1 worker" in two.said, lambda: two.said)
        (tmp_path / "go").touch()
        assert one.process.wait(timeout=120) == 0, one.said
        # Nobody trains there what the others have trained.
        assert two.process.wait(timeout=120) == 0, two.said
    finally:
        for machine in machines:
            machine.lose()
        etcd.kill()
    assert "over on other machines: ending 1 worker that waited to join it" in two.said
    assert "starting it again" not in two.said
