"""Jobs that are really submitted: slurmctld and four slurmd on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from resilin.cli import options as run_options
from resilin.cli import slurm as command
from tests.cluster.sharing import JOB, assert_as_undisturbed, assert_once, sizes_of
from tests.cluster.sharing_job import HURRY
from tests.cluster.slurm_cluster import missing, slurm_cluster

real = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TIMEOUT = 240.0
EPOCHS = 4


@pytest.fixture
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=3, grace=120) as running:
        yield running


@pytest.fixture
def submit(slurm, tmp_path):
    """Submits a job that counts its samples, and returns the id of its array."""

    def start(*options):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "resilin.cli", "slurm", JOB, "--checkpoint-dir", "saved"),
                *("--partition", "spot", "--gpus-per-node", "2", "--nproc", "1", "--run=--warm"),
                *(*options, "--"),
                *(tmp_path / "job", "--epochs", str(EPOCHS), "--seed", "5", "--pause", "1"),
            ],
            cwd=tmp_path,
            env={**os.environ, **slurm.environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("job array ")[2].partition(",")[0]

    return start


def wait_until(check, slurm, tmp_path):
    deadline = time.monotonic() + TIMEOUT
    while not (found := check()):
        if time.monotonic() > deadline:
            queue = slurm.call("squeue", "--states=all")
            logs = [path.read_text() for path in sorted(tmp_path.rglob("*.log"))]
            raise AssertionError("\n".join([queue, *logs]))
        time.sleep(0.2)
    return found


def states(slurm, array):
    """State of each element of an array that Slurm knows."""
    said = slurm.call(
        *("squeue", "--noheader", "--array", "--states=all", f"--jobs={array}"),
        "--Format=ArrayTaskID:|,State:|",
    )
    rows = [line.split("|") for line in said.splitlines()]
    return {number.strip(): state.strip() for number, state, _ in rows}


def replicas(tmp_path):
    return (sizes_of(tmp_path / "job") or [0])[-1]


def displace(slurm, element, *, seconds):
    """Have a job of a higher priority take the node of an element."""
    node = slurm.call("squeue", "--noheader", f"--jobs={element}", "--format=%N").strip()
    slurm.call(
        *("sbatch", "--partition=main", f"--nodelist={node}", "--gres=gpu:2"),
        *("--output=/dev/null", f"--wrap=sleep {seconds}"),
    )


def restarts(slurm, element):
    return slurm.call(
        "squeue", "--noheader", "--states=all", f"--jobs={element}", "--Format=RestartCnt"
    ).strip()


@pytest.mark.processes
@real
@pytest.mark.timeout(600)
def test_a_job_array_trains_with_the_nodes_that_are_left(slurm, submit, tmp_path):
    # One element more than there are nodes: it never runs.
    array = submit("--nodes", "1:4")
    wait_until(lambda: replicas(tmp_path) == 3, slurm, tmp_path)
    element = next(number for number, state in states(slurm, array).items() if state == "RUNNING")
    displace(slurm, f"{array}_{element}", seconds=600)
    wait_until(lambda: replicas(tmp_path) == 2, slurm, tmp_path)
    (tmp_path / "job" / HURRY).touch()
    wait_until(lambda: (tmp_path / "job" / "final.pt").exists(), slurm, tmp_path)
    queue = "squeue", "--noheader", "--partition=spot"
    wait_until(lambda: not slurm.call(*queue), slurm, tmp_path)
    found = states(slurm, array)
    assert sorted(found.values()) == ["CANCELLED", "CANCELLED", "COMPLETED", "COMPLETED"]
    assert found[element] == "CANCELLED"  # it waited, and there was nothing left to do
    assert restarts(slurm, f"{array}_{element}") == "1"
    slurm.call("scancel", "--partition=main", "--state=RUNNING", "--name=wrap")
    wait_until(lambda: not slurm.call("squeue", "--noheader"), slurm, tmp_path)  # nor a store
    assert_as_undisturbed(tmp_path / "job", epochs=EPOCHS, seed=5)


@pytest.mark.nightly(part="clusters")
@real
@pytest.mark.timeout(600)
def test_an_element_that_was_displaced_comes_back(slurm, submit, tmp_path):
    # Two nodes at least: without it, the other cannot finish.
    array = submit("--nodes", "2:2")
    wait_until(lambda: replicas(tmp_path) == 2, slurm, tmp_path)
    displace(slurm, f"{array}_1", seconds=3)
    wait_until(lambda: restarts(slurm, f"{array}_1") == "1", slurm, tmp_path)
    (tmp_path / "job" / HURRY).touch()
    wait_until(lambda: not slurm.call("squeue", "--noheader"), slurm, tmp_path)
    assert restarts(slurm, f"{array}_1") == "1"
    assert set(states(slurm, array).values()) == {"COMPLETED"}
    assert set(sizes_of(tmp_path / "job")) == {2}
    assert_as_undisturbed(tmp_path / "job", epochs=EPOCHS, seed=5)


@pytest.mark.nightly(part="clusters")
@real
@pytest.mark.timeout(600)
def test_a_store_that_moves_takes_the_job_with_it(slurm, submit, tmp_path):
    array = submit("--nodes", "1:2")
    wait_until(lambda: replicas(tmp_path) == 2, slurm, tmp_path)
    # As when its time limit is near: all save, and meet again at the next store.
    slurm.call("scancel", "--signal=USR1", "--batch", "--name=sharing_job-store")
    both = [f"{array}_1", f"{array}_2"]
    wait_until(lambda: all(restarts(slurm, each) == "1" for each in both), slurm, tmp_path)
    (tmp_path / "job" / HURRY).touch()
    wait_until(lambda: not slurm.call("squeue", "--noheader"), slurm, tmp_path)
    assert set(states(slurm, array).values()) <= {"COMPLETED", "CANCELLED"}
    assert_once(tmp_path / "job", epochs=EPOCHS)


@pytest.mark.nightly(part="clusters")
@real
@pytest.mark.timeout(600)
def test_a_store_that_is_lost_is_replaced(slurm, submit, tmp_path):
    array = submit("--nodes", "1:2")
    wait_until(lambda: replicas(tmp_path) == 2, slurm, tmp_path)
    (node,) = slurm.call("squeue", "--noheader", "--name=sharing_job-store", "--format=%N").split()
    # The store goes with its node, and with the element that is there too.
    slurm.set_state(node, "DOWN")
    wait_until(
        lambda: "1" in (restarts(slurm, f"{array}_1"), restarts(slurm, f"{array}_2")),
        slurm,
        tmp_path,
    )
    (tmp_path / "job" / HURRY).touch()
    wait_until(lambda: not slurm.call("squeue", "--noheader"), slurm, tmp_path)
    assert set(states(slurm, array).values()) <= {"COMPLETED", "CANCELLED"}
    assert_once(tmp_path / "job", epochs=EPOCHS)


def test_the_scripts_are_printed_and_nothing_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    arguments = [
        "my train.py",
        "--nodes",
        "2:8",
        "--checkpoint-dir",
        "s3://b/j",
        "--time",
        "4:00:00",
    ]
    arguments += ["--account", "lab", "--gpus-per-node", "a100:4", "--lr", "0.1", "--dry-run"]
    assert command.main([*arguments, "--", "--time", "it's"]) == 0
    said = capsys.readouterr().out
    store, part = said.split("# part.sh\n")
    for line in ("--array=1-8", "--time=4:00:00", "--gres=gpu:a100:4", "--signal=B:USR1@60"):
        assert f"#SBATCH {line}\n" in part
    assert "#SBATCH --account=lab\n" in part
    assert "#SBATCH --account=lab\n" in store
    assert "--exclusive" not in part
    assert "--nproc 4 --checkpoint-dir s3://b/j --nnodes 2:8 " in part
    assert """'my train.py' --lr 0.1 --time 'it'"'"'s' &\n""" in part
    assert "resilin.cli store --host 0.0.0.0 --port 0 " in store
    assert list(tmp_path.iterdir()) == [tmp_path / "my train.py"]
    for text in (store.partition("\n")[2], part):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)


def test_a_store_that_runs_already_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    arguments = ["train.py", "--nodes", "1:2", "--checkpoint-dir", "saved", "--dry-run"]
    assert command.main([*arguments, "--rdzv-endpoint", "login-1:29500"]) == 0
    said = capsys.readouterr().out
    assert "store.sh" not in said
    assert "cat <(echo login-1:29500)" in said
    assert "#SBATCH --exclusive\n" in said
    assert f"--checkpoint-dir {tmp_path}/saved" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "3:1"], "'3:1' has more nodes at least than at most"),
        (["--nodes", "0:1"], "'0' is not a whole number of at least 1"),
        (["--nodes", "1:2", "--gpus-per-node", "a 1:2"], "is not a number of GPUs"),
        (["--nodes", "1:2", "--rdzv-endpoint", "here"], "must be HOST:PORT"),
        (
            ["--nodes", "1:2", "--rdzv-endpoint", "h:1", "--store-partition", "p"],
            "cannot be combined with --rdzv-endpoint (h:1)",
        ),
        (["--nodes", "1:2", "--warm"], "--warm is an option of resilin run"),
        (["--nodes", "1:2", "--run-dir=x"], "--run-dir=x is an option of resilin run"),
    ],
)
def test_wrong_options_are_told(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit):
        command.main(["train.py", "--checkpoint-dir", "saved", *arguments])
    assert said in capsys.readouterr().err


def test_options_of_run_are_known(tmp_path, monkeypatch, capsys):
    here = {each for action in command.parser()._actions for each in action.option_strings}
    (ours,) = [each for each in run_options.parser()._action_groups if each.title == "resilin"]
    of_run = {each for action in ours._group_actions for each in action.option_strings}
    assert of_run - here == command.OF_RUN
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    arguments = ["train.py", "--nodes", "1:2", "--checkpoint-dir", "saved", "--dry-run"]
    assert command.main([*arguments, "--run=--warm --lease 5", "--", "--warm"]) == 0
    said = capsys.readouterr().out
    assert "--warm --lease 5 --nnodes 1:2" in said
    assert '"$endpoint" train.py --warm' in said


def test_a_script_that_is_missing_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--nodes", "1:2", "--checkpoint-dir", "saved"]
    assert command.main(["train.py", *arguments]) == 1
    assert "train.py: there is no such script" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["train.py", *arguments]) == 1
    assert "no sbatch on the path" in capsys.readouterr().err
