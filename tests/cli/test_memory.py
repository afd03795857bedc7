import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resilin.cli.memory import MemoryDirectory, abandoned
from resilin.engine import environment
from resilin.engine.environment import memory_parent


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Another place for /dev/shm."""
    monkeypatch.setattr(environment, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_it_is_for_this_user_alone_and_goes_with_the_job(shared_memory):
    parent = memory_parent()
    assert parent == shared_memory / f"resilin-{os.getuid()}"
    one, other = MemoryDirectory(parent, "one"), MemoryDirectory(parent, "other")
    assert one.path == parent / "one"
    for path in (parent, one.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (one.path / "state").write_bytes(b"x")
    assert one.release(remove=True)
    assert other.path.is_dir()
    assert other.release(remove=True)
    assert list(shared_memory.iterdir()) == []


def test_a_parent_that_the_user_chose_is_left_alone(tmp_path):
    assert MemoryDirectory(tmp_path / "mine", "job").release(remove=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_a_link_that_somebody_put_in_our_place_is_refused(tmp_path, shared_memory):
    (tmp_path / "elsewhere").mkdir()
    memory_parent().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a directory of user"):
        MemoryDirectory(memory_parent(), "job")


def test_the_last_agent_of_a_job_removes_it(tmp_path):
    first, second = MemoryDirectory(tmp_path, "job"), MemoryDirectory(tmp_path, "job")
    assert not first.release(remove=True)
    assert second.path.is_dir()
    assert second.release(remove=True)
    assert not second.path.exists()


def test_what_is_kept_is_found_again_under_the_same_id(tmp_path):
    directory = MemoryDirectory(tmp_path, "job")
    (directory.path / "state").write_bytes(b"x")
    assert not directory.release(remove=False)
    again = MemoryDirectory(tmp_path, "job")
    assert (again.path / "state").read_bytes() == b"x"
    again.release(remove=True)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "a b", "/"])
def test_an_id_that_leads_elsewhere_is_refused(tmp_path, run_id):
    with pytest.raises(ValueError, match="run id"):
        MemoryDirectory(tmp_path, run_id)


def test_a_directory_is_abandoned_when_agent_and_workers_are_gone(tmp_path):
    assert abandoned(tmp_path / "nowhere") == []
    held = MemoryDirectory(tmp_path, "held")
    (tmp_path / "dead").mkdir()
    used = tmp_path / "used"
    used.mkdir()
    env = {**os.environ, environment.MEMORY_DIR: str(used)}
    worker = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        worker.stdout.readline()
        expected = ["dead"] if Path("/proc/self/environ").exists() else ["dead", "used"]
        assert [path.name for path in abandoned(tmp_path)] == expected
    finally:
        worker.kill()
        worker.communicate(timeout=10)
    held.release(remove=False)
    assert [path.name for path in abandoned(tmp_path)] == ["dead", "held", "used"]


OTHER_AGENT = """
import sys
from pathlib import Path
from resilin.cli.memory import MemoryDirectory
held = MemoryDirectory(Path(sys.argv[1]), "job", sys.argv[2])
print(flush=True)
input()
"""


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("localhost:0", "localhost:0", False),
        ("node0:29400", "localhost:0", False),
        ("node0:29400", "node0:29401", False),
        # Agents of one job on one machine; they may call the place by different names.
        ("node0:29400", "localhost:29400", True),
        # Live jobs: the port is that of every etcd.
        ("etcd://node0:2379", "etcd://node1:2379", False),
        ("etcd://node0:2379", "node0:2379", False),
        ("etcd://node0:2379", "etcd://node0:2379", True),
    ],
)
def test_two_jobs_of_one_id_do_not_share_it(tmp_path, first, second, same):
    command = [sys.executable, "-c", OTHER_AGENT, str(tmp_path), first]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"\n"
        try:
            if same:
                assert MemoryDirectory(tmp_path, "job", second).release(remove=False) is False
            else:
                places = [p.replace("localhost:0", "a private rendezvous") for p in (first, second)]
                message = (
                    rf"job job is already running .*process {other.pid}.*{places[0]}.*{places[1]}"
                )
                with pytest.raises(ValueError, match=message):
                    MemoryDirectory(tmp_path, "job", second)
        finally:
            other.kill()
    # However it ended: who comes next takes over what it left.
    after = MemoryDirectory(tmp_path, "job", second)
    assert not after.holds_state
    assert [path.name for path in after.path.iterdir()] == [f"agent-{os.getpid()}"]
    assert after.release(remove=True)
