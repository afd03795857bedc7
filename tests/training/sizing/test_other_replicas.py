"""Policies of the batch size in jobs that are resumed by another number of replicas."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.training.sizing.sizes_job import NUM

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("sizes_job.py")
# The path of the tests stays: workers must train with the resilin that is tested.
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def life(folder, policy, *, replicas, epochs):
    """The sizes of the steps of one life of the job, and that of the next step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--run-dir", "off"]
    command += ["--nproc", str(replicas), str(JOB), str(folder), policy, str(epochs)]
    done = forked.run(command, capture_output=True, text=True, timeout=80, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    noted = json.loads((folder / f"epochs-{epochs}").read_text())
    assert noted["replicas"] == replicas
    return noted["sizes"], noted["next"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["schedule", "ramp", "cap"])
def test_the_size_of_two_replicas_is_continued_by_one(tmp_path, policy):
    first, then = life(tmp_path, policy, replicas=2, epochs=1)
    second, _ = life(tmp_path, policy, replicas=1, epochs=2)
    assert sum(first) == sum(second) == NUM
    if policy == "schedule":
        # 5 tokens a sample: 5000 tokens are 1000 samples, 9000 tokens 1800 samples.
        assert first == [8] * 125 + [16] * 37 + [8]
        assert second == [16] * 13 + [40] * 34 + [32]
    assert first[0] == 8
    assert second[0] == then > 8
    if policy == "ramp":
        assert set(second) == {16}
