"""Snapshots to save, and ways to harm what was saved."""

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import torch

from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.checkpoint.commit import COMMIT_FILE, encode
from resilin.training.state.snapshot import Snapshot, Version, split

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


def snapshot(step=1, generation=0, seed=0, size=0):
    """All dtypes and shapes that a state has; `size` adds so many bytes in two more tensors."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(6, 4, generator=generator)
    state = {
        "dtypes": {
            str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype)
            for dtype in DTYPES
        },
        "scalar": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "transposed": whole.t(),
        "strided": whole[::2, 1],
        "expanded": torch.arange(3.0).expand(4, 3),
        "parameter": torch.nn.Parameter(whole.clone()),
        "channels_last": whole.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "numbers": [1, 2.5, float("inf"), None, "text", (1, 2), b"bytes", {3: 4}],
    }
    for half in range(2 if size else 0):
        state[f"large{half}"] = torch.rand(size // 8, generator=generator)
    tree, tensors = split("state", state)
    return Snapshot(Version(generation, step, step // 10), {"state": tree}, tensors)


def assert_same(found, expected):
    assert found.version == expected.version
    assert found.tree == expected.tree
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape, other.device.type) == (tensor.dtype, tensor.shape, "cpu")
        # Bit by bit: a NaN is equal to itself, and zeros have signs.
        assert raw(other) == raw(tensor), name


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def recommit(path, **changes):
    """Changes a `COMMIT.json` as an attacker would: with a checksum that is right.

    Sizes and checksums of the files are made to fit as well.
    """
    file = path / "COMMIT.json"
    body = json.loads(file.read_bytes())["commit"]
    for name, its in body["files"].items():
        data = (path / name).read_bytes()
        its.update(size=len(data), crc32=f"{zlib.crc32(data):08x}")
    for key, value in changes.items():
        body[key] = value(body[key]) if callable(value) else value
    data = json.dumps(body).encode()
    file.write_bytes(b'{"crc32": "%08x", "commit": %s}\n' % (zlib.crc32(data), data))


FORMAT_1 = Path(__file__).parent / "format_1"
"""Step 10 of two replicas, as 0.1.0 saved it: 74 samples, of which 24 are in the second pass."""
LOADER = "loader/TensorDataset[50]/0"
"""Name of its loader today."""


def as_saved_today(directory):
    """Copies that checkpoint, with the place in the data as it is written today."""
    shutil.copytree(FORMAT_1, directory)
    (commit,) = Checkpoints(directory).commits()
    tree = dict(commit.tree)
    place = {"epoch": 1, "passes": 0, "within": {}, "under_way": True, "until": None}
    tree[LOADER] = {**tree.pop("loader/0"), **place, "dealt": [0, 2]}
    (directory / commit.name / COMMIT_FILE).write_bytes(encode(replace(commit, tree=tree)))
    return directory
