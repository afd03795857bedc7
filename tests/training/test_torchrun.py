"""Real torchrun agents: workers that are killed, told to stop, or orphaned."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import forked
from tests.training.recovery_job import NUM_SAMPLES

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("recovery_job.py")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
# The path of the tests stays: workers must train with the resilin that is tested.
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@contextmanager
def agent(folder, *arguments, workers=2, warm=False, **env):
    """A torchrun agent of its own, in a session of its own; nothing of it is left afterwards."""
    module = ["resilin.cli", "run", "--warm"] if warm else ["torch.distributed.run"]
    command = [sys.executable, "-m", *module, "--standalone"]
    command += ["--nproc-per-node", str(workers), "--max-restarts", "3", str(JOB), str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "RESILIN_LOG": "INFO"}
    environ.update(
        {"RESILIN_MEMORY_DIR": str(folder / "memory"), "GLOO_SOCKET_IFNAME": "lo", **env}
    )
    log = (folder / "log").open("ab")
    process = forked.Popen(
        [*command, *arguments], stdout=log, stderr=log, env=environ, start_new_session=True
    )
    try:
        yield process
    finally:
        for path in folder.glob("start-*"):
            kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
        process.kill()
        process.wait()
        log.close()


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, folder, seconds=200):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError((folder / "log").read_text()[-5000:])


def note(folder, generation, replica):
    path = folder / f"start-{generation}-{replica}"
    return json.loads(path.read_text()) if path.exists() and path.read_text() else None


def step_of(folder, generation=0, replica=0):
    path = folder / f"step-{generation}-{replica}"
    return int(path.read_text()) if path.exists() else 0


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the job comes to in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environ = {**os.environ, "PYTHONPATH": PATH}
    forked.run([sys.executable, str(JOB), str(folder)], check=True, timeout=60, env=environ)
    return json.loads((folder / "result-0").read_text())


def assert_same(result, expected):
    assert result["steps"] == expected["steps"]
    assert result["weight"] == pytest.approx(expected["weight"], rel=1e-9)
    assert result["ema"] == pytest.approx(expected["ema"], rel=1e-9)
    assert result["lr"] == expected["lr"]
    assert set(result["totals"]) == {NUM_SAMPLES}


@pytest.mark.parametrize(
    ("warm", "options"),
    [(False, []), (True, []), (True, ["--sharded"])],
    ids=["cold", "warm", "sharded"],
)
def test_a_killed_worker_costs_no_completed_step(tmp_path, expected, warm, options):
    with agent(tmp_path, "--pause", "0.1", *options, warm=warm) as process:
        wait_for(lambda: step_of(tmp_path) >= 9, tmp_path)
        done = step_of(tmp_path, replica=1)
        kill(note(tmp_path, 0, 1)["pid"], signal.SIGKILL)
        # Steps that one replica has begun to sleep behind were not completed yet.
        began = wait_for(lambda: note(tmp_path, 1, 0), tmp_path)["began"]
        assert began >= done - 1
        assert process.wait(timeout=60) == 0, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert f"resumed 2 replicas at step {began} from memory" in log
    assert_same(json.loads((tmp_path / "result-1").read_text()), expected)
    # A job that is done gives its memory back.
    assert list((tmp_path / "memory").iterdir()) == []


def test_an_agent_that_is_told_to_stop_saves_and_another_size_goes_on(tmp_path, expected):
    # With a worker process for the data, which the agent's signal reaches as well.
    with agent(tmp_path, "--pause", "0.1", "--num-workers", "1") as process:
        wait_for(lambda: step_of(tmp_path) >= 9, tmp_path)
        process.terminate()
        assert process.wait(timeout=40) != 0
    assert "stopped at step" in (tmp_path / "log").read_text()
    done = step_of(tmp_path)
    for path in (tmp_path / "memory").glob("*"):
        path.unlink()
    with agent(tmp_path, workers=1) as process:
        assert process.wait(timeout=60) == 0, (tmp_path / "log").read_text()
    assert note(tmp_path, 1, 0)["began"] == done
    assert_same(json.loads((tmp_path / "result-0").read_text()), expected)


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("warm", [False, True])
def test_a_worker_without_its_agent_ends(tmp_path, warm):
    with agent(tmp_path, "--pause", "0.1", workers=1, warm=warm) as process:
        wait_for(lambda: step_of(tmp_path) >= 1, tmp_path)
        pid = note(tmp_path, 0, 0)["pid"]
        process.kill()
        process.wait()
        wait_for(lambda: not alive(pid), tmp_path, seconds=10)
    assert "the agent of this worker is gone" in (tmp_path / "log").read_text()
    assert not (tmp_path / "result-0").exists()


@pytest.mark.nightly(part="jobs")
def test_a_long_evaluation_does_not_cost_the_state(tmp_path):
    """Between two steps that never come, the memory copy becomes the checkpoint."""
    with agent(
        tmp_path, "--long-evaluation", workers=1, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="10"
    ) as process:
        wait_for(lambda: (tmp_path / "evaluating-0").exists(), tmp_path)
        process.terminate()
        process.wait(timeout=20)
    assert "saved step 7 in" in (tmp_path / "log").read_text()
