import json
import zlib

import pytest

from resilin.core.placement import Placement
from resilin.training.state.checkpoint import Commit, CorruptCheckpoint, commit
from resilin.training.state.checkpoint.commit import Entry, FileSum, attempt_name, decode, encode
from resilin.training.state.checkpoint.retention import kept
from resilin.training.state.snapshot import Version

COMMIT = Commit(
    version=Version(3, 1234, 5),
    name="step-000000001234-g3-0123abcd",
    path="/runs/step-000000001234-g3-0123abcd",
    files={".metadata": FileSum(10, 0), "__0_0.distcp": FileSum(900, 0xFFFFFFFF)},
    tensors={
        "b": (Entry("bfloat16", Placement.whole((3, 5)), "__0_0.distcp", 400, 300),),
        "a": (Entry("int64", Placement.whole(()), "__0_0.distcp", 0, 400),),
        "c": (
            Entry("int32", Placement((2, 5), (0, 3), (2, 2)), "__0_0.distcp", 800, 100),
            Entry("int32", Placement((2, 5), (0, 0), (2, 3)), "__0_0.distcp", 700, 100),
        ),
    },
    tree={"clock": {"steps": 1234, "progress": 0.1}, "text": "\u00e9"},
)


def test_it_reads_what_it_writes():
    data = encode(COMMIT)
    assert decode(data, COMMIT.name, COMMIT.path) == COMMIT
    # The order of the tensors is part of it.
    assert list(decode(data, COMMIT.name, COMMIT.path).tensors) == ["b", "a", "c"]
    fields = json.loads(data)["commit"]
    assert (fields["format"], fields["generation"], fields["step"], fields["epoch"]) == (
        2,
        3,
        1234,
        5,
    )
    # A whole tensor needs no placement.
    assert fields["tensors"]["a"] == {
        "dtype": "int64",
        "shape": [],
        "pieces": [{"file": "__0_0.distcp", "offset": 0, "length": 400}],
    }
    assert fields["tensors"]["c"]["pieces"][0]["offsets"] == [0, 3]
    assert fields["files"]["__0_0.distcp"] == {"size": 900, "crc32": "ffffffff"}


def test_every_flipped_bit_and_every_cut_is_found():
    data = encode(COMMIT)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint, match="expected, found"):
                decode(bytes(flipped), COMMIT.name, COMMIT.path)
        with pytest.raises(CorruptCheckpoint, match="expected, found"):
            decode(data[:position], COMMIT.name, COMMIT.path)


def signed(body):
    return b'{"crc32": "%08x", "commit": %s}\n' % (zlib.crc32(body), body)


def changed(**changes):
    fields = json.loads(encode(COMMIT))["commit"]
    for key, value in changes.items():
        *parents, last = key.split("__")
        target = fields
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        target[last] = value
    return signed(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (signed(b""), "no commit"),
        (signed(b"[]"), "no commit"),
        (signed(b"[" * 100_000), "no commit"),
        (signed(b"{}"), "no commit"),
        (changed(format=0), "at least 1 expected, found 0"),
        (changed(format=True), "found True"),
        (changed(step=-1), "at least 0 expected, found -1"),
        (changed(generation=1.0), r"found 1\.0"),
        (changed(files=[]), "no valid commit"),
        (changed(files={"__0_0.distcp": {"size": 900, "crc32": "0"}}), ".metadata is missing"),
        (changed(tree=[]), "the tree is a list"),
        (changed(tensors__a__pieces__0__file="__1_0.distcp"), "not among its files"),
        (changed(tensors__a__dtype="Tensor"), "'Tensor' is not a dtype"),
        (changed(tensors__a__shape=[-1]), "found -1"),
        (changed(tensors__a__shape=[1 << 60, 1 << 60]), "in a place of 400"),
        (
            changed(tensors__a__pieces__0__length=401),
            "a is at bytes 0 to 401|b is at bytes 400 to 700",
        ),
        (changed(tensors__c__pieces__0__length=101), "c is at bytes 800 to 901"),
        (changed(tensors__a__pieces=[]), "a tensor without pieces"),
        (changed(tensors__c__pieces__0__offsets=[0, 2]), "c has two pieces for the same elements"),
        (changed(tensors__c__pieces__0__offsets=[0, 4]), "must be within the shape"),
        (changed(tensors__c__pieces__0__offsets=[3]), "as many dimensions"),
        (changed(tensors__c__pieces__0__sizes=[2, 1]), "10 elements, and its pieces have 8"),
        (changed(tensors__c__pieces__0__sizes=[2, -2]), "found -2"),
    ],
)
def test_a_commit_that_no_writer_of_ours_made_is_refused(data, message):
    with pytest.raises(CorruptCheckpoint, match=message):
        decode(data, COMMIT.name, COMMIT.path)


def test_a_newer_format_is_no_damage():
    with pytest.raises(ValueError, match=r"has format 7, .* reads formats up to 2"):
        decode(changed(format=7, files=None), COMMIT.name, COMMIT.path)


def test_every_format_is_refused_by_a_reader_of_earlier_ones(monkeypatch):
    # What an older resilin does with what this one writes: its number alone decides.
    monkeypatch.setattr(commit, "FORMAT", 1)
    data = encode(COMMIT).replace(b'"format": 1', b'"format": 2')
    with pytest.raises(ValueError, match=r"has format 2, .* reads formats up to 1"):
        decode(signed(data[data.index(b'"commit": ') + 10 : -2]), COMMIT.name, COMMIT.path)


def test_names_of_attempts_are_unique_and_sort_by_step():
    names = [attempt_name(Version(0, step)) for step in (1, 2, 10, 10**11)]
    assert names == sorted(names)
    assert attempt_name(Version(0, 1)) != attempt_name(Version(0, 1))


@pytest.mark.parametrize(
    ("steps", "keep", "every", "staying"),
    [
        ([], 3, None, []),
        ([1, 2, 3, 4], 3, None, [2, 3, 4]),
        ([1, 2, 3, 4], 1, 1, [1, 2, 3, 4]),
        ([50, 100, 150, 200, 250], 1, 100, [100, 200, 250]),
        ([90, 110, 190, 220, 230, 240], 1, 100, [110, 220, 240]),
        ([0, 5, 7], 1, 10, [7]),
        ([1, 1, 1], 2, None, [1, 1]),
    ],
)
def test_which_ones_stay(steps, keep, every, staying):
    versions = {str(i): Version(0, step) for i, step in enumerate(steps)}
    names = kept(versions, keep=keep, keep_every=every)
    assert sorted(versions[name].step for name in names) == staying
