"""`COMMIT.json`: what makes a directory a checkpoint, and all that is known before reading it.

The file is one JSON object, `{"crc32": ..., "commit": ...}`, whose checksum is that of the exact
bytes of the commit. That envelope stays as it is in every later format, so that a format too new
for this reader can be told from a damaged file. Earlier formats are read, never written.

Nothing in it is trusted: a name that is not one of ours, a tensor outside its file or larger than
the bytes that hold it are refused when it is decoded, before anything else is opened.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from resilin import __version__
from resilin.core.placement import Placement, Sizes, Stored, check_split
from resilin.engine.collectives import Wire
from resilin.training.state.checkpoint.errors import CorruptCheckpoint
from resilin.training.state.snapshot import Json, Version

FORMAT = 2
"""Number of the format that is written. Readers refuse a higher one, and read all lower ones.

1: every tensor is whole, in one place. 2: a tensor has pieces, each with a placement.
"""
COMMIT_FILE = "COMMIT.json"
"""Its name; written last, deleted first."""
METADATA_FILE = ".metadata"
"""File that other readers of torch.distributed.checkpoint look for."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_ATTEMPT = re.compile(r"step-\d{12,}-g\d+-[0-9a-f]{8}", re.ASCII)
_DATA_FILE = re.compile(r"\.metadata|__\d+_0\.distcp", re.ASCII)
_ENVELOPE = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "commit": (.*)\}\n', re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and checksum of a file."""

    size: int
    """Bytes."""
    crc32: int
    """Checksum of all of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Location of a piece of a tensor."""

    dtype: str
    """As torch names it, without the `torch.`."""
    placement: Placement
    """The piece of the tensor; often the whole."""
    file: str
    """The file that holds it."""
    offset: int
    """Its offset in the file."""
    length: int
    """Bytes it takes there, with what `torch.save` puts around it."""
    crc32: int | None = None
    """Checksum of these bytes; None if only the file has one, and must be read as a whole."""

    @property
    def sizes(self) -> Sizes:
        """Shape of the piece."""
        return self.placement.sizes

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.dtype!r} is not a dtype")
        return _DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Size of the piece alone."""
        return math.prod(self.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that was saved to its end."""

    version: Version
    """Version of the state it holds."""
    name: str
    """Its directory, within that of all checkpoints."""
    path: str
    """The whole path or URL of that directory, as other tools take it."""
    files: dict[str, FileSum] = field(repr=False)
    """Its files but for `COMMIT.json`, by name."""
    tensors: dict[str, tuple[Entry, ...]] = field(repr=False)
    """Locations of the pieces of each tensor, by name; together they are the whole tensor."""
    tree: dict[str, Json] = field(repr=False)
    """The part of the snapshot that is not tensors."""
    resilin: str = __version__
    """The version of resilin that saved it."""

    @property
    def stored(self) -> dict[str, Stored]:
        """Shape of each tensor, and whether it is in pieces."""
        return {
            name: Stored(pieces[0].placement.shape, not pieces[0].placement.is_whole)
            for name, pieces in self.tensors.items()
        }


def attempt_name(version: Version) -> str:
    """A name that no other attempt has."""
    return f"step-{version.step:012d}-g{version.generation}-{secrets.token_hex(4)}"


def is_attempt(name: str) -> bool:
    """Whether a directory of this name is one of ours."""
    return _ATTEMPT.fullmatch(name) is not None


def encode(commit: Commit) -> bytes:
    """The bytes of `COMMIT.json`."""
    body = json.dumps(
        {
            "format": FORMAT,
            "resilin": commit.resilin,
            "generation": commit.version.generation,
            "step": commit.version.step,
            "epoch": commit.version.epoch,
            "files": {
                name: {"size": file.size, "crc32": f"{file.crc32:08x}"}
                for name, file in commit.files.items()
            },
            "tensors": {name: _encoded(pieces) for name, pieces in commit.tensors.items()},
            "tree": commit.tree,
        },
        allow_nan=False,
    ).encode()
    return b'{"crc32": "%08x", "commit": %s}\n' % (zlib.crc32(body), body)


def to_json(commit: Commit) -> Json:
    """The JSON form of a commit, for other processes of the job."""
    return [commit.version.to_json(), commit.name, commit.path, encode(commit).decode()]


def from_json(state: Json) -> Commit:
    """The reverse of `to_json`."""
    version, name, path, text = state
    return replace(decode(text.encode(), name, path), version=Version.from_json(version))


def _encoded(pieces: Sequence[Entry]) -> Json:
    return {
        "dtype": pieces[0].dtype,
        "shape": pieces[0].placement.shape,
        "pieces": [
            {"file": each.file, "offset": each.offset, "length": each.length}
            | ({} if each.crc32 is None else {"crc32": f"{each.crc32:08x}"})
            | (
                {}
                if each.placement.is_whole
                else {"offsets": each.placement.offsets, "sizes": each.placement.sizes}
            )
            for each in pieces
        ],
    }


