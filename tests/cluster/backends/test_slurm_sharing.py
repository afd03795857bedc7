"""Three elastic jobs share four nodes of a real Slurm; one node is drained, one is lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest

from resilin.cli.sched import access
from resilin.cluster.backends.base import PartState
from resilin.cluster.backends.local import LocalBackend
from tests.cluster.sharing import JOB, assert_as_undisturbed, steps_done
from tests.cluster.sharing_job import HURRY
from tests.cluster.slurm_cluster import missing, slurm_cluster

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(900),
]
TIMEOUT = 400.0
NAMES = ("first", "second", "third")
EPOCHS = 4


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), accelerators=1) as running:
        monkeypatch.setenv("SLURM_CONF", running.environment["SLURM_CONF"])
        yield running


@pytest.fixture
def controller(slurm, tmp_path):
    """A controller on Slurm, as `resilin sched serve` runs it."""
    state = tmp_path / "state"
    state.mkdir()
    command = [sys.executable, "-m", "resilin.cli", "sched", "serve", "--state", str(state)]
    command += ["--backend", "slurm", "--poll", "0.5", "--interval", "10", "--grace", "40"]
    with (state / "serve.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: (state / access.ADDRESS).exists() or process.poll() is not None)
        assert process.poll() is None, (state / "serve.log").read_text()
        url = json.loads((state / access.ADDRESS).read_text())["url"]
        yield access.client(argparse.Namespace(state=state, url=url))
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()
        store = LocalBackend(state / "meeting", "store", ())
        for each in store.list():
            if each.state is not PartState.ENDED:
                store.stop(each.name, 0)


def wait_until(check, tell=str):
    deadline = time.monotonic() + TIMEOUT
    while not (found := check()):
        assert time.monotonic() < deadline, tell()
        time.sleep(0.3)
    return found


def submit(controller, tmp_path, name, seed):
    options = [str(tmp_path / name), "--epochs", str(EPOCHS), "--seed", str(seed)]
    controller.submit(
        {
            "name": name,
            "max": 4,
            "launch": {
                "script": [str(JOB), *options, "--pause", "1"],
                "directory": str(tmp_path),
                "python": sys.executable,
                "options": [],
                "environment": {"RESILIN_RUN_DIR": "off", "OMP_NUM_THREADS": "1"},
                "checkpoint_dir": str(tmp_path / "checkpoints" / name),
            },
        }
    )


def test_three_jobs_share_four_nodes_through_a_drain_and_a_loss(slurm, controller, tmp_path):
    def tell():
        logs = [path.read_text()[-1500:] for path in sorted(tmp_path.rglob("*.log"))]
        queue = slurm.call("squeue", "--states=all", "--format=%A %j %T %N %r")
        return "\n".join([json.dumps(controller.jobs(), indent=1), queue, *logs])

    def jobs_on(node):
        return {each["name"]: each["jobs"] for each in controller.nodes()}.get(node)

    for seed, name in enumerate(NAMES):
        submit(controller, tmp_path, name, seed)
    wait_until(lambda: all(steps_done(tmp_path / name) for name in NAMES), tell)
    # The operator drains a node in Slurm: its job saves and leaves, and the node is empty.
    drained = next(each["name"] for each in controller.nodes() if each["jobs"])
    slurm.set_state(drained, "DRAIN")
    wait_until(lambda: not jobs_on(drained), tell)
    # Another node is lost with all that runs on it.
    lost = wait_until(lambda: [each["name"] for each in controller.nodes() if each["jobs"]], tell)[
        0
    ]
    assert lost != drained
    slurm.set_state(lost, "DOWN")
    wait_until(lambda: not jobs_on(lost), tell)
    for name in NAMES:
        (tmp_path / name / HURRY).touch()
    wait_until(lambda: all(job["ended"] is not None for job in controller.jobs()), tell)
    assert {job["id"]: job["phase"] for job in controller.jobs()} == dict.fromkeys(
        NAMES, "finished"
    ), tell()
    names = slurm.call("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert len(names) == len(set(names))  # no part was started twice
    failed = slurm.call("squeue", "--noheader", "--states=NODE_FAIL", "--format=%N").split()
    assert failed == [lost]
    for seed, name in enumerate(NAMES):
        assert_as_undisturbed(tmp_path / name, epochs=EPOCHS, seed=seed)
