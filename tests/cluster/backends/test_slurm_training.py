"""A job that trains in parts on a real Slurm, while its nodes come and go."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from resilin.cluster.backends.base import Part, PartState
from resilin.cluster.backends.slurm import SlurmBackend
from tests.cluster.sharing import JOB, assert_as_undisturbed, sizes_of, steps_done
from tests.cluster.sharing_job import HURRY
from tests.cluster.slurm_cluster import missing, slurm_cluster

pytestmark = [
    pytest.mark.nightly(part="clusters"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(900),
]
TIMEOUT = 240.0
EPOCHS = 6


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        monkeypatch.setenv("SLURM_CONF", running.environment["SLURM_CONF"])
        yield running


@pytest.fixture
def store():
    """The rendezvous, on no node of the job."""
    command = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"127.0.0.1:{process.stdout.readline().split()[-1]}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_a_job_grows_shrinks_by_its_first_node_and_loses_another(slurm, store, tmp_path):
    ours, folder = SlurmBackend("ours"), tmp_path / "job"

    def start(number, node):
        run = ["--warm", "--nnodes", "1:4", "--nproc", "1", "--rdzv-endpoint", store]
        run += ["--rdzv-conf", "is_host=0", "--checkpoint-dir", str(tmp_path / "saved")]
        script = [str(JOB), str(folder), "--epochs", str(EPOCHS), "--seed", "3", "--pause", "1"]
        ours.start(
            Part(
                name=f"job-g1-{number}",
                job="job",
                node=node,
                accelerators=2,
                command=[sys.executable, "-m", "resilin.cli", "run", *run, *script],
                environment={"RESILIN_RUN_DIR": "off", "OMP_NUM_THREADS": "1"},
                directory=str(tmp_path),
                log=str(log(number)),
            )
        )

    def log(number):
        return tmp_path / f"part-{number}.log"

    def wait_until(check):
        deadline = time.monotonic() + TIMEOUT
        while not check():
            if time.monotonic() > deadline:
                logs = [path.read_text() for path in sorted(tmp_path.glob("part-*.log"))]
                raise AssertionError("\n".join([*map(str, ours.list()), *logs]))
            time.sleep(0.2)

    def trains_with(replicas):
        wait_until(lambda: sizes_of(folder)[-1:] == [replicas])

    def parts():
        return {each.name: each for each in ours.list()}

    start(0, "n1")
    trains_with(1)
    wait_until(lambda: steps_done(folder) > 2)
    start(1, "n2")
    start(2, "n3")
    trains_with(3)
    # The node of rank 0 leaves in order.
    ranks = {
        number: re.findall(r"worker (\d+) runs? here", log(number).read_text())[-1]
        for number in range(3)
    }
    (first,) = [number for number, rank in ranks.items() if rank == "0"]
    ours.stop(f"job-g1-{first}", 120)
    trains_with(2)
    wait_until(lambda: parts()[f"job-g1-{first}"].state is PartState.ENDED)
    assert "saved step" in "".join(log(number).read_text() for number in range(3))
    # Another one is lost, and its part is started elsewhere.
    lost = min(set(range(3)) - {first})
    slurm.set_state(parts()[f"job-g1-{lost}"].node, "DOWN")
    wait_until(lambda: parts()[f"job-g1-{lost}"].state is PartState.ENDED)
    assert parts()[f"job-g1-{lost}"].code is None
    assert "NODE_FAIL" in parts()[f"job-g1-{lost}"].reason
    trains_with(1)
    start(3, "n4")
    trains_with(2)
    (folder / HURRY).touch()
    left = {f"job-g1-{number}" for number in range(4)} - {f"job-g1-{first}", f"job-g1-{lost}"}
    wait_until(lambda: all(parts()[name].state is PartState.ENDED for name in left))
    assert {parts()[name].code for name in left} == {0}
    assert len(parts()) == 4
    assert_as_undisturbed(folder, epochs=EPOCHS, seed=3)