def decode(data: bytes, name: str, path: str) -> Commit:
    """Reads `COMMIT.json`.

    Args:
        data: Its bytes.
        name: The directory it was found in.
        path: The whole path of that directory.

    Raises:
        CorruptCheckpoint: It is damaged, or says what no commit of ours says.
        ValueError: Its format is newer than this version of resilin can read.
    """
    file = f"{path}/{COMMIT_FILE}"
    envelope = _ENVELOPE.fullmatch(data)
    if envelope is None:
        raise CorruptCheckpoint(f"{file}: a checksum and a commit expected, found {data[:40]!r}")
    expected, body = envelope[1].decode(), envelope[2]
    if (found := f"{zlib.crc32(body):08x}") != expected:
        raise CorruptCheckpoint(f"{file}: crc32 {expected} expected, found {found}")
    try:
        fields = json.loads(body)
        format_number = _whole(fields["format"], 1)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{file}: no commit: {type(error).__name__}: {error}") from error
    if format_number > FORMAT:
        raise ValueError(
            f"{file} has format {format_number}, and this version of resilin ({__version__}) reads "
            f"formats up to {FORMAT}: a newer resilin is needed to resume from it"
        )
    try:
        return _checked(fields, format_number, name, path)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{file}: no valid commit: {error}") from error


def _checked(fields: Any, format_number: int, name: str, path: str) -> Commit:
    files = {}
    for file, its in fields["files"].items():
        if _DATA_FILE.fullmatch(file) is None:
            raise ValueError(f"{file!r} is not the name of a file in a checkpoint")
        files[file] = FileSum(_whole(its["size"]), int(its["crc32"], 16))
    if METADATA_FILE not in files:
        raise ValueError(f"{METADATA_FILE} is missing from its files")
    decoded = _decoded_1 if format_number == 1 else _decoded
    # In the order in which they were saved.
    tensors = {key: decoded(its) for key, its in fields["tensors"].items()}
    for key, pieces in tensors.items():
        check_split(key, pieces[0].placement.shape, [each.placement for each in pieces])
    _check_places(tensors, files)
    if not isinstance(fields["tree"], dict):
        raise ValueError(f"the tree is a {type(fields['tree']).__name__}, not an object")
    return Commit(
        version=Version(*(_whole(fields[key]) for key in ("generation", "step", "epoch"))),
        name=name,
        path=path,
        files=files,
        tensors=tensors,
        tree=fields["tree"],
        resilin=str(fields["resilin"]),
    )


def _decoded(its: Any) -> tuple[Entry, ...]:
    dtype, shape = str(its["dtype"]), _sizes(its["shape"])
    pieces = []
    for each in its["pieces"]:
        placement = Placement.whole(shape)
        if "offsets" in each or "sizes" in each:
            placement = Placement(shape, _sizes(each["offsets"]), _sizes(each["sizes"]))
        pieces.append(_entry(dtype, placement, each))
    if not pieces:
        raise ValueError("a tensor without pieces")
    return tuple(pieces)


def _decoded_1(its: Any) -> tuple[Entry, ...]:
    """Decode a tensor of format 1, which is whole."""
    return (_entry(str(its["dtype"]), Placement.whole(_sizes(its["shape"])), its),)


def _entry(dtype: str, placement: Placement, its: Any) -> Entry:
    crc32 = int(its["crc32"], 16) if "crc32" in its else None
    where = (its["file"], _whole(its["offset"]), _whole(its["length"]))
    return Entry(dtype, placement, *where, crc32)


def _check_places(tensors: Mapping[str, Sequence[Entry]], files: Mapping[str, FileSum]) -> None:
    """Checks that each piece has bytes of its own, within its file, and enough of them."""
    ends = dict.fromkeys(files, 0)
    entries = [(key, entry) for key, pieces in tensors.items() for entry in pieces]
    for key, entry in sorted(entries, key=lambda item: item[1].offset):
        if entry.file not in files:
            raise ValueError(f"{key} is in {entry.file!r}, which is not among its files")
        end, size = entry.offset + entry.length, files[entry.file].size
        if entry.offset < ends[entry.file] or end > size:
            raise ValueError(
                f"{key} is at bytes {entry.offset} to {end} of {entry.file}, where bytes "
                f"{ends[entry.file]} to {size} are free for it"
            )
        ends[entry.file] = end
        if entry.num_bytes > entry.length:
            raise ValueError(f"{key} has {entry.num_bytes} bytes, in a place of {entry.length}")


def _sizes(value: Any) -> Sizes:
    return tuple(_whole(size) for size in value)


def _whole(value: Any, at_least: int = 0) -> int:
    if type(value) is not int or value < at_least:
        raise ValueError(f"a whole number of at least {at_least} expected, found {value!r}")
    return value


COMMIT: Wire[Commit] = Wire(to_json, from_json)
"""The form in which processes send each other a commit."""
