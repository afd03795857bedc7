import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilin.cluster.backends import runner
from resilin.cluster.backends.base import BackendError, Part, PartState
from resilin.cluster.backends.local import VISIBLE, LocalBackend, _own_gpus, backend
from resilin.cluster.node import Node

pytestmark = pytest.mark.processes

LIMIT = 200.0
NODES = (Node(name="a", accelerators=2, kind="cpu"), Node(name="b", accelerators=1, kind="cpu"))


@pytest.fixture
def local(tmp_path):
    made = LocalBackend(tmp_path, "one", NODES)
    yield made
    for each in made.list():
        made.stop(each.name, 0)
    wait(lambda: all(each.state is PartState.ENDED for each in made.list()))


def wait(until):
    deadline = time.monotonic() + LIMIT
    while not until():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def part(name, *command, node="a", accelerators=1, **settings):
    return Part(
        name=name, job="j", node=node, accelerators=accelerators, command=command, **settings
    )


def script(name, text, **settings):
    return part(name, sys.executable, "-c", text, **settings)


def only(local):
    (status,) = local.list()
    return status


def ended(local, name):
    return any(each.name == name and each.state is PartState.ENDED for each in local.list())


def test_a_part_runs_in_its_directory_and_its_end_is_known(local, tmp_path):
    (tmp_path / "here").mkdir()
    log = tmp_path / "log"
    text = "import os, sys; print(os.getcwd(), os.environ['X']); sys.exit(3)"
    its = {"X": "y"}
    local.start(
        script("j-g1-1", text, directory=str(tmp_path / "here"), environment=its, log=str(log))
    )
    wait(lambda: ended(local, "j-g1-1"))
    assert only(local).code == 3
    assert only(local).node == "a"
    assert log.read_text() == f"{tmp_path / 'here'} y\n"


def test_a_command_that_cannot_be_run_has_ended_with_the_reason(local):
    local.start(part("j-g1-1", "/no/such/program"))
    assert only(local).code == 127
    assert "No such file" in only(local).reason


def test_a_start_that_is_repeated_finds_the_first_one(local, tmp_path):
    text = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); import time; time.sleep(600)"
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: local.start(script("j-g1-1", text)), range(6)))
    other = LocalBackend(tmp_path, "one", NODES)  # another controller, after a crash
    other.start(script("j-g1-1", text))
    wait((tmp_path / "runs").exists)
    assert only(other).state is PartState.RUNNING
    local.stop("j-g1-1", 0)
    wait(lambda: ended(local, "j-g1-1"))
    local.start(script("j-g1-1", text))  # one that has existed is left alone, too
    assert only(local).state is PartState.ENDED
    assert (tmp_path / "runs").read_text() == "x"


SAVES = """
import pathlib, signal, sys, time
def save(*_):
    open({saved!r}, "a").write("saved")
    sys.exit(7)
signal.signal(signal.SIGUSR1, save)
open({ready!r}, "w").close()
time.sleep(600)
"""


def test_a_part_that_is_asked_saves_once_and_leaves(local, tmp_path):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    local.start(script("j-g1-1", SAVES.format(saved=str(saved), ready=str(ready))))
    wait(ready.exists)
    for _ in range(3):
        local.stop("j-g1-1", LIMIT)
    wait(lambda: ended(local, "j-g1-1"))
    assert only(local).code == 7
    assert saved.read_text() == "saved"
    local.stop("j-g1-1", 0)
    local.stop("never-g1-1", 0)


@pytest.mark.nightly(part="clusters")
def test_a_part_that_does_not_leave_is_ended_after_the_grace_that_was_shortened(local, tmp_path):
    ready = tmp_path / "ready"
    text = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    local.start(script("j-g1-1", text + f"open({str(ready)!r}, 'w').close(); time.sleep(600)"))
    wait(ready.exists)
    local.stop("j-g1-1", 10_000.0)
    time.sleep(3 * runner.TICK)
    assert only(local).state is PartState.RUNNING
    local.stop("j-g1-1", 0.1)
    wait(lambda: ended(local, "j-g1-1"))
    assert only(local).code == 128 + signal.SIGKILL


def test_a_part_has_ended_when_all_of_its_processes_have(local, tmp_path):
    # As torchrun does: workers have a session of their own.
    child = tmp_path / "child"
    text = (
        "import subprocess, sys, pathlib\n"
        "it = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(it.pid))\n"
    )
    local.start(script("j-g1-1", text))
    wait(child.exists)
    time.sleep(0.5)
    assert only(local).state is PartState.RUNNING  # its first process is gone
    local.stop("j-g1-1", 0)
    wait(lambda: ended(local, "j-g1-1"))
    assert only(local).code == 0
    assert not runner.process_start(int(child.read_text()))


def test_a_part_whose_runner_was_killed_is_still_listed_and_stopped(local, tmp_path):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    local.start(script("j-g1-1", SAVES.format(saved=str(saved), ready=str(ready))))
    wait(ready.exists)
    status = runner.read(tmp_path / "one" / "j-g1-1.status")
    os.kill(status["runner"], signal.SIGKILL)
    wait(lambda: not runner.process_start(status["runner"]))
    assert only(local).state is PartState.RUNNING
    local.start(script("j-g1-1", "open('again', 'w')"))
    local.stop("j-g1-1", LIMIT)
    wait(lambda: ended(local, "j-g1-1"))
    assert saved.read_text() == "saved"
    assert only(local).code is None  # nobody was there to know


