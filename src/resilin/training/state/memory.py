"""The memory copy: the newest state of the job in this host's shared memory.

After each step the replicas of a host copy the state into files in memory, which outlive them. A
process that is started again on the host finds the last completed step there; a host that has
nothing gets it from one that has. Each replica writes only its share, and that of its neighbour,
so a host loses nothing when any one of its replicas dies at any moment. Files are written in turns,
two per share, and say last of all that they are complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resilin.core.recovery import CopyFile, complete_copies, next_buffer, shares_written
from resilin.engine.devices import to_host
from resilin.engine.processes import process_gone, process_start
from resilin.training.state.snapshot import Json, OwnState, Snapshot, Version, names, shares

FORMAT = 2
"""Version of the files. Others are passed over: their job runs another resilin."""
SHARE = 0.5
"""Part of the memory's file system that copies may take: data loaders live there, too."""
_HEADER = struct.Struct("<8sQqqqQQI")
_MAGIC = b"resilin\n"
_DATA = 4096
_ALIGN = 64
_NAME = re.compile(r"(\d+)-\d+-\d+-\d+-[01]")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is among those that share its host's memory."""

    host: int
    """Number of the host, or of the agent on it."""
    local_replica: int
    """Which replica of the host, from 0."""
    num_local_replicas: int
    """How many replicas the host has."""
    replica: int
    """Which replica of the job."""


