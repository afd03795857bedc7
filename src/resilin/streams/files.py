"""`FileStream`: files of samples, divided among shards file by file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from resilin.core import _validate
from resilin.streams.cursor import Cursor, check_shard, digest, permutation
from resilin.streams.protocol import Json

Path: TypeAlias = "str | os.PathLike[str]"


class FileStream:
    """Samples of many files.

    Shard v of V has files v, v + V, v + 2 V and so on, one after the other. Its state is the number
    of its current file and the place in it: where it continues, files before that one are not
    opened. Within a file it continues by the state of what `read` returned, by its `skip`, or by
    reading the samples before the place again.
    """

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[Any], Iterable[Any]],
        *,
        num_shards: int,
        seed: int = 0,
        shuffle: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        """Makes a stream; opens no file.

        Args:
            files: Paths or URLs, in an order that is the same in every process: sort what a
                directory lists.
            read: Called with one of `files`; returns its samples, always in the same order. A
                generator function, or one that returns an iterator that also has the methods of
                `Seekable` or `Stateful`.
            num_shards: Number of shards, at most one for each file.
            seed: Seed of the order of files.
            shuffle: Whether each epoch has another order of files, and so other files in a shard.
            fingerprint: A text that identifies the data, in place of the list of files: for files
                that may move to another place between two parts of a job.

        Raises:
            ValueError: There are fewer files than shards, or an argument is out of its range.
        """
        self.num_shards = _validate.whole("num_shards", num_shards, at_least=1)
        self._files = tuple(files)
        if self.num_shards > len(self._files):
            raise ValueError(
                f"num_shards ({self.num_shards}) must be at most the number of files "
                f"({len(self._files)}): a file is read by one shard"
            )
        self._read = read
        self._seed = _validate.whole("seed", seed, at_least=0)
        self._shuffle = bool(shuffle)
        names = [os.fspath(file) for file in self._files] if fingerprint is None else fingerprint
        self.fingerprint = digest(
            *("files", names, len(self._files)),
            *(self.num_shards, self._seed if self._shuffle else None),
        )

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard; opens no file before the first sample is asked for."""
        check_shard(self, shard, num_shards)
        if not self._shuffle:
            return FileShard(self._files[shard::num_shards], self._read)
        order = permutation(len(self._files), "files", self._seed, epoch)
        return FileShard([self._files[i] for i in order[shard::num_shards].tolist()], self._read)


class FileShard(Iterator[Any]):
    """The samples of some files, one file after the other."""

    def __init__(self, files: Sequence[Path], read: Callable[[Any], Iterable[Any]]) -> None:
        """Begins before the first file.

        Args:
            files: The files.
            read: Returns the samples of one file.
        """
        self._files = files
        self._read = read
        self._file = 0
        # The place at which to begin to read the file; None at its beginning.
        self._place: Json = None
        self._samples: Cursor | None = None

    def __next__(self) -> Any:
        while self._file < len(self._files):
            if self._samples is None:
                self._samples = Cursor(iter(self._read(self._files[self._file])))
                if self._place is not None:
                    self._samples.load_state_dict(self._place)
            try:
                return next(self._samples)
            except StopIteration:
                self._file, self._place, self._samples = self._file + 1, None, None
        raise StopIteration

    def state_dict(self) -> Json:
        """The number of the file, and the place in it or None."""
        place = self._place if self._samples is None else self._samples.state_dict()
        return [self._file, place]

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place; opens no file.

        Args:
            state: What `state_dict` of the same shard returned.

        Raises:
            ValueError: The shard has fewer files.
        """
        file, place = state
        if not 0 <= file <= len(self._files):
            raise ValueError(
                f"a shard has {len(self._files)} files, of which {file} were read before: its list "
                "of files has changed"
            )
        self._file, self._place, self._samples = file, place, None
