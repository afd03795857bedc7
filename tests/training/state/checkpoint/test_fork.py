"""Copies of a checkpoint that begin further on in the data."""

import json
import zlib
from dataclasses import replace

import pytest
import torch

from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.checkpoint.commit import COMMIT_FILE, encode
from resilin.training.state.checkpoint.fork import Fork
from tests.training.state.checkpoint.snapshots import FORMAT_1, LOADER, as_saved_today


@pytest.fixture
def kept(tmp_path):
    return as_saved_today(tmp_path / "kept")


def with_cursor(fork, **changes):
    tree = {**fork.commit.tree, LOADER: {**fork.commit.tree[LOADER], **changes}}
    return replace(fork, commit=replace(fork.commit, tree=tree))


def test_what_a_checkpoint_says_of_itself(kept):
    fork = Fork.find(kept)
    assert (fork.step, fork.samples, fork.num_replicas, fork.seed) == (10, 74, 2, 0)
    # It is of a resilin that did not say its batch.
    assert fork.reference is None
    job = {**fork.commit.tree["job"], "reference": 8}
    newer = replace(fork.commit, tree={**fork.commit.tree, "job": job})
    assert replace(fork, commit=newer).reference == 8


def test_a_copy_is_the_same_but_for_its_place_in_the_data(kept, tmp_path):
    fork = Fork.find(kept)
    fork.copy_to(tmp_path / "same")
    fork.copy_to(tmp_path / "later", skip=64)
    original = Checkpoints(kept).newest()
    del original.tree[LOADER]["cursor"]
    for name, cursor in (("same", 74), ("later", 138)):
        copied = Checkpoints(tmp_path / name).newest()
        assert copied.version == original.version
        assert copied.tree[LOADER].pop("cursor") == cursor
        assert copied.tree == original.tree
        assert copied.tensors.keys() == original.tensors.keys()
        for key, tensor in copied.tensors.items():
            assert torch.equal(tensor, original.tensors[key])


def test_the_original_is_not_written(kept, tmp_path):
    files = {path: path.stat() for path in kept.rglob("*")}
    Fork.find(kept).copy_to(tmp_path / "copy", skip=8)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*")} == {
        path: stat.st_mtime_ns for path, stat in files.items()
    }


def test_the_newest_is_taken_or_the_one_that_is_named(kept):
    (old,) = kept.glob("step-*")
    fork = Fork.find(kept)
    name = "step-000000000020-g0-00000000"
    later = replace(fork.commit, version=replace(fork.commit.version, step=20))
    (kept / name).mkdir()
    (kept / name / COMMIT_FILE).write_bytes(encode(later))
    assert Fork.find(kept).step == 20
    assert Fork.find(old).step == 10
    assert Fork.find(f"{old}/").step == 10
    assert Fork.find(kept / name).step == 20


def test_one_that_is_named_is_found_from_within_its_directory(kept, monkeypatch):
    (old,) = kept.glob("step-*")
    monkeypatch.chdir(kept)
    assert Fork.find(old.name).step == 10
    assert Fork.find(".").step == 10


def test_what_is_no_checkpoint_is_refused(kept, tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint of resilin in"):
        Fork.find(tmp_path / "nothing")
    (old,) = kept.glob("step-*")
    with pytest.raises(ValueError, match="there is no checkpoint of resilin in"):
        Fork.find(kept / "step-000000000011-g0-00000000")
    (old / COMMIT_FILE).write_bytes(b"{}")
    with pytest.raises(ValueError, match="a checksum and a commit expected"):
        Fork.find(kept)


def test_one_of_a_newer_resilin_is_refused(kept):
    fork = Fork.find(kept)
    name = "step-000000000020-g0-00000000"
    body = json.loads(encode(fork.commit))["commit"]
    text = json.dumps({**body, "format": 99}).encode()
    (kept / name).mkdir()
    envelope = b'{"crc32": "%08x", "commit": %s}\n' % (zlib.crc32(text), text)
    (kept / name / COMMIT_FILE).write_bytes(envelope)
    with pytest.raises(ValueError, match="has format 99"):
        Fork.find(kept)
    (old,) = kept.glob("step-000000000010*")
    assert Fork.find(old).step == 10


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        # An epoch that ends by progress goes through the data as often as it takes.
        ({"under_way": True, "until": None}, None),
        ({"under_way": True, "until": 100}, 26),
        ({"under_way": False, "until": None, "cursor": 100}, 50),
    ],
)
def test_room_is_what_the_pass_has_left(kept, changes, room):
    assert with_cursor(Fork.find(kept), **changes).room() == room


def test_room_in_a_checkpoint_of_0_1_is_the_pass():
    assert Fork.find(FORMAT_1).room() == 26


@pytest.mark.parametrize("num", [0, 2])
def test_places_in_the_data_need_one_loader(kept, tmp_path, num):
    fork = Fork.find(kept)
    tree = dict(fork.commit.tree)
    cursor = tree.pop(LOADER)
    tree |= {f"loader/{i}": cursor for i in range(num)}
    fork = replace(fork, commit=replace(fork.commit, tree=tree))
    assert fork.seed is None
    with pytest.raises(ValueError, match=f"has the positions of {num} loaders"):
        fork.room()
    with pytest.raises(ValueError, match=f"has the positions of {num} loaders"):
        fork.copy_to(tmp_path / "copy", skip=8)
