"""`tar_samples`: the samples of a tar file as WebDataset writes them, for `FileStream`."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
"""Key and extensions of a member: the name is cut at the first dot after the last slash."""
_OF_FILE = re.compile(r"__[^/]*__($|/)")
"""Members that describe the file, and belong to no sample."""


def tar_samples(path: str | os.PathLike[str]) -> TarSamples:
    """The samples of one tar file.

    Consecutive members with the same name up to its first dot are one sample: a dict of
    `__key__`, `__url__` and, for each member, its content as bytes under the rest of its name in
    lower case, such as `jpg` or `seg.png`. Nothing is decoded.

    Args:
        path: A path, or a URL that fsspec can open.
    """
    return TarSamples(path)


class TarSamples(Iterator[dict[str, Any]]):
    """The samples of one tar file, one after the other.

    `skip` reads the headers of members and passes over their content; that of a compressed file
    has to be unpacked all the same.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Begins with the first sample; opens the file when it is asked for.

        Args:
            path: A path, or a URL that fsspec can open.
        """
        self._url = os.fspath(path)
        self._members = _members(self._url)
        # The first member of the next sample, if it was met.
        self._met: _Member | None = None

    def __next__(self) -> dict[str, Any]:
        first = self._met or next(self._members)
        sample: dict[str, Any] = {"__key__": first.key, "__url__": self._url}
        member: _Member | None = first
        while member is not None and member.key == first.key:
            if member.extension in sample:
                raise ValueError(
                    f"{self._url}: sample {member.key} has two members named {member.extension}; "
                    "names must differ in more than case"
                )
            sample[member.extension] = member.read()
            member = next(self._members, None)
        self._met = member
        return sample

    def skip(self, num: int) -> None:
        """Passes over samples.

        Args:
            num: Number of samples; all of them exist.

        Raises:
            ValueError: The file has fewer.
        """
        member = self._met or (next(self._members, None) if num else None)
        for passed in range(num):
            if member is None:
                raise ValueError(
                    f"{self._url} has {num - passed} samples fewer than were read before: it has "
                    "changed"
                )
            key = member.key
            while member is not None and member.key == key:
                member = next(self._members, None)
        self._met = member


class _Member(NamedTuple):
    key: str
    extension: str
    read: Callable[[], bytes]
    """Reads its content; to be called before the next member is asked for."""


def _members(url: str) -> Iterator[_Member]:
    """The members of a tar file that belong to samples."""
    with ExitStack() as stack:
        file: Any = None
        if "://" in url:
            import fsspec  # type: ignore[import-untyped]

            file = stack.enter_context(fsspec.open(url, "rb"))
        tar = stack.enter_context(tarfile.open(None if file else url, "r:*", fileobj=file))
        while (info := tar.next()) is not None:
            # Else it keeps all headers of a large file.
            tar.members = []  # type: ignore[attr-defined]
            found = _NAME.match(info.name)
            if info.isreg() and found and not _OF_FILE.match(info.name):
                yield _Member(found[1], found[2].lower(), _Content(tar, info))


class _Content:
    """Reads the content of one member."""

    def __init__(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        self._tar = tar
        self._info = info

    def __call__(self) -> bytes:
        file = self._tar.extractfile(self._info)
        assert file is not None, "a regular file has content"
        return file.read()
