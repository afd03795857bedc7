"""What the memory of a host has at one moment: each file is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from resilin.core.placement import Piece
from resilin.core.recovery import complete_copies
from resilin.engine.processes import process_gone
from resilin.training.state.memory_file import (
    Found,
    Writer,
    generation_of,
    read_meta,
    read_pieces,
    read_unchanged,
)
from resilin.training.state.memory_pieces import offer_of
from resilin.training.state.offers import Offer
from resilin.training.state.replica_parts import OwnState
from resilin.training.state.shards import Held, Shard, Sharded
from resilin.training.state.snapshot import Json, Snapshot, Version, names


@dataclass(frozen=True)
class Scan:
    """The files of one directory, as they were when it was looked at.

    Their writers may be alive. What is read of a file is what was found, or a `LookupError`.
    """

    directory: Path
    """The directory."""
    files: tuple[Found, ...]
    """The files that are complete, those for other hosts included."""
    generations: frozenset[int]
    """Generations with files, complete or not."""

    @classmethod
    def of(cls, directory: Path) -> Scan:
        """Looks at a directory."""
        paths = sorted(directory.iterdir())
        found = map(read_meta, paths)
        generations = (generation_of(path.name) for path in paths)
        return cls(
            directory,
            tuple(file for file in found if file is not None),
            frozenset(each for each in generations if each is not None),
        )

    @cached_property
    def states(self) -> dict[Version, list[Found]]:
        """States of which this host has all shares, each with one file of each share."""
        # What is kept for processes of other hosts is no share of this one.
        return complete_copies(file for file in self.files if "ward" not in file.meta)

    @property
    def versions(self) -> list[Version]:
        """Versions of these states, latest first."""
        return sorted(self.states, reverse=True)

    def writers(self) -> set[Writer]:
        """Live processes that have written these files."""
        found = {Writer(*file.meta["writer"]) for file in self.files}
        return {writer for writer in found if not process_gone(*writer)}

    # One state -----------------------------------------------------------------------------

    def of_version(self, version: Version) -> list[Found]:
        """All files of a state."""
        return [file for file in self.files if file.version == version]

    def read(self, version: Version, *, pieces: bool = True) -> Snapshot:
        """Reads a state that is here completely.

        Args:
            version: Which state it is.
            pieces: Whether to read the pieces of split tensors that are here, too.

        Raises:
            LookupError: It is not, or not any more.
        """
        files = self.states.get(version)
        if files is None:
            raise LookupError(f"{self.directory} has no complete copy of {version}")
        tree: dict[str, Json] | None = None
        tensors: dict[str, Held] = {}
        for file in files:
            tree = file.meta.get("tree", tree)
            own = set(names(file.meta.get("own")))
            whole = {p for p, _ in file.placements() if p[1] is None and p[0] not in own}
            found = _read(file, whole.__contains__)
            tensors.update((name, tensor) for (name, _), tensor in found.items())
        for file in self.of_version(version) if pieces else ():
            if file.host == files[0].host:
                _add_shards(tensors, file)
        assert tree is not None, "share 0 has the tree"
        return Snapshot(version, tree, tensors)

    def offer(self, version: Version) -> Offer:
        """The pieces of split tensors that are here of a state."""
        return offer_of(self.directory, self.of_version(version))

    def sums(self, version: Version) -> dict[int, Mapping[str, Json]]:
        """Sums of the replicas of this host in this version, by replica."""
        parts = (f.meta["sums"] for f in self.of_version(version) if "sums" in f.meta)
        return {part["replica"]: part["of"] for part in parts}

    def own(self, version: Version) -> dict[int, OwnState]:
        """Own states of the replicas of this host in this version, by replica.

        Raises:
            LookupError: A file has changed.
        """
        found = {}
        for file in self.of_version(version):
            if "own" in file.meta:
                tree = file.meta["own"]
                mine = {(name, None) for name in names(tree)}
                pieces = _read(file, mine.__contains__)
                own = OwnState(tree, {name: tensor for (name, _), tensor in pieces.items()})
                found[int(file.meta["sums"]["replica"])] = own
        return found


def _read(file: Found, wanted: Callable[[Piece], bool]) -> dict[Piece, Tensor]:
    return read_unchanged(file, lambda: read_pieces(file, wanted))


def _add_shards(tensors: dict[str, Held], file: Found) -> None:
    """Adds the pieces of split tensors that a file has."""
    if all(placement is None for (_, placement), _ in file.placements()):
        return
    for (name, placement), tensor in _read(file, lambda piece: piece[1] is not None).items():
        assert placement is not None
        present = tensors.get(name)
        before = present.shards if isinstance(present, Sharded) else ()
        shards = (*before, Shard(placement, tensor))
        tensors[name] = Sharded(placement.shape, tensor.dtype, shards)
