"""A checkpoint from a stranger, whose checksums are all right."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from resilin.training.state.checkpoint import Checkpoints, CorruptCheckpoint
from resilin.training.state.snapshot import Snapshot, Version
from tests.training.state.checkpoint.snapshots import assert_same, recommit

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


def forge(checkpoints, data):
    """A checkpoint whose only tensor is in these bytes, with sums that fit."""
    commit = saved(checkpoints)
    Path(commit.path, "__0_0.distcp").write_bytes(data)

    def moved(tensors):
        tensors["x"]["pieces"][0].update(offset=0, length=len(data))
        return tensors

    recommit(Path(commit.path), tensors=moved)
    (forged,) = checkpoints.commits()
    return forged


@pytest.mark.parametrize("form", [archive, old_archive, pickle.dumps])
@pytest.mark.parametrize("hidden", [lambda p: p, lambda p: [TENSOR, p], lambda p: {"x": p}])
def test_a_tensor_file_executes_nothing(checkpoints, marker, form, hidden):
    # As long as the tensor says it is.
    forged = forge(checkpoints, form(hidden(Payload(marker))) + bytes(8000))
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: cannot be read: x: "):
        checkpoints.load(forged)
    assert not marker.exists()


def padded(data):
    """As long as the tensor says it is, with a record that nobody reads."""
    stream = io.BytesIO(data)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/pad", bytes(4000))
    return stream.getvalue()


def test_what_hides_beside_the_tensor_is_not_executed(checkpoints, marker):
    # Its archive is as it should be, so that only the reading of the pickle is left to refuse it.
    forged = forge(checkpoints, padded(archive([TENSOR, Payload(marker)])))
    with pytest.raises(CorruptCheckpoint, match="cannot be read: x: UnpicklingError"):
        checkpoints.load(forged)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (b"bytes", "one tensor of 4000 bytes expected, found none"),
        ({"x": TENSOR}, "a tensor expected, found a dict"),
        (torch.nn.Parameter(TENSOR), "a tensor expected, found a Parameter"),
        (torch.eye(100).to_sparse(), r"one tensor of 4000 bytes expected, found \[1600\]"),
        (TENSOR.double(), r"one tensor of 4000 bytes expected, found \[8000\]"),
        (TENSOR.int(), r"torch.float32 of \(1000,\) expected, found torch.int32"),
        (TENSOR.view(10, 100), r"\(1000,\) expected, found torch.float32 of \(10, 100\)"),
        (TENSOR[:7].clone(), r"one tensor of 4000 bytes expected, found \[28\]"),
        (TENSOR[:7], r"\(1000,\) expected, found torch.float32 of \(7,\)"),
        (torch.empty(1000, device="meta"), "one tensor of 4000 bytes expected, found none"),
    ],
)
def test_anything_but_the_tensor_is_refused(checkpoints, thing, message):
    with pytest.raises(CorruptCheckpoint, match=message):
        checkpoints.load(forge(checkpoints, padded(archive(thing))))


def test_a_tensor_that_is_compressed_is_refused_before_it_takes_memory(checkpoints):
    # One that takes no more than announced is refused too: torch saves none.
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive(TENSOR))) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.infolist():
            content = old.read(record)
            if record.filename.endswith("data/0"):
                content = bytes(4_000_000)
            if record.filename.endswith("data.pkl"):
                many = b"J" + (1_000_000).to_bytes(4, "little")
                content = content.replace(b"M\xe8\x03", many)
            new.writestr(record.filename, content)
    # As is, torch would take it.
    data = packed.getvalue()
    assert torch.load(io.BytesIO(data), weights_only=True).shape == (1_000_000,)
    forged = forge(checkpoints, data)
    with pytest.raises(CorruptCheckpoint, match=r"x: ValueError: stored records expected"):
        checkpoints.load(forged)


def test_a_storage_larger_than_its_bytes_is_refused(checkpoints):
    # torch 2.6 would hand out the memory next to it: it believes what the pickle says.
    data = archive(TENSOR)
    number = b"M\xe8\x03"  # 1000, of the storage, and later of the shape
    forged = forge(checkpoints, data.replace(number, b"M\xe9\x03", 1))
    with pytest.raises(CorruptCheckpoint, match=r"4000 bytes.* 4004\b"):
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
        tensors["x"]["pieces"][0]["file"] = name
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