class Writer(NamedTuple):
    """The process that wrote a file."""

    pid: int
    """Its number."""
    started: str | None
    """When it began, in the kernel's words: numbers are used again."""

    @classmethod
    def here(cls) -> Writer:
        """This process."""
        return cls(os.getpid(), process_start(os.getpid()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found(CopyFile):
    """One complete file."""

    path: Path
    meta: dict[str, Any]


class MemoryCopies:
    """Writes and reads the copies of one job in one directory.

    Args:
        directory: A directory in memory, of this job alone. It is made if it does not exist.

    Raises:
        ValueError: The directory belongs to somebody else, who could forge what is in it.
    """

    def __init__(self, directory: Path) -> None:
        for missing in reversed([d for d in directory.parents if not d.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        parent = directory.parent.stat()
        replaceable = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
        if parent.st_uid not in (0, os.getuid()) or replaceable:
            raise ValueError(
                f"{directory.parent} must belong to user {os.getuid()} or root and be writable by "
                f"no other, who could replace {directory.name}; it belongs to {parent.st_uid} and "
                f"has mode {parent.st_mode & 0o1777:o}"
            )
        status = directory.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ValueError(
                f"{directory} must belong to user {os.getuid()} and be writable by no other; it "
                f"belongs to {status.st_uid} and has mode {status.st_mode & 0o777:o}"
            )
        self.directory = directory
        self._writers: dict[tuple[int, int], _Writer] = {}
        self._turn = 0
        self._writer_process = Writer.here()

    # Writing -------------------------------------------------------------------------------

    def keep(
        self,
        snapshot: Snapshot,
        sums: Mapping[str, Json],
        place: Place,
        own: OwnState | None = None,
        *,
        previous: Version | None = None,
        again: bool = False,
    ) -> None:
        """Copies this replica's part of the state; complete when it returns.

        Args:
            snapshot: The state, the same on all replicas.
            sums: This replica's part of what is summed over the replicas.
            place: Where this replica is. All of the host's replicas have to keep the same steps.
            own: What this replica alone has.
            previous: The copy before, or the state that the job resumed from.
            again: Whether to overwrite the last copy, because an earlier state is to be had.

        Raises:
            OSError: There is no room for it. The copy before is untouched.
            RuntimeError: A process of another job writes to the same file.
        """
        before = self._turn
        self._turn = next_buffer(before, again=again)
        try:
            self._keep(snapshot, sums, place, own, previous)
        except BaseException:
            # Else the next one would overwrite the last that is complete.
            self._turn = before
            raise

    def _keep(
        self,
        snapshot: Snapshot,
        sums: Mapping[str, Json],
        place: Place,
        own: OwnState | None,
        previous: Version | None,
    ) -> None:
        num = place.num_local_replicas
        dealt = shares(snapshot.tensors, num)
        for share in shares_written(place.local_replica, num):
            meta: dict[str, Any] = {
                "share": share,
                "num_shares": num,
                "host": place.host,
                "branch": snapshot.version.branch,
                "writer": self._writer_process,
                "previous": None if previous is None else astuple(previous),
            }
            if share == 0:
                meta["tree"] = snapshot.tree
            tensors = {name: snapshot.tensors[name] for name in dealt[share]}
            if share == place.local_replica:
                meta["sums"] = {"replica": place.replica, "of": sums}
                if own is not None and own.tree:
                    meta["own"] = own.tree
                    tensors.update(own.tensors)
            self._writer(snapshot.version, share, place).write(snapshot.version, tensors, meta)

    def _writer(self, version: Version, share: int, place: Place) -> _Writer:
        key = (share, self._turn)
        name = f"{version.generation}-{place.host}-{place.local_replica}-{share}-{self._turn}"
        writer = self._writers.get(key)
        if writer is None or writer.path.name != name:
            if writer is not None:
                writer.close()
            writer = self._writers[key] = _Writer(self.directory / name)
        return writer

    # Reading -------------------------------------------------------------------------------

    def versions(self) -> list[Version]:
        """The states that are here completely, newest first."""
        return sorted(self._complete(), reverse=True)

    def _complete(self) -> dict[Version, list[_Found]]:
        return complete_copies(self._files())

    def _files(self) -> Iterator[_Found]:
        for path in sorted(self.directory.iterdir()):
            file = _read_meta(path)
            if file is not None:
                yield file

    def read(self, version: Version) -> Snapshot:
        """Reads a state that is here completely.

        Raises:
            LookupError: It is not, or not any more.
        """
        files = self._complete().get(version)
        if files is None:
            raise LookupError(f"{self.directory} has no complete copy of {version}")
        tree: dict[str, Json] | None = None
        tensors: dict[str, Tensor] = {}
        for file in files:
            tree = file.meta.get("tree", tree)
            try:
                own = set(names(file.meta.get("own")))
                read = _read_tensors(file)
                tensors.update((name, tensor) for name, tensor in read.items() if name not in own)
            except (OSError, ValueError) as error:
                raise LookupError(f"{file.path} changed while it was read: {error}") from error
            again = _read_meta(file.path)
            if again is None or again.version != version:
                raise LookupError(f"{file.path} was overwritten while it was read")
        assert tree is not None, "share 0 has the tree"
        return Snapshot(version, tree, tensors)

    def num_replicas(self, version: Version) -> int:
        """How many replicas the job had when they wrote a state that is here completely."""
        files = self._complete()[version]
        return int(next(f.meta["tree"]["job"]["replicas"] for f in files if "tree" in f.meta))

    def sums(self, version: Version) -> dict[int, Mapping[str, Json]]:
        """What replicas of this host have added to sums by this version, by replica."""
        parts = (f.meta["sums"] for f in self._files() if f.version == version and "sums" in f.meta)
        return {part["replica"]: part["of"] for part in parts}

    def previous(self, version: Version) -> Version | None:
        """The copy before one that is here completely, or the state its generation began with."""
        before = self._complete()[version][0].meta["previous"]
        return None if before is None else Version(*before)

    def generations(self) -> set[int]:
        """Generations of which anything is here, complete or not."""
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return {int(name[1]) for name in found if name is not None}

    def writers(self) -> set[Writer]:
        """Processes that have written what is here, and that live."""
        found = {Writer(*file.meta["writer"]) for file in self._files()}
        return {writer for writer in found if not process_gone(*writer)}

    def owners(self, version: Version) -> set[int]:
        """The replicas of this host whose own state of this version is here."""
        return set(self._own_trees(version))

    def without_own(self, version: Version) -> set[int]:
        """Those of them that have nothing of their own: their parts are empty."""
        trees = self._own_trees(version)
        return {replica for replica, tree in trees.items() if not any(tree.values())}

    def _own_trees(self, version: Version) -> dict[int, Mapping[str, Json]]:
        files = (file for file in self._files() if file.version == version and "own" in file.meta)
        return {file.meta["sums"]["replica"]: file.meta["own"] for file in files}

    def own(self, version: Version) -> dict[int, OwnState]:
        """What replicas of this host have of their own in this version, by replica."""
        found = {}
        for file in self._files():
            if file.version == version and "own" in file.meta:
                tree, tensors = file.meta["own"], _read_tensors(file)
                own = OwnState(tree, {name: tensors[name] for name in names(tree)})
                found[int(file.meta["sums"]["replica"])] = own
        return found

    # Forgetting ----------------------------------------------------------------------------

    def forget(self, before: int | None = None, *, but: Version | None = None) -> None:
        """Removes files of generations before this one, or all of them.

        Only what this module wrote is touched.

        Args:
            before: The first generation that stays; None removes all.
            but: A state that stays all the same.
        """
        staying = set()
        if but is not None:
            staying = {file.path.name for file in self._files() if file.version == but}
        try:
            present = list(self.directory.iterdir())
        except FileNotFoundError:
            present = []  # Another replica of the host was first.
        for path in present:
            name = _NAME.fullmatch(path.name)
            earlier = name is not None and (before is None or int(name[1]) < before)
            if earlier and path.name not in staying:
                path.unlink(missing_ok=True)
        if before is None:
            self.close()

    def withdraw(self) -> None:
        """Removes what this replica has written; others may still need theirs."""
        for writer in self._writers.values():
            writer.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Lets go of the files; they stay."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class _Writer:
    """One file: header, tensors, and the rest as JSON behind them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None
        self._layout: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._views: dict[str, Tensor] = {}
        self._table: dict[str, list[Any]] = {}
        self._end = _DATA

    def write(self, version: Version, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if layout != self._layout or self._memory is None:
            self._arrange(tensors)
            self._layout = layout
        meta["format"], meta["tensors"] = FORMAT, self._table
        text = json.dumps(meta, separators=(",", ":")).encode()
        memory = self._room_for(len(text))
        head = (version.generation, version.step, version.epoch, self._end, len(text))
        # Incomplete from here on, whatever happens.
        _HEADER.pack_into(memory, 0, _MAGIC, 0, *head, 0)
        to_host((view, tensors[name]) for name, view in self._views.items())
        memory[self._end : self._end + len(text)] = text
        _HEADER.pack_into(memory, 0, _MAGIC, 1, *head, zlib.crc32(text))

    def _arrange(self, tensors: Mapping[str, Tensor]) -> None:
        self.close()
        offset = _DATA
        self._table = {}
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._table[name] = [dtype, list(tensor.shape), offset]
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._end = offset
        self._open(offset + 2**16)
        self._map(tensors)

    def _map(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._memory is not None
        self._views = {
            name: _view(self._memory, tensors[name].dtype, shape, offset)
            for name, (_, shape, offset) in self._table.items()
        }

    def _room_for(self, num_bytes: int) -> mmap.mmap:
        assert self._memory is not None
        if self._end + num_bytes > len(self._memory):
            tensors = dict(self._views)
            self.close()
            self._open(self._end + 2 * num_bytes)
            self._map(tensors)
        return self._memory

    def _open(self, size: int) -> None:
        # A new file: readers of the old one keep what they have, and disk full shows here and not
        # as a bus error when the memory is touched.
        present = _read_meta(self.path)
        if present is not None:
            writer = Writer(*present.meta["writer"])
            if writer.pid != os.getpid() and not process_gone(*writer):
                raise RuntimeError(in_use(self.path.parent, writer))
        self.path.unlink(missing_ok=True)
        taken = _taken(self.path.parent)
        total = capacity(self.path.parent)
        if taken + size > SHARE * total:
            raise OSError(
                errno.ENOSPC,
                f"copies of {taken + size} bytes would take more than half of its {total} bytes, "
                "which data loaders and others need as well",
            )
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        # The memory is unmapped when the last view of it goes.
        self._views = {}
        self._memory = None


def in_use(directory: Path, writer: Writer) -> str:
    """Why this process cannot keep its state in a directory, where another job's process does."""
    return (
        f"process {writer.pid} of another job is alive and keeps its state in {directory}, where "
        f"this job (process {os.getpid()}) is to keep its own: two jobs cannot have one id. Start "
        "this one with another --rdzv-id or --memory-dir, or stop the other one"
    )


def _taken(directory: Path) -> int:
    """Bytes in the files of a directory, some of which may be removed meanwhile."""
    total = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def capacity(directory: Path) -> int:
    """Bytes that the file system of a directory has."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize


def _view(memory: Any, dtype: torch.dtype, shape: Any, offset: int) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _read_meta(path: Path) -> _Found | None:
    """The header and the JSON of a file, if it is complete."""
    if _NAME.fullmatch(path.name) is None:
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size:
                return None
            magic, complete, generation, step, epoch, end, size, crc = _HEADER.unpack(head)
            if magic != _MAGIC or not complete:
                return None
            if end + size > os.fstat(file.fileno()).st_size:
                return None
            file.seek(end)
            text = file.read(size)
    except FileNotFoundError:
        return None  # Removed by its writer, who is alive then.
    if len(text) != size or zlib.crc32(text) != crc:
        return None
    meta = json.loads(text)
    if meta["format"] != FORMAT:
        return None
    return _Found(
        path=path,
        version=Version(generation, step, epoch, meta["branch"]),
        host=meta["host"],
        share=meta["share"],
        num_shares=meta["num_shares"],
        meta=meta,
    )


def _read_tensors(file: _Found) -> dict[str, Tensor]:
    """Copies of the tensors of a file, on the CPU."""
    with file.path.open("rb") as stream:
        memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        name: _view(memory, getattr(torch, dtype), shape, offset).clone()
        for name, (dtype, shape, offset) in file.meta["tensors"].items()
    }
