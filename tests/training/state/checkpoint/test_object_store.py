"""The same on object stores: in memory, and on an S3 server of its own."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from resilin.training.state.checkpoint import CheckpointError, Checkpoints, CorruptCheckpoint
from resilin.training.state.snapshot import Snapshot, Version
from tests.training.state.checkpoint.snapshots import assert_same, snapshot

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
except ImportError:  # torch 2.13
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

BUCKET = "resilin-test"


@pytest.fixture(scope="module")
def s3_server():
    """The address of an S3 server in a process of its own."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        for line in server.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(f"moto.server ended with {server.wait(10)}")
        yield found[0]
    finally:
        server.kill()
        server.communicate(timeout=30)


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The URL of a new bucket."""
    import s3fs

    join_server(s3_server, monkeypatch.setenv)
    fs = s3fs.S3FileSystem()
    fs.mkdir(BUCKET)
    yield f"s3://{BUCKET}"
    fs.invalidate_cache()
    fs.rm(BUCKET, recursive=True)


def join_server(address, setenv):
    import s3fs

    setenv("AWS_ENDPOINT_URL", address)
    setenv("AWS_ACCESS_KEY_ID", "nobody")
    setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield "memory:///bucket"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "s3"])
def url(request):
    return request.getfixturevalue(request.param) + "/runs/run[1]"


def names(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(path.removeprefix(root).strip("/") for path in fs.find(root))


def test_a_snapshot_comes_back_and_old_ones_go(url):
    checkpoints = Checkpoints(url, keep=2)
    assert checkpoints.newest() is None
    for step in range(1, 5):
        commit = checkpoints.save(snapshot(step, seed=step))
    assert commit.path.startswith(url)
    assert [each.version.step for each in checkpoints.commits()] == [4, 3]
    assert names(url) == sorted(
        f"{each.name}/{file}"
        for each in checkpoints.commits()
        for file in (".metadata", "COMMIT.json", "__0_0.distcp")
    )
    assert_same(Checkpoints(url).newest(), snapshot(4, seed=4))


def test_what_is_not_whole_is_skipped(url, caplog):
    checkpoints = Checkpoints(url)
    checkpoints.save(snapshot(1))
    newer = checkpoints.save(snapshot(2))
    fs, root = fsspec.core.url_to_fs(newer.path)
    data = bytearray(fs.cat_file(f"{root}/__0_0.distcp"))
    data[len(data) // 2] ^= 1
    fs.pipe_file(f"{root}/__0_0.distcp", bytes(data))
    assert_same(checkpoints.newest(), snapshot(1))
    assert f"{newer.path}/__0_0.distcp: crc32" in caplog.text
    fs.rm_file(f"{root}/__0_0.distcp")
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: .* expected, found FileNotFound"):
        checkpoints.load(newer)
    # Not committed any more: left for the next save to clear away.
    fs.rm_file(f"{root}/COMMIT.json")
    assert [each.version.step for each in checkpoints.commits()] == [1]
    checkpoints.save(snapshot(3))
    assert not [name for name in names(url) if name.startswith(newer.name)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_loads_it(url):
    commit = Checkpoints(url).save(Snapshot(Version(0, 1), {}, {"x": torch.arange(5)}))
    target = {"x": torch.zeros(5, dtype=torch.int64)}
    dcp.load(target, storage_reader=FsspecReader(commit.path))
    assert target["x"].tolist() == [0, 1, 2, 3, 4]


def test_what_another_machine_saves_is_seen(s3):
    import s3fs

    here = Checkpoints(s3, keep=1)
    here.save(snapshot(1))
    assert [each.version.step for each in here.commits()] == [1]
    # Listings are cached by instance, and another machine has one of its own.
    s3fs.S3FileSystem.clear_instance_cache()
    there = Checkpoints(s3, keep=1)
    there.save(snapshot(2))
    assert [each.version.step for each in here.commits()] == [2]
    assert_same(here.newest(), snapshot(2))


def test_an_upload_in_parts(s3):
    # Above the 50 MB in which s3fs uploads.
    large = Snapshot(Version(0, 1), {}, {"x": torch.arange(16_000_000, dtype=torch.int32)})
    Checkpoints(s3).save(large)
    assert_same(Checkpoints(s3).newest(), large)


def test_a_bucket_that_does_not_exist(s3):
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/step-.* was not saved: .*"):
        Checkpoints("s3://no-such-bucket").save(snapshot())
    Checkpoints(s3).save(snapshot())


@pytest.mark.world_size(2)
def test_replicas_write_to_one_bucket(request):
    address = [request.getfixturevalue("s3_server") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(address)
    join_server(address[0], os.environ.__setitem__)
    if dist.get_rank() == 0:
        fsspec.filesystem("s3").mkdir(BUCKET)
    dist.barrier()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    checkpoints = Checkpoints(f"s3://{BUCKET}/run")
    commit = checkpoints.save(snapshot(1, size=1 << 20), group)
    assert set(commit.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert_same(checkpoints.newest(group), snapshot(1, size=1 << 20))
    dist.barrier()
