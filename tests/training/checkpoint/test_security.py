"""A checkpoint from a stranger, whose checksums are all right."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch

from resilin.training.checkpoint import Checkpoints, CorruptCheckpoint
from resilin.training.snapshot import Snapshot, Version
from tests.training.checkpoint.snapshots import assert_same, recommit

TENSOR = torch.arange(1000.0)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "run")


def saved(checkpoints, step=1):
    return checkpoints.save(Snapshot(Version(0, step), {"clock": {}}, {"x": TENSOR}))


def test_the_payload_would_be_noticed(marker):
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


def test_a_metadata_file_executes_nothing(checkpoints, marker):
    commit = saved(checkpoints)
    payload = pickle.dumps(Payload(marker))
    Path(commit.path, ".metadata").write_bytes(payload)
    recommit(Path(commit.path))
    # It is checked, and not opened: what it says is for other readers.
    assert_same(checkpoints.newest(), Snapshot(commit.version, {"clock": {}}, {"x": TENSOR}))
    assert not marker.exists()


def archive(thing):
    data = io.BytesIO()
    torch.save(thing, data)
    return data.getvalue()


def old_archive(thing):
    data = io.BytesIO()
    torch.save(thing, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


@pytest.mark.parametrize("form", [archive, old_archive, pickle.dumps])
@pytest.mark.parametrize("hidden", [lambda p: p, lambda p: [TENSOR, p], lambda p: {"x": p}])
def test_a_tensor_file_executes_nothing(checkpoints, marker, form, hidden):
    commit = saved(checkpoints)
    # As long as the tensor says it is.
    data = form(hidden(Payload(marker))) + bytes(8000)
    Path(commit.path, "__0_0.distcp").write_bytes(data)

    def moved(tensors):
        tensors["x"].update(offset=0, length=len(data))
        return tensors

    recommit(Path(commit.path), tensors=moved)
    (forged,) = checkpoints.commits()
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: cannot be read: x: "):
        checkpoints.load(forged)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (b"bytes", "a tensor expected, found a bytes"),
        ({"x": TENSOR}, "a tensor expected, found a dict"),
        (torch.eye(100).to_sparse(), "torch.strided on cpu expected, found torch.sparse_coo"),
        (TENSOR.double(), r"torch.float32 of \(1000,\) expected, found torch.float64"),
        (TENSOR[:7].clone(), r"\(1000,\) expected, found torch.float32 of \(7,\)"),
        (
            torch.empty(1000, device="meta"),
            "torch.strided on cpu expected, found torch.strided on meta",
        ),
    ],
)
def test_anything_but_the_tensor_is_refused(checkpoints, thing, message):
    commit = saved(checkpoints)
    data = archive(thing)
    Path(commit.path, "__0_0.distcp").write_bytes(data + bytes(8000))

    def moved(tensors):
        tensors["x"].update(offset=0, length=max(len(data), 4000))
        return tensors

    recommit(Path(commit.path), tensors=moved)
    (forged,) = checkpoints.commits()
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoints.load(forged)


@pytest.mark.parametrize(
    "name",
    ["../outside", "{}", "sub/file", "..", ".", "", "COMMIT.json", "__0_0.distcp\n", "a\\b", "\0"],
)
def test_a_commit_reaches_nothing_outside_its_directory(checkpoints, tmp_path, name):
    outside = tmp_path / "run" / "outside"
    older, newer = saved(checkpoints, step=1), saved(checkpoints, step=2)
    outside.write_bytes(Path(newer.path, "__0_0.distcp").read_bytes())
    name = name.format(outside)

    def renamed(files):
        return {name: files["__0_0.distcp"], ".metadata": files[".metadata"]}

    def moved(tensors):
        tensors["x"]["file"] = name
        return tensors

    recommit(Path(newer.path), files=renamed, tensors=moved)
    assert [commit.name for commit in checkpoints.commits()] == [older.name]
    assert checkpoints.newest().version == older.version
    # Nor is it what removing an old checkpoint removes.
    saved(Checkpoints(tmp_path / "run", keep=1), step=3)
    assert outside.exists()


def test_a_link_to_another_directory_is_no_checkpoint(checkpoints, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_text("the only copy")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000000000009-g0-00000000").symlink_to(elsewhere)
    commit = saved(checkpoints)
    assert checkpoints.commits() == [commit]
    assert (elsewhere / "thesis").exists()