def test_a_node_that_is_lost_takes_all_its_processes_with_it(local, tmp_path):
    pids = tmp_path / "pids"
    text = (
        "import os, subprocess, sys, time\n"
        "it = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{it.pid}}')\n"
        "time.sleep(600)\n"
    )
    local.start(script("j-g1-1", text))
    local.start(script("j-g1-2", "import time; time.sleep(600)", node="b"))
    wait(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    local.kill_node("a")
    wait(lambda: ended(local, "j-g1-1"))
    assert {each.name: each.state for each in local.list()}["j-g1-2"] is PartState.RUNNING
    lost = next(each for each in local.list() if each.name == "j-g1-1")
    assert lost.code is None
    wait(lambda: not any(runner.process_start(int(pid)) for pid in pids.read_text().split()))
    assert [node.name for node in local.nodes()] == ["b"]
    with pytest.raises(BackendError, match="node a is down"):
        local.start(part("j-g1-3", "true"))
    local.revive_node("a")
    assert [node.name for node in local.nodes()] == ["a", "b"]


def test_clusters_do_not_see_each_others_parts_but_their_accelerators(local, tmp_path):
    local.start(script("j-g1-1", "import time; time.sleep(600)"))
    other = LocalBackend(tmp_path, "two", NODES)
    assert other.list() == ()
    other.stop("j-g1-1", 0)
    assert [node.accelerators for node in other.nodes()] == [1, 1]
    assert [node.accelerators for node in local.nodes()] == [2, 1]
    assert only(local).state is PartState.RUNNING


@pytest.mark.parametrize(
    ("told", "expected"),
    [(None, ("0", "1", "10")), ("3, GPU-8a", ("3", "GPU-8a")), ("1,-1,0", ("1",)), ("", ())],
)
def test_only_the_gpus_that_the_controller_may_use_are_handed_out(
    told, expected, tmp_path, monkeypatch
):
    for name in ("nvidia10", "nvidia1", "nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv(VISIBLE, raising=False)
    if told is not None:
        monkeypatch.setenv(VISIBLE, told)
    assert _own_gpus(tmp_path) == expected


def test_each_part_gets_gpus_of_its_own(tmp_path):
    real = LocalBackend(tmp_path, "one", NODES, gpus=("3", "5"))
    log = [tmp_path / f"log-{number}" for number in range(2)]
    text = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
    try:
        for number in range(2):
            real.start(script(f"j-g1-{number}", text, log=str(log[number])))
        wait(lambda: all(each.exists() and each.read_text() for each in log))
        assert [each.read_text().strip() for each in log] == ["3", "5"]
        with pytest.raises(BackendError, match="needs 1 GPUs of a: 0 are free"):
            real.start(script("j-g1-2", text))
    finally:
        for each in real.list():
            real.stop(each.name, 0)
        wait(lambda: all(each.state is PartState.ENDED for each in real.list()))


@pytest.mark.nightly(part="clusters")
def test_a_part_outlives_the_process_that_started_it(local, tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from resilin.cluster.backends.base import Part\n"
        "from resilin.cluster.backends.local import LocalBackend\n"
        f"b = LocalBackend(Path({str(tmp_path)!r}), 'one', ())\n"
        "b.start(Part(name='j-g1-1', job='j', node='a', accelerators=1, "
        "command=['sleep', '600']))\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=LIMIT, start_new_session=True)
    assert done.returncode == -signal.SIGKILL
    assert only(local).state is PartState.RUNNING


def test_options():
    with pytest.raises(ValueError, match="'gpus' must be one of directory, nodes, kind"):
        backend("c", {"gpus": "2"})
    with pytest.raises(ValueError, match=r"nodes \('a:2'\) must be NAME=ACCELERATORS"):
        backend("c", {"nodes": "a:2"})


def test_names_cannot_leave_the_directory(local, tmp_path):
    for name in ("../x", "/etc/x", "", ".hidden"):
        with pytest.raises(BackendError, match="must be named by letters"):
            local.start(part(name, "true"))
        with pytest.raises(BackendError, match="must be named by letters"):
            local.stop(name, 0)
    with pytest.raises(ValueError, match="cluster"):
        LocalBackend(tmp_path, "../x", NODES)
    assert Path(tmp_path.parent / "x").exists() is False


def test_files_that_cannot_be_written_are_an_error_of_the_backend(tmp_path):
    broken = LocalBackend(tmp_path / "x", "one", NODES)
    for path in sorted((tmp_path / "x").rglob("*"), reverse=True):
        path.rmdir()
    (tmp_path / "x").rmdir()
    with pytest.raises(BackendError, match=r"the files of local parts: .*No such file"):
        broken.start(part("j-g1-1", "true"))
    with pytest.raises(BackendError, match="the files of local parts"):
        broken.nodes()
