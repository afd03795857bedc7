import contextlib
import logging
import os
import resource
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from resilin.training.state.checkpoint import CheckpointError, Checkpoints, CorruptCheckpoint
from resilin.training.state.checkpoint.storage import LocalStorage
from resilin.training.state.snapshot import Snapshot, Version
from tests import forked
from tests.training.state.checkpoint.snapshots import assert_same, flip, raw, recommit, snapshot

MB = 1 << 20


def a_group(ranks=None, seconds=30):
    return dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=seconds))


def steps(checkpoints):
    return [commit.version.step for commit in checkpoints.commits()]


@contextlib.contextmanager
def no_file_larger_than(size):
    """What a full disk does: a write fails in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_snapshot_comes_back_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path / "deep" / "down")
    assert checkpoints.commits() == []
    assert checkpoints.newest() is None
    before = snapshot(step=1234, generation=3)
    commit = checkpoints.save(before)
    assert commit.version == before.version
    assert commit.name.startswith("step-000000001234-g3-")
    assert Path(commit.path) == tmp_path / "deep" / "down" / commit.name
    assert sorted(os.listdir(commit.path)) == [".metadata", "COMMIT.json", "__0_0.distcp"]
    assert checkpoints.commits() == [commit]
    assert_same(checkpoints.load(commit), before)
    assert_same(Checkpoints(str(tmp_path / "deep" / "down")).newest(), before)
    state, expected = checkpoints.newest().state("state"), before.state("state")
    assert state["numbers"] == expected["numbers"]
    assert torch.equal(state["transposed"], expected["transposed"])


def test_a_snapshot_without_tensors(tmp_path):
    empty = Snapshot(Version(0, 0), {"clock": {"steps": 0}}, {})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(empty)
    assert_same(checkpoints.newest(), empty)


@pytest.mark.world_size(3)
def test_it_is_saved_and_loaded_at_any_number_of_replicas(shared_path):
    everyone, pair, rank = a_group(), a_group([0, 1]), dist.get_rank()
    in_pair = rank < 2
    checkpoints = Checkpoints(shared_path)
    at_three = snapshot(step=1, size=MB)
    commit = checkpoints.save(at_three, everyone)
    # Each tensor once, and each replica its share.
    assert set(commit.files) == {".metadata", *(f"__{i}_0.distcp" for i in range(3))}
    total = sum(file.size for file in commit.files.values())
    assert total < at_three.num_bytes + 200_000
    if in_pair:
        assert_same(checkpoints.newest(pair), at_three)
    else:
        assert_same(checkpoints.newest(), at_three)
    assert_same(checkpoints.newest(everyone), at_three)
    dist.barrier()
    at_two = snapshot(step=2, seed=2)
    if in_pair:
        checkpoints.save(at_two, pair)
    dist.barrier()
    assert_same(checkpoints.newest(everyone), at_two)
    at_one = snapshot(step=3, seed=3)
    if not in_pair:
        checkpoints.save(at_one)
    dist.barrier()
    assert_same(checkpoints.newest(everyone), at_one)


@pytest.mark.world_size(2)
def test_storage_is_read_once_by_all_replicas_together(shared_path, monkeypatch):
    group = a_group()
    checkpoints = Checkpoints(shared_path)
    commit = checkpoints.save(snapshot(size=MB), group)
    opened = []
    reading = LocalStorage.open
    monkeypatch.setattr(
        LocalStorage, "open", lambda self, *args: opened.append(args[1]) or reading(self, *args)
    )
    checkpoints.load(commit, group)
    everyone = [None, None]
    dist.all_gather_object(everyone, opened)
    assert sorted(everyone[0] + everyone[1]) == sorted(commit.files)
    assert all("distcp" in "".join(each) for each in everyone)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it(tmp_path):
    before = snapshot()
    commit = Checkpoints(tmp_path / "run").save(before)
    target = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in before.tensors.items()}
    dcp.load(target, checkpoint_id=commit.path)
    assert {name: raw(t) for name, t in target.items()} == {
        name: raw(t) for name, t in before.tensors.items()
    }
    dcp_to_torch_save(commit.path, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(plain["state.transposed"], before.tensors["state.transposed"])


def test_tensors_may_change_while_a_save_is_in_flight(tmp_path, monkeypatch):
    go_on = threading.Event()
    preparing = LocalStorage.prepare
    monkeypatch.setattr(
        LocalStorage, "prepare", lambda self, name: go_on.wait(30) and preparing(self, name)
    )
    checkpoints = Checkpoints(tmp_path)
    first, second = snapshot(step=1), snapshot(step=1)
    assert not checkpoints.saving
    assert checkpoints.wait() is None
    checkpoints.begin_save(first)
    assert checkpoints.saving
    assert checkpoints.commits() == []
    for name, tensor in first.tensors.items():
        if name != "state.expanded":
            tensor.data.zero_()
    first.tree["state"]["numbers"][0] = 99
    go_on.set()
    commit = checkpoints.wait()
    assert not checkpoints.saving
    assert checkpoints.wait() is None
    assert_same(checkpoints.load(commit), second)


def test_one_save_is_in_flight_and_host_memory_is_used_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin_save(snapshot(step=1))
    buffers = {name: t.data_ptr() for name, t in checkpoints._stage._buffers.items()}
    checkpoints.begin_save(snapshot(step=2, seed=2))
    assert steps(checkpoints)[-1:] == [1]
    checkpoints.wait()
    assert {name: t.data_ptr() for name, t in checkpoints._stage._buffers.items()} == buffers
    assert_same(checkpoints.newest(), snapshot(step=2, seed=2))
    smaller = Snapshot(Version(0, 3), {}, {"state.scalar": torch.zeros(2)})
    checkpoints.save(smaller)
    assert list(checkpoints._stage._buffers) == [("state.scalar", None)]
    assert_same(checkpoints.newest(), smaller)


def test_a_process_that_ends_writes_a_local_checkpoint_to_its_end(tmp_path):
    code = (
        "import sys, torch\n"
        "from resilin.training.state.checkpoint import Checkpoints\n"
        "from resilin.training.state.snapshot import Snapshot, Version\n"
        "tensors = {'x': torch.ones(1 << 22)}\n"
        "Checkpoints(sys.argv[1]).begin_save(Snapshot(Version(0, 7), {}, tensors))\n"
    )
    forked.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert steps(Checkpoints(tmp_path)) == [7]


def test_a_killed_save_leaves_the_older_commit_and_is_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(step=1))
    code = (
        "import os, sys, torch\n"
        "from resilin.training.state.checkpoint import Checkpoints\n"
        "from resilin.training.state.checkpoint.storage import LocalStorage\n"
        "from resilin.training.state.snapshot import Snapshot, Version\n"
        "LocalStorage.publish = lambda *args: os._exit(9)\n"
        "Checkpoints(sys.argv[1]).save(Snapshot(Version(0, 2), {}, {'x': torch.ones(4)}))\n"
    )
    done = forked.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 9
    assert len(os.listdir(tmp_path)) == 2
    assert steps(checkpoints) == [1]
    assert_same(checkpoints.newest(), snapshot(step=1))
    (tmp_path / "notes").mkdir()
    checkpoints.save(snapshot(step=3))
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["notes", *(commit.name for commit in checkpoints.commits())]
    )


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks Linux which file it is")
def test_everything_is_on_disk_before_the_commit_appears(tmp_path, monkeypatch):
    done = []
    syncing, renaming = os.fsync, os.replace

    def fsync(descriptor):
        syncing(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def replace(source, target):
        renaming(source, target)
        done.append(f"{Path(source).name} -> {Path(target).name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    # Which would wait for all other programs on the machine.
    monkeypatch.delattr(os, "sync")
    name = Checkpoints(tmp_path).save(snapshot()).name
    assert done == [
        tmp_path.name,
        *("__0_0.distcp", name),
        *(".metadata", name),
        *("COMMIT.json.tmp", name),
        *("COMMIT.json.tmp -> COMMIT.json", name),
    ]


def test_a_removal_that_is_interrupted_leaves_no_commit(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    old = checkpoints.save(snapshot(step=1))
    unlinking = os.unlink

    def unlink(path, **kwargs):
        if not str(path).endswith("COMMIT.json"):
            raise OSError("interrupted")
        unlinking(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        checkpoints.save(snapshot(step=2))
    assert sorted(os.listdir(old.path)) == [".metadata", "__0_0.distcp"]
    assert steps(checkpoints) == [2]
    checkpoints.save(snapshot(step=3))
    assert not os.path.exists(old.path)


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_that_fails_after_the_script_has_ended_is_told(tmp_path, waits):
    # Told once: by the script, if it waits for the save.
    script = f"""
