"""Storage of checkpoints: a local directory, or anything that fsspec can reach.

The two differ in what makes a file last and appear at once. On a local file system that is fsync
and rename; an object store has neither, and needs neither: an object is there when its upload has
ended. Directories are flat, and every path is made of the root, an attempt and a plain file name.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

from resilin.telemetry.segments import sync_directory
from resilin.training.state.checkpoint.commit import FileSum, is_attempt


class Storage(Protocol):
    """A place for attempts."""

    def path(self, attempt: str) -> str:
        """The whole path or URL of an attempt."""
        ...

    def attempts(self) -> list[str]:
        """All attempts there are, committed or not."""
        ...

    def prepare(self, attempt: str) -> None:
        """Makes room for an attempt; every replica may do it."""
        ...

    def create(self, attempt: str, name: str) -> contextlib.AbstractContextManager[Sums]:
        """A new file to write. It lasts when the context has been left."""
        ...

    def open(self, attempt: str, name: str) -> IO[bytes]:
        """A file to read."""
        ...

    def size(self, attempt: str, name: str) -> int:
        """Bytes in a file."""
        ...

    def publish(self, attempt: str, name: str, data: bytes) -> None:
        """Writes a small file that appears whole or not at all, after all before it."""
        ...

    def remove(self, attempt: str, first: str) -> None:
        """Removes an attempt, beginning with the file `first`."""
        ...


class Sums:
    """A file being written, that counts its bytes and sums them up.

    `torch.save` may end the process when a write raises within it, because its archive is closed
    by a destructor. Hence a failure is kept, the rest is thrown away, and `check` raises it.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._failure: Exception | None = None
        self._size = 0
        self._crc32 = 0
        self._part: int | None = None

    def write(self, data: Any) -> int:
        """Writes bytes, strictly one after the other."""
        view = memoryview(data).cast("B")
        if self._failure is None:
            try:
                self._raw.write(view)
            except Exception as error:
                self._failure = error
        self._crc32 = zlib.crc32(view, self._crc32)
        if self._part is not None:
            self._part = zlib.crc32(view, self._part)
        self._size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Does nothing: what counts is the end of the file."""

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def begin_part(self) -> None:
        """Sums up what is written from here on apart from the whole, too."""
        self._part = 0

    @property
    def part_crc32(self) -> int | None:
        """Checksum of what was written since `begin_part`; None if that was never called."""
        return self._part

    def check(self) -> None:
        """Raises what a write has failed with."""
        if self._failure is not None:
            raise self._failure

    @property
    def sum(self) -> FileSum:
        """Size and checksum of what was written."""
        return FileSum(self._size, self._crc32)


class LocalStorage:
    """A directory of this machine, or one that is mounted on all of them."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)

    def path(self, attempt: str) -> str:
        """The path of an attempt."""
        return os.path.join(self._root, attempt)

    def attempts(self) -> list[str]:
        """All attempts there are."""
        try:
            with os.scandir(self._root) as found:
                return [
                    each.name
                    for each in found
                    if is_attempt(each.name) and each.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []

    def prepare(self, attempt: str) -> None:
        """Makes the directory, and its entry in the one above last."""
        os.makedirs(self.path(attempt), exist_ok=True)
        sync_directory(self._root)

    @contextmanager
    def create(self, attempt: str, name: str) -> Iterator[Sums]:
        """A new file, synced when the context is left."""
        raw = open(os.path.join(self.path(attempt), name), "xb")  # noqa: SIM115
        try:
            sums = Sums(raw)
            yield sums
            sums.check()
            raw.flush()
            os.fsync(raw.fileno())
            raw.close()
        except BaseException:
            # Closing flushes, which fails again where writing failed: the first error is the one.
            with contextlib.suppress(OSError):
                raw.close()
            raise
        sync_directory(self.path(attempt))

    def open(self, attempt: str, name: str) -> IO[bytes]:
        """A file to read."""
        return open(os.path.join(self.path(attempt), name), "rb")

    def size(self, attempt: str, name: str) -> int:
        """Bytes in a file."""
        return os.stat(os.path.join(self.path(attempt), name)).st_size

    def publish(self, attempt: str, name: str, data: bytes) -> None:
        """Writes under another name, syncs, renames, and syncs the directory."""
        with self.create(attempt, name + ".tmp") as stream:
            stream.write(data)
        directory = self.path(attempt)
        os.replace(os.path.join(directory, name + ".tmp"), os.path.join(directory, name))
        sync_directory(directory)

    def remove(self, attempt: str, first: str) -> None:
        """Removes `first`, makes that last, and removes the others."""
        directory = self.path(attempt)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, first))
            sync_directory(directory)
        with os.scandir(directory) as found:
            names = [each.name for each in found]
        for name in names:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


class ObjectStorage:
    """A place that fsspec reaches: S3, Google Cloud, Azure, memory and others."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def path(self, attempt: str) -> str:
        """The URL of an attempt."""
        return str(self._fs.unstrip_protocol(self._directory(attempt)))

    def _directory(self, attempt: str) -> str:
        return f"{self._root}/{attempt}"

    def _list(self, directory: str) -> list[str]:
        # Other machines write here: what was listed before may not be so any more.
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(directory, detail=False)
        except FileNotFoundError:
            return []
        return [name for path in found if (name := path.rstrip("/").rpartition("/")[2])]

    def attempts(self) -> list[str]:
        """All attempts there are."""
        return [name for name in self._list(self._root) if is_attempt(name)]

    def prepare(self, attempt: str) -> None:
        """Nothing to do: directories are but parts of names."""

    @contextmanager
    def create(self, attempt: str, name: str) -> Iterator[Sums]:
        """A new object, uploaded when the context is left."""
        raw = self._fs.open(f"{self._directory(attempt)}/{name}", "wb")
        try:
            sums = Sums(raw)
            yield sums
            sums.check()
        except BaseException:
            # To close it would upload what there is of it, and so would its destructor.
            if isinstance(raw, AbstractBufferedFile):
                raw.discard()
                raw.closed = True
            raise
        raw.close()

    def open(self, attempt: str, name: str) -> IO[bytes]:
        """An object to read."""
        stream: IO[bytes] = self._fs.open(f"{self._directory(attempt)}/{name}", "rb")
        return stream

    def size(self, attempt: str, name: str) -> int:
        """Bytes in an object."""
        self._fs.invalidate_cache()
        return int(self._fs.info(f"{self._directory(attempt)}/{name}")["size"])

    def publish(self, attempt: str, name: str, data: bytes) -> None:
        """One upload: there is nothing to see of it before it has ended."""
        self._fs.pipe_file(f"{self._directory(attempt)}/{name}", data)

    def remove(self, attempt: str, first: str) -> None:
        """Removes `first`, then the others; one by one, since bulk removal expands patterns."""
        names = self._list(self._directory(attempt))
        for name in sorted(names, key=lambda name: name != first):
            self._fs.rm_file(f"{self._directory(attempt)}/{name}")


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """The place that a path or URL names.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: A package is missing for it; the message says which.
    """
    filesystem, root = url_to_fs(os.fspath(url))
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(root)
    return ObjectStorage(filesystem, root)
