"""`resilin demo --live`: a real training that loses a worker and gets another one."""

import os
import re
import sys

import pytest

from resilin.cli.demo import JOB
from tests import forked

pytestmark = pytest.mark.processes

TIMEOUT = 110


def trained(tmp_path, *arguments):
    """Runs the command until it has used each sample once per epoch; returns what it said."""
    ours = ("RESILIN_", "PET_", "OMP_", "LOGLEVEL", "TORCH")
    ended = forked.run(
        [sys.executable, "-m", "resilin.cli", *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    epochs = re.findall(r"^epoch (\d): (\d+) samples", ended.stdout, re.MULTILINE)
    assert epochs == [(str(epoch), "1800") for epoch in range(4)]
    return ended


@pytest.mark.nightly(part="jobs")
def test_a_worker_whose_main_thread_hangs_is_killed_and_replaced(tmp_path):
    # Its signs of life continue: only what it publishes of its steps shows it.
    pause = "time.sleep(args.pause)"
    stuck = (
        "time.sleep(600 * (model.clock.steps == 30 and os.environ['RESILIN_MEMBER'][-2:] == '-1'))"
    )
    job = JOB.read_text()
    assert job.count(pause) == 1
    (tmp_path / "script.py").write_text(job.replace(pause, f"{pause}; {stuck}"))
    options = ["--live", "--warm", "--nproc", "2", "--hang-timeout", "3"]
    said = trained(tmp_path, "run", *options, "script.py", "--pause", "0.02").stderr
    assert re.search(r"no progress for \d+ s \(limit \d+ s, see --hang-timeout\)", said)
    assert re.search(r"killing worker 1\nresilin: worker 1 .* was killed by SIGKILL", said)
    assert "no sign of life" not in said
    assert "replaces worker 1" in said


def test_the_live_demo_loses_a_worker_and_trains_on_with_the_same_process(tmp_path):
    ended = trained(tmp_path, "demo", "--live")
    assert "was killed by SIGKILL" in ended.stderr
    assert re.search(r"1 replica continues from step 40\b", ended.stderr)
    assert "replaces worker 1" in ended.stderr
    assert re.search(r"2 replicas continue from step \d+ after", ended.stderr)
    # The first replica says it, so the launcher does not.
    assert "generation" not in ended.stderr
    assert ended.stderr.rstrip().endswith("resilin: finished after 1 replacement")