import logging, sys, threading, time
from resilin.training.state.checkpoint import Checkpoints, saver
from tests.training.state.checkpoint.snapshots import snapshot

logging.basicConfig(level=logging.INFO)

def fails(*args):
    while {not waits} and threading.main_thread().is_alive():
        time.sleep(0.01)
    raise OSError("the disk is full")

saver.save = fails
checkpoints = Checkpoints({str(tmp_path / "kept")!r})
checkpoints.begin_save(snapshot())
if {waits}:
    try:
        checkpoints.wait()
    except OSError:
        sys.exit(0)
"""
    ended = forked.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("the disk is full") == (not waits)


def test_a_full_disk_fails_the_save_and_not_the_next_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(step=1))
    with (
        no_file_larger_than(MB),
        pytest.raises(CheckpointError, match=rf"{tmp_path}/step-\d+2-g0-.* was not saved: .*OSErr"),
    ):
        checkpoints.save(snapshot(step=2, size=8 * MB))
    assert len(os.listdir(tmp_path)) == 1
    assert_same(checkpoints.newest(), snapshot(step=1))
    checkpoints.save(snapshot(step=3, size=8 * MB))
    assert_same(checkpoints.newest(), snapshot(step=3, size=8 * MB))


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with no_file_larger_than(MB):
        checkpoints.begin_save(snapshot(step=1, size=8 * MB))
        while checkpoints.saving:
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoints.begin_save(snapshot(step=2))
    checkpoints.save(snapshot(step=3))
    assert steps(checkpoints) == [3]


@pytest.mark.world_size(3)
def test_a_failure_on_one_replica_fails_all_of_them(shared_path):
    group, rank = a_group(), dist.get_rank()
    checkpoints = Checkpoints(shared_path)
    checkpoints.save(snapshot(step=1), group)
    large = snapshot(step=2, size=16 * MB)
    # The shares of replicas 0 and 1 are the large ones.
    limit = MB if rank == 1 else resource.RLIM_INFINITY
    with no_file_larger_than(limit), pytest.raises(CheckpointError) as error:
        checkpoints.save(large, group)
    assert "replica 1: OSError: [Errno 27] File too large" in str(error.value)
    assert str(shared_path) in str(error.value)
    dist.barrier()
    assert len([p for p in shared_path.iterdir() if p.name.startswith("step-")]) == 1
    assert steps(checkpoints) == [1]
    checkpoints.save(snapshot(step=3), group)
    assert_same(checkpoints.newest(group), snapshot(step=3))


@pytest.mark.world_size(2)
def test_a_replica_that_does_not_come_is_an_error_and_not_a_hang(shared_path):
    everyone, impatient = a_group(), a_group(seconds=2)
    checkpoints = Checkpoints(shared_path)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="replica 0 lost the other 1 of its group"):
            checkpoints.save(snapshot(step=1), impatient)
        assert not [p for p in shared_path.iterdir() if p.name.startswith("step-")]
    dist.barrier()
    checkpoints.save(snapshot(step=2), everyone)
    assert steps(checkpoints) == [2]


@pytest.mark.world_size(2)
def test_a_replica_that_is_lost_after_the_commit_leaves_it_whole(shared_path, monkeypatch):
    group, rank = a_group(seconds=3), dist.get_rank()
    checkpoints = Checkpoints(shared_path)
    if rank == 1:
        # It has written its share and does not hear the verdict.
        told = dist.broadcast
        calls = []

        def lost(*args, **kwargs):
            calls.append(args)
            # The name of the attempt took two: its length, and itself.
            if len(calls) > 2:
                raise RuntimeError("connection closed")
            return told(*args, **kwargs)

        monkeypatch.setattr(dist, "broadcast", lost)
        with pytest.raises(CheckpointError, match="connection closed"):
            checkpoints.save(snapshot(step=1), group)
    else:
        # Whether the first replica notices depends on how soon the other is gone.
        with contextlib.suppress(CheckpointError):
            checkpoints.save(snapshot(step=1), group)
        assert_same(checkpoints.newest(), snapshot(step=1))
    monkeypatch.undo()
    dist.barrier()


@pytest.mark.world_size(2)
def test_replicas_must_save_the_same_and_in_the_same_place(shared_path, tmp_path):
    group, rank = a_group(), dist.get_rank()
    checkpoints = Checkpoints(shared_path)
    with pytest.raises(CheckpointError, match=r"replica 1: it saves .*5.* replica 0 saves .*4"):
        checkpoints.save(snapshot(step=4 + rank), group)
    apart = Checkpoints(shared_path / f"disk of {rank}")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp was written.*FileNotFound.*shared"):
        apart.save(snapshot(step=4), group)
    dist.barrier()
    assert checkpoints.commits() == []


def test_the_newest_and_the_milestones_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=10)
    for step in (4, 9, 12, 15, 18, 21, 24, 40, 41, 42):
        checkpoints.save(Snapshot(Version(0, step), {}, {}))
    assert steps(checkpoints) == [42, 41, 40, 21, 12]
    # A later generation is newer, whatever its step.
    checkpoints.save(Snapshot(Version(1, 39), {}, {}))
    assert steps(checkpoints) == [39, 42, 40, 21, 12]
    assert checkpoints.newest().version == Version(1, 39)
    assert len(os.listdir(tmp_path)) == 5


def test_what_was_just_saved_is_never_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Snapshot(Version(5, 100), {}, {}))
    checkpoints.save(Snapshot(Version(0, 1), {}, {}))
    assert steps(checkpoints) == [100, 1]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, caplog, monkeypatch):
    def refuse(self, attempt, first):
        raise PermissionError("not yours")

    checkpoints = Checkpoints(tmp_path, keep=1)
    old = checkpoints.save(Snapshot(Version(0, 1), {}, {}))
    monkeypatch.setattr(LocalStorage, "remove", refuse)
    checkpoints.save(Snapshot(Version(0, 2), {}, {}))
    assert f"{old.path} was not removed: not yours" in caplog.text
    assert steps(checkpoints) == [2, 1]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path):
    path.unlink()


def flip_first(path):
    flip(path, 0)


def flip_middle(path):
    flip(path, path.stat().st_size // 2, bit=3)


def flip_last(path):
    flip(path, -1, bit=7)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "COMMIT.json"])
@pytest.mark.parametrize(
    "harm", [truncate, halve, lengthen, flip_first, flip_middle, flip_last, remove]
)
def test_what_is_not_whole_is_skipped_with_a_warning(tmp_path, caplog, file, harm):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(step=1))
    newer = checkpoints.save(snapshot(step=2))
    path = Path(newer.path, file)
    harm(path)
    if file != "COMMIT.json":
        with pytest.raises(CorruptCheckpoint, match="expected, found"):
            checkpoints.load(newer)
    assert_same(checkpoints.newest(), snapshot(step=1))
    if (file, harm) != ("COMMIT.json", remove):
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert record.name == "resilin.checkpoint"
        assert str(path) in record.getMessage()
        assert "expected, found" in record.getMessage()


def test_no_whole_checkpoint_at_all_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    flip_middle(Path(checkpoints.save(snapshot(step=1)).path, "__0_0.distcp"))
    flip_middle(Path(checkpoints.save(snapshot(step=2)).path, "COMMIT.json"))
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint is whole: .*COMMIT.*distcp"):
        checkpoints.newest()


@pytest.mark.world_size(3)
def test_all_replicas_agree_on_the_verdict(shared_path):
    group = a_group()
    checkpoints = Checkpoints(shared_path)
    checkpoints.save(snapshot(step=1), group)
    newer = checkpoints.save(snapshot(step=2, size=MB), group)
    # Only the replica that reads this file can find it.
    if dist.get_rank() == 0:
        flip_middle(Path(newer.path, "__2_0.distcp"))
    dist.barrier()
    with pytest.raises(CorruptCheckpoint, match=r"__2_0\.distcp: crc32 \w+ expected, found"):
        checkpoints.load(newer, group)
    assert_same(checkpoints.newest(group), snapshot(step=1))


@pytest.mark.world_size(2)
def test_replicas_must_load_the_same(shared_path):
    group = a_group()
    checkpoints = Checkpoints(shared_path)
    commits = [checkpoints.save(snapshot(step), group) for step in (1, 2)]
    with pytest.raises(CheckpointError, match=r"replicas load different checkpoints: .*1-g0.*2-g0"):
        checkpoints.load(commits[dist.get_rank()], group)


@pytest.mark.world_size(2)
def test_a_format_that_is_too_new_is_refused_on_all_replicas(shared_path):
    group = a_group()
    checkpoints = Checkpoints(shared_path)
    checkpoints.save(snapshot(step=1), group)
    newer = checkpoints.save(snapshot(step=2), group)
    dist.barrier()
    if dist.get_rank() == 0:
        recommit(Path(newer.path), format=3)
    dist.barrier()
    for refused in (lambda: checkpoints.newest(group), checkpoints.commits):
        with pytest.raises(ValueError, match=r"has format 3, .* reads formats up to 2"):
            refused()
    # It is not ours to remove, either.
    Checkpoints(shared_path, keep=1).save(snapshot(step=3), group)
    dist.barrier()
    assert Path(newer.path, "COMMIT.json").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Checkpoints(path, keep=0), r"keep \(0\) must be at least 1"),
        (lambda path: Checkpoints(path, keep_every=0), r"keep_every \(0\) must be at least 1"),
        (lambda path: Checkpoints("nowhere://x"), "nowhere"),
        (
            lambda path: Checkpoints(path).save(
                Snapshot(Version(0, 0), {}, {"s": torch.eye(2).to_sparse()})
            ),
            "s has the layout torch.sparse_coo; only torch.strided can be saved",
        ),
        (
            lambda path: Checkpoints(path).save(Snapshot(Version(0, 0), {"x": float("nan")}, {})),
            "not JSON compliant",
        ),
    ],
)
def test_what_cannot_be_honoured_says_why(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
    assert os.listdir(tmp_path) == []
